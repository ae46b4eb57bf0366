"""Wan: ``WanTransformer3DModel`` (2.1 text- and image-to-video, 2.2 A14B, 2.2 TI2V-5B) and VACE.

Self-attention is softmax with RMSNorm over all channels of query and key and 3-D RoPE, handed to every attention as
``rotary_emb``. A VACE transformer has its control blocks in a second list, ``vace_blocks``; their layers count on after
the main ones. A Wan 2.2 A14B pipeline has two transformers, which are patched alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..attention.rotary import Rotary
from ..config import MHLAConfig
from .base import Family, Sample
from .processes import DiffusionProcess, FlowMatching
from .sizes import Clip, Model

_TEXT_TOKENS = 512
"""Length that the pipeline pads text to in training; its text is not masked, so the length matters."""


_LAID_OUT: set[tuple[int, ...]] = set()
"""Shapes of tables before they were flattened that were seen to be the token grid."""


def _grid_of_sines(table: torch.Tensor) -> tuple[int, ...]:
    """Token grid of RoPE's sines, (1, N, 1, D)."""
    head_dim = table.shape[-1]
    side = 2 * (head_dim // 6)
    # the first channel of an axis is sin(coordinate), which no coordinate but 0 makes 0
    at_zero = table[0, :, 0, [0, head_dim - 2 * side, head_dim - side]] == 0
    along = [at_zero[:, [axis for axis in range(3) if axis != counted]].all(dim=1).sum() for counted in range(3)]
    return tuple(torch.stack(along).tolist())


def _model(name: str, heads: int, ffn_dim: int, layers: int) -> Model:
    return Model(
        name,
        "WanTransformer3DModel",
        {"num_attention_heads": heads, "ffn_dim": ffn_dim},
        heads,
        128,
        layers,
        blocks=(7, 3, 5),
        stride=8,
        patch=2,
        sizes=((480, 832), (720, 1280)),
        frames=81,
        temporal_stride=4,
        # 480p is 480x800 here, the paper's setting (Sec. 5.3)
        grids={"480p": (21, 30, 50), "720p": (21, 45, 80)},
    )


_TINY = Model(
    "tiny-wan",
    "WanTransformer3DModel",
    {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "text_dim": 32, "freq_dim": 16},
    2,
    12,
    3,
    blocks=(1, 2, 2),
    stride=8,
    patch=2,
    sizes=((64, 96),),
    frames=9,
    temporal_stride=4,
)


class WanFamily(Family):
    """Video transformers with a (frames, height, width) token grid."""

    name = "wan"
    transformers = ("WanTransformer3DModel", "WanVACETransformer3DModel")
    axes = 3
    block_lists = ("blocks", "vace_blocks")
    # 50 tokens per tile at 480p and 81 frames, 120 at 720p
    default_config = MHLAConfig(blocks=(7, 3, 5), mixing_per_head=True, exact="content", exact_tiles=(7, 9, 10))
    dispatches_attention = True
    default_clip = Clip(frames=81, fps=16.0, sizes=((480, 832),))
    measured_unasked = True
    models = (_model("wan2.1-1.3b", 12, 8960, 30), _model("wan2.1-14b", 40, 13824, 40), _TINY)

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Of as many frames as the pipeline makes, which rounds to one more than its temporal stride divides."""
        stride = self.temporal_stride(pipe)
        frames = clip.frames if clip.frames % stride == 1 else clip.frames // stride * stride + 1
        return super().grid_of_clip(pipe, transformer, replace(clip, frames=frames))

    def recognises_self_attention(self, attn: Any) -> bool:
        """``WanAttention``."""
        return type(attn).__name__ == "WanAttention"

    def grid_of_attention(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Read off the three coordinates of every token, whose sines the table holds.

        The table is a flattened (frames, height, width, D), of which it remains a view outside of inference mode. Once
        the coordinates were seen to lie as this shape says, the shape tells by itself, and no device is waited for.
        """
        if not self.recognises_self_attention(attn):
            return None
        table: Any = rotary[1]
        laid_out = tuple(table._base.shape[:-1]) if table._base is not None else None
        if laid_out in _LAID_OUT:
            return laid_out
        if not hasattr(table, "token_grid"):  # all layers of a forward are handed the same table
            table.token_grid = _grid_of_sines(table)
        if table.token_grid == laid_out:
            _LAID_OUT.add(table.token_grid)
        grid: tuple[int, ...] = table.token_grid
        return grid

    def exact_tiles(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Three latent frames by five rows by a tenth of the width: 75 tokens at 480p and 120 at 720p.

        Both fill most of a block of 128 queries, which a longer tile would exceed.
        """
        frames, height, width = grid
        return math.ceil(frames / 3), math.ceil(height / 5), min(10, math.ceil(width / 3))

    def rotary_axes(self, head_dim: int) -> tuple[int, ...]:
        """As ``WanRotaryPosEmbed`` shares them out: a third each, frames with what is left over."""
        side = 2 * (head_dim // 6)
        return head_dim - 2 * side, side, side

    def self_attention_processor(self) -> Any:
        """``WanAttnProcessor``."""
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        return WanAttnProcessor()

    def cross_attention_processor(self) -> Any:
        """``WanAttnProcessor`` as well."""
        return self.self_attention_processor()

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching."""
        return FlowMatching(flow_shift)

    def clip_arguments(self, pipe: Any, clip: Clip) -> dict[str, Any]:
        """Frames and size; the pipeline adds a frame to a number that its temporal stride divides, as 1 always does."""
        arguments = super().clip_arguments(pipe, clip)
        if pipe.vae_scale_factor_temporal == 1:
            arguments["num_frames"] -= 1
        return arguments

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (512, channels): UMT5 embeddings, padded."""
        chosen = {"max_sequence_length": _TEXT_TOKENS, **(settings or {})}
        embeddings, _ = self.encode_text(pipe, prompt, chosen)
        return {"encoder_hidden_states": embeddings[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (512, channels)."""
        return {"encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.text_dim, device="meta")}
