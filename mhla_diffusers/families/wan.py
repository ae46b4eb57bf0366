"""Wan: ``WanTransformer3DModel`` (2.1 text- and image-to-video, 2.2 A14B, 2.2 TI2V-5B) and VACE.

Softmax self-attention over the video alone, with RMSNorm over all channels of query and key, and 3-D RoPE, passed to
every attention as ``rotary_emb``. Default blocks are the paper's, 7x3x5 at 480p. A VACE transformer has a second list
of control blocks, ``vace_blocks``; their layer indices follow the main ones. A Wan 2.2 A14B pipeline has two
transformers, which are patched alike.

An image-to-video transformer takes more channels than it predicts: the noised latents, a mask and the latents of the
first frame. Some also take a vision encoder's embedding of that frame.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attention.rope import Rotary
from .adapters import AttentionAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training, first_picture
from .models import Clip, Model, tiny_video

_CLASS = "WanTransformer3DModel"
_TEXT_TOKENS = 512
"""Length that the pipeline pads text to in training; its text is not masked, so the length matters."""
_TINY = {"ffn_dim": 384, "text_dim": 64, "freq_dim": 256, "in_channels": 4, "out_channels": 4}
_IMAGE_TOKENS = 257
"""Tokens of CLIP ViT-H/14 for a picture: a class token and 16x16 patches."""
_LAID_OUT: set[tuple[int, ...]] = set()
"""Shapes of unflattened tables whose coordinates were checked to be the token grid."""


def wan_model(name: str, heads: int, ffn_dim: int, layers: int, **different: Any) -> Model:
    """Return a configuration of Wan 2.1 text-to-video, with the differences of a relative."""
    usual = {"transformer": _CLASS, "blocks": (7, 3, 5), "sizes": ((480, 832), (720, 1280)), "frames": 81}
    settings = {"ffn_dim": ffn_dim, **different.pop("settings", {})}
    shape = {"heads": heads, "head_dim": 128, "layers": layers, "temporal_stride": 4}
    return Model(name, settings=settings, **{**shape, **usual, **different})


def tiny_wan(name: str, transformer: str, settings: Mapping[str, Any] | None = None, **different: Any) -> Model:
    """Return a tiny configuration of Wan or of a relative, with further settings of its class."""
    tiny = {"ffn_dim": 32, "text_dim": 32, "freq_dim": 16, **(settings or {})}
    return tiny_video(name, transformer, tiny, **different)


class WanAttention(Attention):
    """Wan's self-attentions."""

    def grid_of(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Read the grid from the sines."""
        return grid_of_table(rotary[1]) if self.recognises(attn) else None


@dataclass(kw_only=True, eq=False)
class WanForward(Forward):
    """Wan's forward."""

    axes: int = 3
    conditions: tuple[Condition, ...] = (Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_dim")),)

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Round frames as the pipeline does, to a multiple of its temporal stride plus one."""
        stride, _ = self.strides(pipe.vae.config)
        frames = clip.frames if clip.frames % stride == 1 else clip.frames // stride * stride + 1
        return super().grid_of_clip(pipe, transformer, replace(clip, frames=frames))

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass times of frames per token, as Wan 2.2 TI2V-5B takes them."""
        timestep = self.times_of_tokens(transformer, latents, timestep)
        return super().arguments(transformer, latents, timestep, conditioning)

    def conditioning_shapes(self, config: Any) -> Sample:
        """Add ``encoder_hidden_states_image``, if the transformer takes it."""
        shapes = dict(super().conditioning_shapes(config))
        if config.image_dim is not None:
            shapes["encoder_hidden_states_image"] = torch.empty(_IMAGE_TOKENS, config.image_dim, device="meta")
        return shapes


class WanTraining(Training):
    """How Wan is trained and called."""

    def asked_frames(self, pipe: Any, frames: int) -> int:
        """Leave out the frame that the pipeline adds where its temporal stride divides them, as 1 always does."""
        return frames - (pipe.vae_scale_factor_temporal == 1)

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to 16 channels; for image-to-video to 36, with a mask and the latents of the first frame."""
        latents = super().encode_pixels(pipe, pixels)
        if self.forward.channels(pipe.transformer.config) == latents.shape[1]:
            return latents
        known = torch.ones_like(latents[:, :1, :1]).repeat(1, self.forward.strides(pipe.vae.config)[0], 1, 1, 1)
        first = torch.cat([pixels[:, :, :1], torch.zeros_like(pixels[:, :, 1:])], dim=2)
        return self.beside(pipe, latents, known, super().encode_pixels(pipe, first))

    def encode_picture(self, pipe: Any, pixels: Tensor) -> Sample:
        """Return ``encoder_hidden_states_image`` (tokens, channels) of the first frame, if the transformer takes it."""
        if pipe.transformer.config.image_dim is None:
            return {}
        return {"encoder_hidden_states_image": pipe.encode_image([first_picture(pipe, pixels)])[0]}


def wan_attention(class_path: str, adapter: AttentionAdapter | None = None) -> WanAttention:
    """Return the self-attentions of Wan, or of a relative with a copy of its class."""
    return WanAttention(
        block_lists=("blocks", "vace_blocks"),
        adapter=adapter or AttentionAdapter(),
        class_path=class_path,
        dispatches=True,
    )


WAN = Family(
    name="wan",
    transformers=(_CLASS, "WanVACETransformer3DModel"),
    attention=wan_attention("transformer_wan.WanAttention"),
    # those of VACE take one time for all frames, and so do relatives
    forward=WanForward(times_per_frame=(_CLASS,)),
    trained=WanTraining(),
    mhla_blocks=(7, 3, 5),
    default_clip=Clip(frames=81, fps=16.0, sizes=((480, 832),)),
    models=(
        wan_model("wan2.1-1.3b", 12, 8960, 30, source="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        wan_model("wan2.1-14b", 40, 13824, 40, source="Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        # the transformer of the tiny pipeline of this name, with RoPE for larger sizes
        tiny_wan("wan", _CLASS, _TINY, heads=3, head_dim=32, layers=4),
    ),
)


def grid_of_table(table: Any) -> tuple[int, ...]:
    """Return the token grid of RoPE's sines, (1, N, 1, D), read from the three coordinates of every token.

    The table is a flattened (frames, height, width, D), and outside of inference mode a view of it. Once the
    coordinates have been checked against that shape, the shape alone is enough, and nothing waits for the device.
    """
    laid_out = tuple(table._base.shape[:-1]) if table._base is not None else None
    if laid_out in _LAID_OUT:
        return laid_out
    if not hasattr(table, "token_grid"):  # all layers of a forward get the same table
        # an axis has a third of the channels; that of frames also the remainder
        height = 2 * (table.shape[-1] // 6)
        frames = table.shape[-1] - 2 * height
        # the first channel of an axis is sin(coordinate), which is 0 only for coordinate 0
        at_zero = table[0, :, 0, [0, frames, frames + height]] == 0
        along = [at_zero[:, [axis for axis in range(3) if axis != counted]].all(dim=1).sum() for counted in range(3)]
        table.token_grid = tuple(torch.stack(along).tolist())
    if table.token_grid == laid_out:
        _LAID_OUT.add(table.token_grid)
    grid: tuple[int, ...] = table.token_grid
    return grid
