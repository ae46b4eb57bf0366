"""The step ``correctness``: output and every gradient at full size of a tile, against the float64 reference."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...attention import Call, initial_mixing, mhla_attention, reference_attention
from ...attention.rotary import rotary_table
from ...devices import FLOAT_TYPES
from ..correctness import (
    CUT_HEADS,
    LARGEST_ERROR,
    LARGEST_GRADIENT_ERROR,
    OUTPUT,
    beside_exact_tiles,
    cut,
    differentiate,
    make_inputs,
    random_rotary,
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
_MOST_TOKENS = 4096
_REFERENCE_MATRICES = 24
"""N x N matrices of float64 per head that the reference and its backward pass hold, and some more."""
_TO_EAGER = 1.5
"""Where terms cancel, the eager backend has a large error too: so many times its error is allowed."""
_MOST_ERROR = 0.2
"""However large the eager backend's."""
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
    small = _small_shapes(device, notebook.shares)
    for kind in _KINDS:  # outermost: processes take every so many attempts, and the kinds differ most in what they cost
        for shape in small:
            for name, dtype in FLOAT_TYPES.items():
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
        settings["rotary"] = random_rotary(shape, device)
        settings["key_mask"] = torch.rand(1, shape.tokens, device=device) > 0.3
    if "exact" in kind:
        tensors |= beside_exact_tiles(shape.heads, device)
        settings["exact"] = draw_tiles(shape, device)
    return Problem(tensors, settings, torch.randn_like(tensors["query"]))


def _small_shapes(device: torch.device, processes: int) -> list[Shape]:
    """The shapes, cut to the tokens whose N x N weights fit beside those of the other processes."""
    if device.type == "cpu":
        return [SMALL]
    tokens = math.isqrt(int(free_bytes(device) / 2 / processes / (_REFERENCE_MATRICES * CUT_HEADS * 8)))
    return [cut(_with_tiles(name), min(tokens, _MOST_TOKENS)) for name in SHAPES]


def _with_tiles(name: str) -> Shape:
    """A shape with the exact tiles of its family, also where the model's own attention is linear."""
    shape = shapes()[name]
    return replace(shape, tiles=family_of_model(models()[SHAPES[name]]).exact_tiles(shape.grid))


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
            "limit": max(largest[dtype], min(_MOST_ERROR, _OF_HEADS.get(name, _TO_EAGER) * of_eager)),
            "eager": of_eager,
        }
    wrong = [
        f"{name} {x['error']:.1e} of {x['limit']:.0e}" for name, x in errors.items() if not x["error"] <= x["limit"]
    ]
    worst = max(errors, key=lambda name: errors[name]["error"] / errors[name]["limit"])
    telling = f"worst is {worst}, {errors[worst]['error']:.1e} of {errors[worst]['limit']:.0e}"
    numbers = {"grid": shape.grid, "blocks": shape.blocks, "tiles": shape.tiles, "errors": errors}
    return Measured(numbers, telling, f"relative error too large: {', '.join(wrong)}" if wrong else "")
