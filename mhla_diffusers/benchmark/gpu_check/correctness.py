"""The step ``correctness``: output and every gradient at full size of a tile, against the float64 reference."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...attention import Call, initial_mixing, mhla_attention, reference_attention
from ...attention.rotary import rotary_table
from ...devices import FLOAT_TYPES
from ...families import Model
from ..correctness import (
    LARGEST_ERROR,
    LARGEST_GRADIENT_ERROR,
    OUTPUT,
    beside_exact_tiles,
    differentiate,
    make_inputs,
    relative_error,
)
from ..lists import draw_tiles
from ..models import family_of_model, models
from ..shapes import Shape, shapes
from ..timing import free_bytes
from .findings import Measured, Notebook

SHAPES = {
    "wan2.1-1.3b-480p": "wan2.1-1.3b",
    "wan2.1-1.3b-720p": "wan2.1-1.3b",
    "dit-xl-2-1024px": "dit-xl-2",
    "sana-1.6b-2048px": "sana-1.6b",
}
"""Shape → its model: head dims 128, 72 and 32."""
SMALL = Shape("small", (2, 4, 4), (1, 2, 2), 1, 16, tiles=(1, 2, 2), share=0.25)
"""What the interpreter is through with in seconds."""
_KINDS = ("plain", "everything", "exact tiles and everything")
"""Everything: RoPE, key mask, output norm and output gate."""
_HEADS = 2
_MOST_TOKENS = 4096
_REFERENCE_MATRICES = 24
"""N x N matrices of float64 per head that the reference and its backward pass hold, and some more."""
_SHARE = 0.25
"""Of exact pairs of tiles, which are few on a small grid."""
_TO_EAGER = 1.5
"""Where terms cancel, the eager backend has a large error too: so many times its error is allowed."""
_OF_HEADS = {"far_field_weight": 10, "mean_bias": 10}
"""Single numbers per head, each a sum over all tokens in which most cancels, from weights that kernels round."""


@dataclass(frozen=True)
class Problem:
    """One attention with everything it is given."""

    tensors: dict[str, torch.Tensor]
    """What takes gradients, by the names of :func:`mhla_attention`."""
    settings: dict[str, Any]
    """Its other arguments."""
    upstream: torch.Tensor
    """Gradient of the output."""

    def attend(self, backend: str) -> dict[str, torch.Tensor]:
        """Output and gradients of a backend."""
        return differentiate(partial(mhla_attention, backend=backend, **self.settings), self.tensors, self.upstream)

    def reference(self) -> dict[str, torch.Tensor]:
        """Output and gradients of the reference, in float64."""
        settings = dict(self.settings)
        if (rotary := settings.pop("rotary", None)) is not None:
            settings["rotary"] = rotary_table(rotary)
        doubles = {name: x.double() for name, x in self.tensors.items()}
        return differentiate(lambda **x: reference_attention(Call(**x, **settings)), doubles, self.upstream)


def check_correctness(notebook: Notebook, device: torch.device) -> None:
    """One attempt for each shape, type and kind of call."""
    for shape in _small_shapes(device, notebook.shares):
        for name, dtype in FLOAT_TYPES.items():
            for kind in _KINDS:
                notebook.attempt(f"{shape.name} {name} {kind}", partial(_compare, shape, device, dtype, kind))


def draw_problem(shape: Shape, device: torch.device, dtype: torch.dtype, kind: str) -> Problem:
    """A seeded call of :func:`mhla_attention`.

    Args:
        shape: the attention; with tile counts where the kind has exact tiles.
        device: where.
        dtype: of query, key, value, gate and the output's gradient.
        kind: one of plain, exact tiles, everything, exact tiles and everything.
    """
    torch.manual_seed(0)
    tensors = dict(zip(("query", "key", "value"), make_inputs(shape, device, dtype), strict=True))
    mixing = initial_mixing(shape.blocks).to(device)
    tensors["mixing"] = mixing + 0.1 * torch.rand_like(mixing)
    settings: dict[str, Any] = {"grid": shape.grid, "blocks": shape.blocks}
    if "everything" in kind:
        tensors["output_norm"] = 1 + 0.3 * torch.randn(shape.head_dim, device=device)
        tensors["output_gate"] = torch.randn_like(tensors["query"])
        angles = torch.randn(1, shape.tokens, 1, shape.head_dim // 2, device=device).repeat_interleave(2, dim=-1)
        settings["rotary"] = (angles.cos(), angles.sin())
        settings["key_mask"] = torch.rand(1, shape.tokens, device=device) > 0.3
    if "exact" in kind:
        tensors |= beside_exact_tiles(shape.heads, device)
        settings["exact"] = draw_tiles(shape, device)
    return Problem(tensors, settings, torch.randn_like(tensors["query"]))


def cut(shape: Shape, model: Model, most_tokens: int) -> Shape:
    """Two heads of a shape, with as many blocks of the real size as hold so many tokens, at least one.

    Args:
        shape: of a real model.
        model: which, for its exact tiles, which are as long as the real ones.
        most_tokens: that the cut grid has, unless one block has more.
    """
    lengths = [size // count for size, count in zip(shape.grid, shape.blocks, strict=True)]
    tiles = family_of_model(model).exact_tiles(shape.grid)
    tile_lengths = [math.ceil(size / count) for size, count in zip(shape.grid, tiles, strict=True)]
    counts = [1] * len(lengths)
    for axis in (axis for _ in range(max(shape.blocks)) for axis in reversed(range(len(counts)))):
        more = [count + (place == axis) for place, count in enumerate(counts)]
        fits = math.prod(more) * math.prod(lengths) <= most_tokens
        if fits and more[axis] <= shape.blocks[axis]:
            counts = more
    grid = tuple(count * length for count, length in zip(counts, lengths, strict=True))
    cut_tiles = tuple(math.ceil(size / length) for size, length in zip(grid, tile_lengths, strict=True))
    return replace(shape, grid=grid, blocks=tuple(counts), heads=_HEADS, tiles=cut_tiles, share=_SHARE)


def _small_shapes(device: torch.device, processes: int) -> list[Shape]:
    """The shapes, cut to the tokens whose N x N weights fit beside those of the other processes."""
    if device.type == "cpu":
        return [SMALL]
    tokens = math.isqrt(int(free_bytes(device) / 2 / processes / (_REFERENCE_MATRICES * _HEADS * 8)))
    return [cut(shapes()[name], models()[model], min(tokens, _MOST_TOKENS)) for name, model in SHAPES.items()]


def _compare(shape: Shape, device: torch.device, dtype: torch.dtype, kind: str) -> Measured:
    """Errors of the kernels, those of the eager backend beside them, and what is allowed."""
    problem = draw_problem(shape, device, dtype, kind)
    expected, found, eager = problem.reference(), problem.attend("triton"), problem.attend("eager")
    errors = {}
    for name in expected:
        largest = LARGEST_ERROR if name == OUTPUT else LARGEST_GRADIENT_ERROR
        of_eager = relative_error(eager[name], expected[name])
        errors[name] = {
            "error": relative_error(found[name], expected[name]),
            "limit": max(largest[dtype], _OF_HEADS.get(name, _TO_EAGER) * of_eager),
            "eager": of_eager,
        }
    wrong = [
        f"{name} {x['error']:.1e} of {x['limit']:.0e}" for name, x in errors.items() if not x["error"] <= x["limit"]
    ]
    worst = max(errors, key=lambda name: errors[name]["error"] / errors[name]["limit"])
    telling = f"worst is {worst}, {errors[worst]['error']:.1e} of {errors[worst]['limit']:.0e}"
    numbers = {"grid": shape.grid, "blocks": shape.blocks, "tiles": shape.tiles, "errors": errors}
    return Measured(numbers, telling, f"relative error too large: {', '.join(wrong)}" if wrong else "")
