"""Flux.1: ``FluxTransformer2DModel``.

Joint attention with the text before the image: first dual-stream blocks, each stream with its own projections, then
single-stream blocks. The transformer takes packed latents, 2x2 to a token, and the grid coordinates (ids) of every
token, from which it computes RoPE.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .adapters import JointAdapter
from .family import Condition, Sample
from .models import Model, image_model, tiny_image
from .styles import PackedImageFamily, keep_with, kept_with

_CLASS = "FluxTransformer2DModel"
_TEXT_TOKENS = 512
_TINY = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "pooled_projection_dim": 12, "in_channels": 16}


class FluxFamily(PackedImageFamily):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "flux"
    transformers: ClassVar[tuple[str, ...]] = (_CLASS,)
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    adapter = JointAdapter(context_first=True)
    processor = "diffusers.models.transformers.transformer_flux.FluxAttnProcessor"
    attention_class: ClassVar[str | None] = "FluxAttention"
    extra_tokens = _TEXT_TOKENS
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ff_context", "proj_mlp", "proj_out")
    forward_names: ClassVar[tuple[str, ...]] = (
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "img_ids",
        "txt_ids",
        "guidance",
    )
    # T5's tokens and CLIP's pooled text
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition("encoder_hidden_states", (_TEXT_TOKENS, "joint_attention_dim")),
        Condition("pooled_projections", ("pooled_projection_dim",), output=1),
    )
    guidance: ClassVar[float | None] = 3.5  # the pipeline's default
    models: ClassVar[tuple[Model, ...]] = (
        image_model(
            "flux-dev",
            _CLASS,
            24,
            128,
            19,
            settings={"guidance_embeds": True},
            more_layers={"num_single_layers": 38},
            passes=1,
        ),
        tiny_image("flux", _CLASS, head_dim=16, layers=2, more_layers={"num_single_layers": 1}, settings=_TINY),
    )

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read from the ids, once per tensor.

        Raises:
            ValueError: ids of more than one picture.
        """
        ids = arguments["img_ids"]
        grid = _grid_of_ids(ids)
        if torch.compiler.is_compiling():  # the graph holds the grid, so other ids of as many tokens must not run in it
            last = ids.new_tensor([size - 1 for size in grid])
            torch._assert_async((ids[..., -1, 1:3] == last).all(), "compiled for another token grid")
        return grid

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Adds the ids of tokens and text."""
        grid = self.token_grid(transformer, latents)
        ids, text_ids = self.ids(latents, grid, conditioning["encoder_hidden_states"].shape[1])
        keep_with(ids, grid)  # known here, and the ids may be on the meta device
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        return {"img_ids": ids, "txt_ids": text_ids, **arguments}

    def ids(self, latents: torch.Tensor, grid: tuple[int, ...], text_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 3) of a grid's tokens, picture, row and column, and of the text, zeros."""
        rows, columns = (torch.arange(size).float() for size in grid)
        places = torch.cartesian_prod(torch.zeros(1), rows, columns)
        return places.to(latents), torch.zeros(text_tokens, 3).to(latents)


def _grid_of_ids(ids: Any) -> tuple[int, int]:
    """(height, width) of ids (N, 3 or more) or (B, N, 3 or more): picture, row and column of every token.

    Cached on the tensor, because a pipeline passes the same one in every step.
    """
    return kept_with(ids, _read_grid)


def _read_grid(ids: torch.Tensor) -> tuple[int, int]:
    """Count the tokens of the first row and of the first column.

    A second picture adds to both counts, and bfloat16 rounds no larger number to 0.
    """
    _, width, height, *_ = ((ids[0] if ids.ndim == 3 else ids) == 0).sum(dim=0).tolist()
    if height * width != ids.shape[-2]:
        raise ValueError(
            f"img_ids of {ids.shape[-2]} tokens, {width} in a first row and {height} in a first column, are not one "
            "picture: MHLA takes no others as its context, as in Flux Kontext and in Flux.2 with reference pictures. "
            "Run this pipeline without the patch: remove_mhla(pipe)."
        )
    return height, width


# the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
vars(_grid_of_ids)["_dynamo_marked_constant"] = True
