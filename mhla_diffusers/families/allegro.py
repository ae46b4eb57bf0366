"""Allegro: ``AllegroTransformer3DModel``.

Softmax self-attention over the video alone. RoPE gives a third of the channels to each axis and pairs the halves of a
third. Default blocks cut 22x45x80 tokens, 88 frames at 720p, into about three latent frames by 15 by 16 tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.rope import Rotary
from .adapters import Arguments, AttentionAdapter, Projected
from .family import Attention, Family, Forward, Kwargs, Sample, masked_text
from .models import Clip, Model, tiny_video

_CLASS = "AllegroTransformer3DModel"
_PROCESSOR = "diffusers.models.attention_processor.AllegroAttnProcessor2_0"
_TEXT_TOKENS = 512
_TINY: dict[str, Any] = {"cross_attention_dim": 24, "caption_channels": 32}


class AllegroAdapter(AttentionAdapter):
    """Channels that RoPE pairs become neighbours; its tables are of single axes, with the place of every token."""

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (1, N, 1, D), for channels as :meth:`project` orders them."""
        if "rotary_emb" not in arguments:
            return None
        tables, places = arguments["rotary_emb"]
        found = [[functional.embedding(at, x) for x in pair] for at, pair in zip(places, tables, strict=True)]
        cos, sin = (_in_pairs(torch.cat(axes, dim=-1))[:, :, None] for axes in zip(*found, strict=True))
        return cos, sin

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Reorder the channels of query and key."""
        query, key, value = super().project(attn, arguments)
        return _in_pairs(query), _in_pairs(key), value


class _Forward(Forward):
    def latent_frames(self, config: Any, frames: int, stride: int) -> int:
        """Count the first frame of an odd number as a latent frame of its own."""
        return frames // stride + frames % 2

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add RoPE as the pipeline makes it."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

        (frames, *size), config = self.token_grid(transformer, latents), transformer.config
        scale = config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w
        made = get_3d_rotary_pos_embed_allegro(
            config.attention_head_dim, ((0, 0), size), size, frames, scale, device=latents.device
        )
        places = torch.cartesian_prod(*(axis.long() for axis in made[3:])).T[:, None]
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "image_rotary_emb": (made[:3], tuple(places))}


ALLEGRO = Family(
    name="allegro",
    transformers=(_CLASS,),
    attention=Attention(
        attentions=("attn1",),
        adapter=AllegroAdapter("image_rotary_emb"),
        processor=_PROCESSOR,
        cross_processor=_PROCESSOR,
    ),
    forward=_Forward(
        axes=3,
        # T5's
        conditions=masked_text(_TEXT_TOKENS, "caption_channels", torch.int64),
    ),
    trained=(
        "diffusers' autoencoder of Allegro encodes and decodes in tiles of one size alone, which mhla encode does not "
        "do. apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=(7, 3, 5),
    default_clip=Clip(frames=88, fps=15.0, sizes=((720, 1280),)),
    models=(
        # whose 22 latent frames are those of 88
        Model("allegro", _CLASS, 24, 96, 32, (7, 3, 5), ((720, 1280),), frames=85, temporal_stride=4),
        tiny_video("allegro", _CLASS, _TINY),
    ),
)


def _in_pairs(x: Tensor) -> Tensor:
    """Return channels i and i + D / 6 of each third of D as neighbours."""
    return x.unflatten(-1, (3, 2, -1)).transpose(-1, -2).flatten(-3)
