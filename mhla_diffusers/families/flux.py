"""Flux.1: ``FluxTransformer2DModel``.

Joint attention over 512 tokens of text, then the image: first dual-stream blocks, each stream with its own projections,
then single-stream blocks. The transformer takes packed latents, 2x2 to a token, and the grid coordinates (ids) of every
token, from which it computes RoPE over picture, row and column. Default blocks are those of all images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import image_model, tiny_image
from .values import compiled_for, keep_with, read_once

_CLASS = "FluxTransformer2DModel"
_TEXT_TOKENS = 512
_DEV = {"guidance_embeds": True}
_TINY = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "pooled_projection_dim": 12, "in_channels": 16}


@dataclass(kw_only=True, eq=False)
class FluxForward(Forward):
    """Flux's forward, which takes ids of every token."""

    fixed_patch: tuple[int, ...] | None = (2, 2)
    packs_latents: bool = True
    takes_sigma: bool = True

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the ids, once per tensor; ValueError for ids of more than one picture."""
        return grid_of_ids(arguments["img_ids"])

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the ids of tokens and text."""
        grid = self.token_grid(transformer, latents)
        ids, text_ids = self.ids(latents, grid, conditioning["encoder_hidden_states"].shape[1])
        keep_with(ids, grid)  # known here, and the ids may be on the meta device
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {"img_ids": ids, "txt_ids": text_ids, **arguments}

    def ids(self, latents: Tensor, grid: tuple[int, ...], text_tokens: int) -> tuple[Tensor, Tensor]:
        """Return picture, row and column of the grid's tokens, (N, 3), and zeros for the text."""
        rows, columns = (torch.arange(size).float() for size in grid)
        places = torch.cartesian_prod(torch.zeros(1), rows, columns)
        return places.to(latents), torch.zeros(text_tokens, 3).to(latents)


FLUX = Family(
    name="flux",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        feed_forwards=("ff", "ff_context", "proj_mlp", "proj_out"),
        adapter=JointAdapter(context_first=True),
        class_path="FluxAttention",
        dispatches=True,
        extra=(None, 0),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=FluxForward(
        guidance=3.5,  # the pipeline's default
        # T5's tokens and CLIP's pooled text
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),
            Condition("pooled_projections", ("pooled_projection_dim",), output=1),
        ),
    ),
    trained=Training(),
    models=(
        image_model("flux-dev", _CLASS, 24, 128, 19, settings=_DEV, more_layers={"num_single_layers": 38}),
        tiny_image("flux", _CLASS, _TINY, head_dim=16, layers=2, more_layers={"num_single_layers": 1}),
    ),
)


def grid_of_ids(ids: Tensor, first: int = 0) -> tuple[int, int]:
    """Return the height and width of ids of one picture, which begin with token ``first``; see :func:`_grid_of_ids`."""
    height, width = _grid_of_ids(ids, first)
    compiled_for((height, width), lambda: (_lengths(ids, first) == ids.new_tensor([width, height])).all())
    return height, width


def _lengths(ids: Tensor, first: int) -> Tensor:
    """Count the tokens of the first token's row and of its column: (2,)."""
    tokens = (ids[0] if ids.ndim == 3 else ids)[first:]
    return (tokens == tokens[0]).sum(dim=0)[1:3]


@read_once
def _grid_of_ids(ids: Tensor, first: int) -> tuple[int, int]:
    """Return the height and width of ids (N, 3 or more) or (B, N, 3 or more): picture, row and column of every token.

    Counts the tokens of the first token's row and of its column. A second picture adds to both counts, and bfloat16
    rounds no larger number to 0.
    """
    width, height = _lengths(ids, first).tolist()
    if height * width != ids.shape[-2] - first:
        raise ValueError(
            f"Ids of {ids.shape[-2] - first} tokens, {width} in a first row and {height} in a first column, are not "
            "one picture in raster order: MHLA takes no others as its context, as in Flux Kontext "
            "and in Flux.2 with reference pictures. Run this pipeline without the patch: remove_mhla(pipe)."
        )
    return height, width
