"""The step ``correctness``: output and every gradient at full size of a tile, against the float64 reference."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...devices import FLOAT_TYPES
from ..correctness import errors_of, limits_of, too_large
from ..models import family_of_model, models
from ..problems import CUT_HEADS, cut, draw_problem
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
SMALL = Shape("small", (2, 4, 4), (1, 2, 2), 1, 16, tiles=(1, 2, 2), share=0.25, rotary_axes=(8, 4, 4))
"""What the interpreter is through with in seconds."""
_KINDS = ("plain", "everything", "exact tiles and everything", "causal", "causal softmax")
"""Everything: RoPE, key mask, output norm and output gate."""
_MOST_TOKENS = 4096
_REFERENCE_MATRICES = 24
"""N x N matrices of float64 per head that the reference and its backward pass hold, and some more."""
_TO_EAGER = 1.5
"""Where terms cancel, the eager backend has a large error too: so many times its error is allowed."""
_MOST_ERROR = 0.2
"""However large the eager backend's."""
_OF_HEADS = {"linear_weight": 10, "pooled_bias": 10}
"""Single numbers per head, each a sum over all tokens in which most cancels, from weights that kernels round."""


def check_correctness(notebook: Notebook, device: torch.device) -> None:
    """One attempt for each shape, type and kind of call."""
    small = _small_shapes(device, notebook.shares)
    for kind in _KINDS:  # outermost: processes take every so many attempts, and the kinds differ most in what they cost
        for shape in small:
            for name, dtype in FLOAT_TYPES.items():
                notebook.attempt(f"{shape.name} {name} {kind}", partial(_compare, shape, device, dtype, kind))


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
    errors, of_eager = errors_of(found, expected), errors_of(eager, expected)
    limits = {
        name: max(limit, min(_MOST_ERROR, _OF_HEADS.get(name, _TO_EAGER) * of_eager[name]))
        for name, limit in limits_of(errors, dtype).items()
    }
    wrong = too_large(errors, limits)
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    telling = f"worst is {worst}, {errors[worst]:.1e} of {limits[worst]:.0e}"
    numbers: dict[str, Any] = {"grid": shape.grid, "blocks": shape.blocks, "tiles": shape.tiles}
    numbers |= {"errors": errors, "limits": limits, "errors of eager": of_eager}
    return Measured(numbers, telling, f"relative error too large: {wrong}" if wrong else "")
