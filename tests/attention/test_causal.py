"""Causal MHLA is what its definition says, token by token."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from mhla_diffusers.attention import MHLAState, extend_mixing, mhla_attention
from mhla_diffusers.attention.blocks import frame_block_starts

from .problems import Problem, make_problem, reference

ROUNDING = 1e-11
"""Of float64 sums in another order, relative to the largest."""

CASES: list[dict[str, Any]] = [
    {},
    {"rotary": True},
    {"rotary": True, "rope": "before"},
    {"mask": True, "per_head": True},
    {"norm": True, "gate": True, "feature_map": "elu+1"},
    {"normalize": False, "norm": True},
    {"far_field": True},
    {"far_field": True, "rotary": True, "mask": True, "gate": True},
    {"far_field": True, "per_head": True, "norm": True},
]
LAYOUTS = [
    ((12,), (4,), "token", 12),
    ((17,), (5,), "token", 17),
    ((17,), (5,), "token", 9),
    ((32,), (4,), "token", 1),
    ((9,), (1,), "token", 7),
    ((5, 1, 1), (3, 1, 1), "token", 4),
    ((12,), (4,), "block", 9),
    ((4, 4, 6), (2, 2, 3), "block", 96),
    ((5, 3, 4), (3, 2, 1), "block", 48),
    ((7, 3), (3, 2), "block", 9),
]


def of_length(problem: Problem, tokens: int) -> Problem:
    """The same of a sequence that ends before the grid does."""
    whole = math.prod(problem.grid)
    tensors = {n: x[:, :tokens] if x.ndim == 4 and x.shape[1] == whole else x for n, x in problem.tensors.items()}
    options = dict(problem.options)
    if "rotary" in options:
        options["rotary"] = tuple(table[:, :tokens] for table in options["rotary"])
    if "key_mask" in options:
        options["key_mask"] = options["key_mask"][:, :tokens]
    return Problem(tensors, problem.grid, problem.blocks, options)


def assert_same(problem: Problem, backend: str = "eager", rounding: float = ROUNDING) -> None:
    """Output and all gradients, in float64."""
    expected = problem.run(reference, torch.float64)
    found = problem.run(mhla_attention, torch.float64, backend=backend)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= rounding * value.abs().max().clamp_min(1), name


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("grid", "blocks", "causal", "tokens"), LAYOUTS)
def test_it_is_the_reference(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: str, tokens: int, options: dict[str, Any]
) -> None:
    assert_same(of_length(make_problem(grid, blocks, causal=causal, **options), tokens))


STREAMS = [
    ((12,), (4,), "token"),
    ((17,), (5,), "token"),
    ((6,), (1,), "token"),
    ((4, 4, 6), (2, 2, 3), "block"),
    ((5, 3, 4), (3, 2, 1), "block"),
]


def streamed(
    problem: Problem, cuts: list[int], dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[torch.Tensor, MHLAState]:
    """The sequence in steps that end at ``cuts``, each tried once without being kept."""
    tensors = {name: tensor.to(dtype) for name, tensor in problem.tensors.items()}
    options = dict(problem.options)
    rotary, mask, gate = options.pop("rotary", None), options.pop("key_mask", None), tensors.get("output_gate")
    kept = {name: tensors[name] for name in ("output_norm", "far_field_weight") if name in tensors}
    state = MHLAState(tensors["mixing"], problem.grid, problem.blocks, **kept, **options, **settings)
    found = []
    for start, end in pairwise([0, *cuts]):
        here = slice(start, end)
        tokens = [tensors[name][:, here] for name in ("query", "key", "value")]
        more = {
            "rotary": None if rotary is None else tuple(table[:, here].to(dtype) for table in rotary),
            "key_mask": None if mask is None else mask[:, here],
            "output_gate": None if gate is None else gate[:, here],
        }
        tried = state.step(*tokens, **more, keep=False)
        assert state.length == start
        found.append(state.step(*tokens, **more))
        assert torch.equal(tried, found[-1])
    return torch.cat(found, dim=1), state


def all_cuts(grid: tuple[int, ...], blocks: tuple[int, ...], causal: str, tokens: int) -> list[list[int]]:
    """Whole, as small as it goes, and in between."""
    ends = list(range(1, tokens + 1)) if causal == "token" else frame_block_starts(grid, blocks)[1:]
    return [[ends[-1]], ends, [*ends[1:-1:2], ends[-1]], [ends[0], ends[-1]] if len(ends) > 1 else ends]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize(("grid", "blocks", "causal"), STREAMS)
def test_a_state_goes_on_as_the_whole_sequence(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: str, options: dict[str, Any]
) -> None:
    problem = make_problem(grid, blocks, causal=causal, **options)
    expected = problem.run(reference, torch.float64)["output"]
    for cuts in all_cuts(grid, blocks, causal, math.prod(grid)):
        found, state = streamed(problem, cuts)
        assert state.length == math.prod(grid)
        assert (found - expected).abs().max() <= ROUNDING * expected.abs().max(), cuts


@pytest.mark.parametrize(
    "options", [{}, {"far_field": True}, {"per_head": True, "normalize": False, "norm": True}], ids=str
)
@pytest.mark.parametrize(("grid", "blocks", "causal"), [((12,), (4,), "token"), ((4, 4, 6), (2, 2, 3), "block")])
def test_a_state_goes_beyond_its_grid(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: str, options: dict[str, Any]
) -> None:
    longer = (3 * grid[0], *grid[1:]), (3 * blocks[0], *blocks[1:])
    problem = make_problem(*longer, causal=causal, **options)
    trained = make_problem(grid, blocks, **options).tensors["mixing"]
    problem.tensors["mixing"] = extend_mixing(trained, blocks, longer[1][0])
    expected = problem.run(reference, torch.float64)["output"]
    within = Problem(problem.tensors | {"mixing": trained}, grid, blocks, problem.options)
    sizes = set()
    for cuts in all_cuts(*longer, causal, math.prod(longer[0])):
        found, state = streamed(within, cuts, beyond="relative")
        assert (found - expected).abs().max() <= ROUNDING * expected.abs().max(), cuts
        sizes.add(state.nbytes)
    assert len(sizes) == 1
