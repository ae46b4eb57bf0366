"""Causal MHLA is what its definition says, token by token."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import MHLACall, MHLAState, extend_mixing, mhla_attention, reference_weights
from mhla_diffusers.attention.layout import frame_block_starts

from ..refusals import refused
from .problems import Problem, errors_against_reference, make_problem, reference

ROUNDING = 1e-11
"""Of float64 sums in another order, relative to the largest."""

CASES: list[dict[str, Any]] = [
    {},
    {"rotary": True},
    {"rotary": True, "rope": "before"},
    {"mask": True, "per_head": True},
    {"norm": True, "gate": True, "feature_map": "elu+1"},
    {"normalize": False, "norm": True},
    {"linear_branch": True},
    {"linear_branch": True, "rotary": True, "mask": True, "gate": True},
    {"linear_branch": True, "per_head": True, "norm": True},
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
    kept = {name: tensors[name] for name in ("output_norm", "linear_weight") if name in tensors}
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
    "options", [{}, {"linear_branch": True}, {"per_head": True, "normalize": False, "norm": True}], ids=str
)
@pytest.mark.parametrize(("grid", "blocks", "causal"), [((12,), (4,), "token"), ((4, 4, 6), (2, 2, 3), "block")])
def test_a_state_goes_beyond_its_grid(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: str, options: dict[str, Any]
) -> None:
    longer = (3 * grid[0], *grid[1:]), (3 * blocks[0], *blocks[1:])
    problem = make_problem(*longer, causal=causal, **options)
    trained = make_problem(grid, blocks, **options).tensors["mixing"]
    problem.tensors["mixing"] = extend_mixing(trained.double(), blocks, longer[1][0])
    expected = problem.run(reference, torch.float64)["output"]
    within = Problem(problem.tensors | {"mixing": trained}, grid, blocks, problem.options)
    sizes = set()
    for cuts in all_cuts(*longer, causal, math.prod(longer[0])):
        found, state = streamed(within, cuts, beyond="relative")
        assert (found - expected).abs().max() <= ROUNDING * expected.abs().max(), cuts
        sizes.add(state.nbytes)
    assert len(sizes) == 1


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A sequence of 1 to about 40 tokens, whatever its blocks, or of frames of which a frame block may hold several."""
    causal = draw(st.sampled_from(["token", "block"]))
    rows = draw(st.integers(1, 5))
    first = rows + draw(st.integers(0, 35 if causal == "token" else 4))
    grid, blocks = ((first,), (rows,)) if causal == "token" else ((first, 2, 3), (rows, 1, draw(st.integers(1, 3))))
    ends = range(1, first + 1) if causal == "token" else frame_block_starts(grid, blocks)[1:]
    options = {name: draw(st.booleans()) for name in ("rotary", "mask", "per_head", "norm", "gate", "linear_branch")}
    options |= {"rope": draw(st.sampled_from(["before", "after"])), "seed": draw(st.integers(0, 99))}
    # with relu and RoPE after it a normaliser may be nearly nothing beside the weights, and any rounding large then
    problem = make_problem(grid, blocks, batch=1, causal=causal, feature_map="elu+1", **options)
    return of_length(problem, draw(st.sampled_from(list(ends))))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems())
def test_drawn_sequences(problem: Problem) -> None:
    assert_same(problem)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(problems(), st.data())
def test_a_state_cut_anywhere(problem: Problem, data: st.DataObject) -> None:
    tokens, causal = problem.tensors["query"].shape[1], problem.options["causal"]
    ends = list(range(1, tokens)) if causal == "token" else frame_block_starts(problem.grid, problem.blocks)[1:]
    ends = [end for end in ends if end < tokens]
    cuts = sorted(data.draw(st.sets(st.sampled_from(ends)))) if ends else []
    expected = problem.run(reference, torch.float64)["output"]
    found, _ = streamed(problem, [*cuts, tokens])
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


BOTH = [((11,), (3,), "token"), ((4, 2, 3), (2, 1, 3), "block")]


@pytest.mark.parametrize("linear_branch", [False, True])
@pytest.mark.parametrize(("grid", "blocks", "causal"), BOTH)
def test_the_weights_of_each_query_sum_to_one(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: Any, linear_branch: bool
) -> None:
    problem = make_problem(grid, blocks, causal=causal, linear_branch=linear_branch, mask=True)
    problem.tensors["value"] = torch.ones_like(problem.tensors["value"])
    found = problem.run(mhla_attention, torch.float64)["output"]
    assert (found - 1).abs().max() <= ROUNDING
    weights = reference_weights(MHLACall(**problem.tensors, grid=grid, blocks=blocks, **problem.options))
    assert (weights.sum(dim=-1) - 1).abs().max() <= ROUNDING
    place = torch.arange(math.prod(grid)) // (1 if causal == "token" else math.prod(grid) // blocks[0])
    assert not weights[:, :, place[:, None] < place].any()


