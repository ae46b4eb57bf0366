"""SkyReels-V2: ``SkyReelsV2Transformer3DModel``, Wan with text-, image-to-video and diffusion forcing.

Tokens and RoPE are Wan's. Diffusion forcing gives every frame its own time. With ``causal_block_size`` above 1 its
pipelines also mask all later blocks of frames. A patch with ``causal="block"`` and the same block length needs no mask,
because it never sees a later block. The KV states of any other patch have no order. Default blocks are as long as
Wan's, 354 tokens each at 540p and 97 frames.
"""

from typing import Any

import torch
from torch import Tensor

from ..config import CausalConfig, PatchConfig
from .adapters import Arguments, AttentionAdapter, without
from .family import Family, Kwargs, Sample
from .models import Clip, Model
from .wan import WanForward, WanTraining, grid_of_table, tiny_wan, wan_attention, wan_model

_CLASS = "SkyReelsV2Transformer3DModel"
_AT_24_FPS = 1
"""What models that take frames per second get for any rate but 16."""


class SkyReelsV2Adapter(AttentionAdapter):
    """Wan's, reading diffusion forcing's mask as a block length."""

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return None for a block-causal mask, which :meth:`check_order` compares with the patch."""
        is_block_causal = self.frames_in_block(arguments) is not None
        return super().key_mask(without(arguments, "attention_mask") if is_block_causal else arguments)

    def frames_in_block(self, arguments: Arguments) -> int | None:
        """Return the frames per block of a block-causal mask (1, 1, N, N); None for a mask of keys or none.

        Raises:
            ValueError: another mask that differs between queries.
        """
        mask, rotary = arguments.get("attention_mask"), arguments.get("rotary_emb")
        if mask is None or mask.ndim != 4 or mask.shape[2] != mask.shape[3] or rotary is None:
            return None
        if not hasattr(mask, "frames_in_block"):  # all layers of a forward are handed the same mask
            frames = grid_of_table(rotary[1])[0]
            step = max(1, mask.shape[2] // frames)
            between = mask[0, 0, ::step, ::step].cpu()  # the model repeats what it lets frames see for all their tokens
            length = int(between[0].sum())
            block = torch.arange(len(between)) // max(1, length)
            if mask.dtype != torch.bool or not torch.equal(between, block[:, None] >= block):
                raise ValueError(
                    f"SkyReels-V2's attention got a mask {tuple(mask.shape)} of {mask.dtype} that is not block-causal "
                    f"over {frames} frames and differs between queries, for which MHLA has no form."
                )
            mask.frames_in_block = length
        found: int = mask.frames_in_block
        return found

    def check_order(self, arguments: Arguments, config: PatchConfig | None) -> None:
        """Raise ValueError unless a patch is causal with the mask's block length."""
        length = self.frames_in_block(arguments)
        if length is None or (
            isinstance(config, CausalConfig) and (config.causal, config.block_length) == ("block", length)
        ):
            return
        order = "sees all frames"
        if isinstance(config, CausalConfig):
            order = f"has causal={config.causal!r} with block_length={config.block_length}"
        raise ValueError(
            f"SkyReels-V2's diffusion forcing masks later blocks of {length} latent frames from every frame, since the "
            f"pipeline was called with causal_block_size={length}, and this patch {order}: its KV states know no mask "
            f"that differs between queries. Patch with causal='block', block_length={length}, which needs no mask; or "
            "call the pipeline with causal_block_size=1, with any ar_step, for which there is none. Left out, it is "
            "that of the last call, transformer.config.num_frame_per_block. The mask goes to all layers, so no choice "
            "of layers=[...] keeps it away."
        )


def _model(name: str, heads: int, ffn_dim: int, layers: int) -> Model:
    own = {"transformer": _CLASS, "blocks": (8, 3, 6), "sizes": ((544, 960), (720, 1280)), "frames": 97}
    return wan_model(name, heads, ffn_dim, layers, **own)


class _Forward(WanForward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass times of frames as diffusion forcing's, and the frame rate to models that take it."""
        arguments: Kwargs = {"hidden_states": latents, "timestep": timestep, **conditioning}
        if timestep.ndim == 2:
            frames = self.token_grid(transformer, latents)[0]
            arguments["timestep"] = timestep[:, :: timestep.shape[1] // frames]
            arguments["enable_diffusion_forcing"] = True
        if transformer.config.inject_sample_info:
            arguments["fps"] = [_AT_24_FPS] * len(latents)
        return arguments


SKYREELS_V2 = Family(
    name="skyreels_v2",
    transformers=(_CLASS,),
    attention=wan_attention("transformer_skyreels_v2.SkyReelsV2Attention", SkyReelsV2Adapter()),
    forward=_Forward(times_per_frame=(_CLASS,)),
    trained=WanTraining(),
    mhla_blocks=(8, 3, 6),
    default_clip=Clip(frames=97, fps=24.0, sizes=((544, 960),)),
    # numbers of diffusers' script that converts the checkpoints
    models=(
        _model("skyreels-v2-1.3b", 12, 8960, 30),
        _model("skyreels-v2-14b", 40, 13824, 40),
        tiny_wan("skyreels_v2", _CLASS),
    ),
)
