"""Ideogram 4: ``Ideogram4Transformer2DModel``. A pipeline has two, one with text and one without.

One sequence holds padding, up to 2,048 tokens of text and the image; segments keep padding apart, and whatever else is
packed into a row. All tokens of padding are alike, so each attends to its own value. RoPE pairs the halves of the
channels. Default blocks are those of all images.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.rope import Rotary
from .adapters import ONE_SEQUENCE, Arguments, AttentionInputs, JointAdapter, Projected
from .family import Attention, Condition, Family, Forward, Kwargs, Sample
from .models import Clip, image_model, squares, tiny_image
from .packed_videos import grid_of_places, lies_on
from .packing import pack
from .values import WithoutValues, compiled_for, keep_with, read_once

_CLASS = "Ideogram4Transformer2DModel"
_TEXT_TOKENS = 2048
_IMAGE, _TEXT, _FIRST_PLACE = 2, 3, 65536
"""Indicators of a token, and row and column of the first of an image."""
_TINY: dict[str, Any] = {"in_channels": 16, "intermediate_size": 32, "adaln_dim": 8, "llm_features_dim": 13 * 16}
_TINY |= {"mrope_section": (2, 2, 2)}


class Ideogram4Adapter(JointAdapter):
    """All tokens come in one argument, and the mask says which belong together."""

    places = ONE_SEQUENCE
    pairs_halves = True

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and head dim."""
        return int(attn.num_heads), int(attn.head_dim)

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return the keys (B, N) that the last token sees, which is of the image."""
        mask: Tensor = arguments["attention_mask"]
        return mask[:, 0, -1]

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens, given as (B, N, D)."""
        cos, sin = arguments["rotary_emb"]
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, before RoPE."""
        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs[:3])
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected)
        return attn.norm_q(query), attn.norm_k(key), value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Give padding its own value, the mean of values that are all the same."""
        if inputs.key_mask is not None:
            output = output.where(inputs.key_mask[..., None, None], inputs.value)
        return super().project_output(attn, output, inputs)


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the places, once per tensor; ValueError for several images in a row."""
        places, *others = (arguments[name] for name in ("position_ids", "indicator", "segment_ids"))
        grid = _grid_of_rows(places, *others)
        return compiled_for(grid, lambda: lies_on((1, *grid), places[0].T))

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Make one sequence of text and image, without padding, and say what every token is and where."""
        grid, text = self.token_grid(transformer, latents), conditioning["encoder_hidden_states"]
        # a token's channels are slowest by its patch
        image = pack(latents, self.patch(transformer)).unflatten(2, (latents.shape[1], -1)).mT.flatten(2)
        (batch, first, _), tokens = text.shape, image.shape[1]
        on_grid = torch.cartesian_prod(*(torch.arange(size) for size in (1, *grid))) + _FIRST_PLACE
        places = torch.cat([torch.arange(first)[:, None].expand(-1, 3), on_grid]).to(latents.device)
        places = places.expand(batch, -1, -1).clone()
        keep_with(places, grid)  # known here, and the places may be on the meta device
        indicator = torch.full_like(places[..., 0], _TEXT)
        indicator[:, first:] = _IMAGE
        return {
            "hidden_states": functional.pad(image, (0, 0, first, 0)),
            "timestep": timestep,
            "encoder_hidden_states": functional.pad(text, (0, 0, 0, tokens)),
            **{"position_ids": places, "indicator": indicator, "segment_ids": torch.ones_like(indicator)},
        }


@read_once
def _grid_of_rows(places: Tensor, indicator: Tensor, segments: Tensor) -> tuple[int, int]:
    """Read the grid of the image that ends every row, as the pipeline makes them."""
    is_image = indicator == _IMAGE
    tokens = int(is_image[0].sum())
    image, own = places[:, places.shape[1] - tokens :], segments == segments[:, -1:]
    grid = grid_of_places(image[0].T)
    fits = is_image[:, len(is_image[0]) - tokens :].all() & (is_image.sum(dim=1) == tokens).all()
    if grid is None or grid[0] > 1 or not (fits & (image == image[0]).all() & (own | (indicator == 0)).all()):
        raise ValueError(
            "A row does not hold text and, last, one image in raster order, of one size in the batch. Several "
            "samples packed into a row cannot be patched: run one after another, or remove_mhla(transformer)."
        )
    return grid[1], grid[2]


IDEOGRAM4 = Family(
    name="ideogram4",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("layers",),
        attentions=("attention",),
        feed_forwards=("feed_forward",),
        adapter=Ideogram4Adapter(context_first=True),
        dispatches=True,
        extra=(None, 0),
        rows_alike=True,
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        fixed_patch=(2, 2),
        packs_latents=True,
        takes_sigma=True,
        time_is_reversed=True,
        # states of 13 layers of Qwen3-VL
        conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "llm_features_dim")),),
        # RoPE asks for the autocast of its places' device
        without_values=lambda: WithoutValues(lambda tensor: tensor.dtype == torch.int64),
    ),
    trained=(
        "Ideogram 4 takes text and image as one sequence, which its pipeline makes for one size, and mhla encode does "
        "not. apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    default_clip=Clip(frames=1, fps=1.0, sizes=squares(2048)),
    models=(image_model("ideogram-4", _CLASS, 18, 256, 34), tiny_image("ideogram4", _CLASS, _TINY)),
)