@pytest.mark.parametrize("linear_branch", [False, True])
@pytest.mark.parametrize(("grid", "blocks", "causal"), BOTH)
def test_what_comes_later_changes_nothing(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: Any, linear_branch: bool
) -> None:
    """Not even the last bit, where the same operations are done for a token whatever stands behind it."""
    problem = make_problem(grid, blocks, causal=causal, linear_branch=linear_branch, rotary=True)
    ends = range(1, math.prod(grid)) if causal == "token" else frame_block_starts(grid, blocks)[1:-1]
    before = mhla_attention(**problem.tensors, grid=grid, blocks=blocks, **problem.options)
    for end in ends:
        changed = {name: x.clone() for name, x in problem.tensors.items()}
        for name in ("query", "key", "value"):
            changed[name][:, end:] = torch.randn_like(changed[name][:, end:])
        after = mhla_attention(**changed, grid=grid, blocks=blocks, **problem.options)
        assert torch.equal(before[:, :end], after[:, :end])
        assert not torch.equal(before[:, end:], after[:, end:])


# One rounding of the result in half precision; float32 sums of a few dozen terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.mark.parametrize(
    "options", [{"rotary": True, "rope": "before", "mask": True}, {"linear_branch": True}], ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("grid", "blocks", "causal"), BOTH)
def test_types(grid: Any, blocks: Any, causal: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    problem = make_problem(grid, blocks, causal=causal, **options)
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        assert error <= TOLERANCE[dtype] * (3 if name in ("mixing", "linear_weight") else 1), name
    assert problem.run(mhla_attention, dtype)["output"].dtype == dtype


def test_a_first_block_that_is_masked_is_no_nan() -> None:
    problem = make_problem((12,), (4,), causal="token", linear_branch=True)
    problem.options["key_mask"] = torch.arange(12).expand(2, -1) >= 5
    assert_same(problem)
    assert all(x.isfinite().all() for x in problem.run(mhla_attention).values())


def test_a_mask_may_weigh() -> None:
    for linear_branch in (False, True):
        problem = make_problem((12,), (4,), causal="token", linear_branch=linear_branch)
        problem.options["key_mask"] = torch.rand(2, 12, generator=torch.Generator().manual_seed(0))
        assert_same(problem)


def test_huge_scores_within_the_own_block() -> None:
    problem = make_problem((12,), (4,), causal="token", linear_branch=True)
    problem.tensors["query"] *= 1e4
    expected = problem.run(reference, torch.float64)["output"]
    found = problem.run(mhla_attention, torch.float64)
    assert all(x.isfinite().all() for x in found.values())
    assert (found["output"] - expected).abs().max() <= 1e4 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("linear_branch", [False, True])
@pytest.mark.parametrize(("grid", "blocks", "causal"), BOTH)
def test_it_compiles_as_one_graph(grid: Any, blocks: Any, causal: Any, linear_branch: bool) -> None:
    problem = make_problem(grid, blocks, causal=causal, linear_branch=linear_branch, rotary=True)
    compiled = torch.compile(mhla_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    expected, found = problem.run(mhla_attention), problem.run(compiled)
    for name, value in expected.items():
        # compiled, RoPE is other operations, whose rounding a small normaliser makes as large as the largest gradients
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": "tokens"}, "'tokens'...'token'...'block'"),
        ({"grid": (4, 3), "blocks": (2, 2)}, "(4, 3)...(12,)...causal='block'"),
        ({"grid": (11,)}, "N=12...11"),
        ({"grid": (14,), "causal": "block"}, "4, 8, 11, 14...12"),
        ({"extra": (3, 0), "grid": (9,)}, "extra...causal='token'"),
        ({"extra": (3, 0), "grid": (9,), "causal": "block"}, "extra...causal='block'"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"linear_weight": torch.ones(2), "normalize": False}, "normalize=True"),
    ],
)
def test_what_does_not_go(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"grid": (12,), "blocks": (4,), "causal": "token"} | change
    with refused(message):
        mhla_attention(*torch.randn(3, 1, 12, 2, 8), torch.ones(4, 4), **arguments)


@pytest.mark.parametrize("linear_branch", [False, True])
@pytest.mark.parametrize(("grid", "blocks", "causal"), STREAMS)
def test_queries_that_see_masked_keys_alone_get_nothing_however_the_sequence_is_cut(
    grid: tuple[int, ...], blocks: tuple[int, ...], causal: str, linear_branch: bool
) -> None:
    """A sample without a key, and one whose first keys are masked, as padding on the left."""
    problem = make_problem(grid, blocks, causal=causal, linear_branch=linear_branch)
    count = math.prod(grid)
    hidden = count if len(frame_block_starts(grid, blocks)) == 2 else frame_block_starts(grid, blocks)[1]
    mask = torch.arange(count).expand(2, -1) >= torch.tensor([[count], [hidden - (causal == "token")]])
    problem.options["key_mask"] = mask
    assert_same(problem)
    found = problem.run(mhla_attention, torch.float64)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["output"][0].any() and not found["output"][1, : hidden - 1].any()
    assert found["output"][1, hidden:].any(dim=-1).all()
    for cuts in all_cuts(grid, blocks, causal, count):
        assert (streamed(problem, cuts)[0] - found["output"]).abs().max() <= ROUNDING, cuts
