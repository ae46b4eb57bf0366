"""SANA-Video: ``SanaVideoTransformer3DModel``, text- and image-to-video.

SANA's linear attention with φ = ReLU over a video, with 3-D RoPE after the feature map, in the numerator only. This
equals MHLA with one block. Query and key are normed across heads; text is encoded as in SANA. Default blocks have three
latent frames by ten tokens each way at 81 frames of 480x832 pixels, Wan's grid.
"""

from dataclasses import replace
from typing import Any

from .family import Family, Forward
from .models import Clip, Model, tiny_video
from .processes import DiffusionProcess, FlowMatching
from .sana import SANA, SanaTraining

_CLASS = "SanaVideoTransformer3DModel"
_TINY = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24}
_TINY |= {"caption_channels": 8, "rope_max_seq_len": 32}
_REAL: dict[str, Any] = {"frames": 81, "temporal_stride": 4}
_REAL["settings"] = {"mlp_ratio": 3.0}  # as diffusers' conversion script sets it; the rest are the class's defaults


class _Training(SanaTraining):
    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return flow matching."""
        return FlowMatching(flow_shift)


SANA_VIDEO = Family(
    name="sana_video",
    transformers=(_CLASS,),
    attention=replace(
        SANA.attention,
        processor="diffusers.models.transformers.transformer_sana_video.SanaLinearAttnProcessor3_0",
        cross_processor="diffusers.models.transformers.transformer_sana_video.SanaAttnProcessor2_0",
        # norms and rotates query and key as SANA-Video does
        softmax_processor="diffusers.models.transformers.transformer_wan.WanAttnProcessor",
    ),
    # the largest value of its time is that of the noised tokens
    forward=Forward(axes=3, conditions=SANA.forward.conditions),
    trained=_Training(),
    mhla_blocks=(7, 3, 5),
    default_clip=Clip(frames=81, fps=16.0, sizes=((480, 832),)),
    models=(
        Model("sana-video-2b", _CLASS, 20, 112, 20, (7, 3, 5), ((480, 832),), **_REAL),
        tiny_video("sana_video", _CLASS, _TINY),
    ),
)
