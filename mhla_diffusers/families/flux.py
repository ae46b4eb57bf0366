"""Flux.1: ``FluxTransformer2DModel``.

Joint attention, the text before the image: first blocks of two streams, each with projections of its own, then blocks
of one. The transformer takes packed latents, 2x2 to a token, and ids that tell where on the grid each token lies; RoPE
comes from these.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import MHLAConfig
from .adapters import JointAdapter
from .kept import keep_with, kept_with
from .packed import PackedFamily
from .sizes import GRIDS_OF_LARGE_SQUARES, LARGE_SQUARES, Model
from .structure import Sample

_TEXT_TOKENS = 512
_GUIDANCE = 3.5
"""Default of the pipeline, for models that embed it."""


def _model(name: str, heads: int, layers: int, **settings: Any) -> Model:
    settings = {"num_attention_heads": heads, **settings}
    return Model(
        name,
        "FluxTransformer2DModel",
        settings,
        heads,
        128,
        layers,
        (4, 4),
        stride=8,
        patch=2,
        sizes=LARGE_SQUARES,
        grids=GRIDS_OF_LARGE_SQUARES,
        more_layers={"num_single_layers": 2 * layers},
        passes=1,
    )


_TINY = Model(
    "tiny-flux",
    "FluxTransformer2DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": (4, 6, 6),
        "joint_attention_dim": 32,
        "pooled_projection_dim": 12,
        "in_channels": 16,
    },
    2,
    16,
    2,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
    more_layers={"num_single_layers": 1},
)


class FluxFamily(PackedFamily):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "flux"
    transformers = ("FluxTransformer2DModel",)
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    attentions = ("attn",)
    adapter = JointAdapter(context_first=True)
    extra_tokens = _TEXT_TOKENS
    feed_forwards = ("ff", "ff_context", "proj_mlp", "proj_out")
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")
    dispatches_attention = True
    forward_names = (
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "img_ids",
        "txt_ids",
        "guidance",
    )
    models = (_model("flux-dev", 24, 19, guidance_embeds=True), _TINY)

    def self_attention_processor(self) -> Any:
        """``FluxAttnProcessor``."""
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

        return FluxAttnProcessor()

    def recognises_self_attention(self, attn: Any) -> bool:
        """``FluxAttention``."""
        return type(attn).__name__ == "FluxAttention"

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read off the ids, once for every tensor of them.

        Raises:
            ValueError: ids of more than one picture.
        """
        ids = arguments["img_ids"]
        grid = _grid_of_ids(ids)
        if torch.compiler.is_compiling():  # the graph holds the grid, so other ids of as many tokens must not run in it
            last = ids.new_tensor([size - 1 for size in grid])
            torch._assert_async((ids[..., -1, 1:] == last).all(), "compiled for another token grid")
        return grid

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Packed latents, the ids of their places, and zeros as ids of the text."""
        text = conditioning["encoder_hidden_states"]
        arguments = {
            "hidden_states": self.packed(latents),
            "timestep": timestep,
            "img_ids": _ids_of_grid(self.token_grid(transformer, latents), latents),
            "txt_ids": torch.zeros(text.shape[1], 3).to(latents),
            **conditioning,
        }
        if transformer.config.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, _GUIDANCE, dtype=latents.dtype)
        return arguments

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (512, channels) of T5, and ``pooled_projections`` (channels,) of CLIP."""
        text, pooled, _ = self.encode_text(pipe, prompt, {"max_sequence_length": _TEXT_TOKENS, **(settings or {})})
        return {"encoder_hidden_states": text[0], "pooled_projections": pooled[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (512, channels) and ``pooled_projections`` (channels,)."""
        return {
            "encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.joint_attention_dim, device="meta"),
            "pooled_projections": torch.empty(transformer.pooled_projection_dim, device="meta"),
        }


def _ids_of_grid(grid: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """(N, 3) on the device and in the type of ``like``."""
    height, width = grid
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(height).float(), torch.arange(width).float())
    ids = places.to(like)
    keep_with(ids, (height, width))  # known here, and on the meta device nothing could be read
    return ids


def _grid_of_ids(ids: Any) -> tuple[int, int]:
    """(height, width) of ids (N, 3) or (B, N, 3): picture, row and column of every token.

    Kept with the tensor, which a pipeline hands over in every step.
    """
    return kept_with(ids, _read_grid)


def _read_grid(ids: torch.Tensor) -> tuple[int, int]:
    """Told by the tokens in the first row and those in the first column.

    Another picture has such ones of its own, and bfloat16 does not round larger numbers to 0.
    """
    _, width, height = ((ids[0] if ids.ndim == 3 else ids) == 0).sum(dim=0).tolist()
    if height * width != ids.shape[-2]:
        raise ValueError(
            f"img_ids of {ids.shape[-2]} tokens, {width} in a first row and {height} in a first column, are not one "
            "picture: MHLA takes no others as its context, as in Flux Kontext. Run these without the patch: "
            "remove_mhla(pipe)."
        )
    return height, width


# the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
vars(_grid_of_ids)["_dynamo_marked_constant"] = True
