"""Causal MHLA step by step: a state goes on as the whole sequence, sees nothing later, and keeps little."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from mhla_diffusers.attention import MHLAState, extend_mixing, initial_mixing, mhla_attention
from mhla_diffusers.attention.layout import frame_block_starts

from .problems import BEFORE, Problem, make_problem, reference, relative_error

ROUNDING = 1e-11
"""Largest error of float64 sums in another order, relative to the largest output."""
LAYOUTS = [
    ((12,), (4,), "token"),
    ((17,), (5,), "token"),
    ((6,), (1,), "token"),
    ((4, 4, 6), (2, 2, 3), "block"),
    ((5, 3, 4), (3, 2, 1), "block"),
]
OPTIONS = [
    {},
    BEFORE,
    {"per_head": True},
    {"normalize": False, "norm": True, "gate": True},
    {"linear_branch": True, "rotary": True, "gate": True},
    {"linear_branch": True, "per_head": True, "norm": True},
]
BOTH = LAYOUTS[1], LAYOUTS[4]
by_layout = pytest.mark.parametrize(("grid", "blocks", "causal"), BOTH)
by_branch = pytest.mark.parametrize("linear_branch", [False, True])


def streamed(
    problem: Problem, cuts: list[int], dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[torch.Tensor, MHLAState]:
    """The sequence in steps that end at ``cuts``, each tried once without being kept."""
    tensors = {name: tensor.to(dtype) for name, tensor in problem.tensors.items()}
    options = dict(problem.options)
    rotary, gate = options.pop("rotary", None), tensors.get("output_gate")
    weights = {name: tensors[name] for name in ("mixing", "output_norm", "linear_weight") if name in tensors}
    state = MHLAState(problem.grid, problem.blocks, **options, **more)
    found = []
    for start, end in pairwise([0, *cuts]):
        here = slice(start, end)
        step = {name: tensors[name][:, here] for name in ("query", "key", "value")}
        step["rotary"] = None if rotary is None else tuple(table[:, here].to(dtype) for table in rotary)
        step["output_gate"] = None if gate is None else gate[:, here]
        tried = state.step(**step, **weights, keep=False)
        assert state.length == start
        found.append(state.step(**step, **weights))
        assert torch.equal(tried, found[-1])
    return torch.cat(found, dim=1), state


def ends_of(grid: tuple[int, ...], blocks: tuple[int, ...], causal: str) -> list[int]:
    """Where steps may end."""
    return list(range(1, grid[0] + 1)) if causal == "token" else frame_block_starts(grid, blocks)[1:]


def all_cuts(*layout: Any) -> list[list[int]]:
    """Whole, as small as it goes, and in between."""
    ends = ends_of(*layout)
    return [[ends[-1]], ends, [*ends[1:-1:2], ends[-1]], [ends[0], ends[-1]] if len(ends) > 1 else ends]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_state_goes_on_as_the_whole_sequence(layout, options):
    grid, blocks, causal = layout
    problem = make_problem(grid, blocks, causal=causal, **options)
    expected = problem.run(reference, torch.float64)["output"]
    for cuts in all_cuts(*layout):
        found, state = streamed(problem, cuts)
        assert state.length == math.prod(grid)
        assert (found - expected).abs().max() <= ROUNDING * expected.abs().max(), cuts


@pytest.mark.gpu
@pytest.mark.parametrize("options", [BEFORE, {"linear_branch": True}], ids=["linear", "softmax"])
@pytest.mark.parametrize(("layout", "cuts"), [(LAYOUTS[0], [5, 6, 7, 12]), (LAYOUTS[3], [48, 96])])
def test_a_state_goes_on_with_the_kernels(layout, cuts, options):
    grid, blocks, causal = layout
    problem = make_problem(grid, blocks, causal=causal, batch=1, heads=1, **options).to()
    expected = problem.run(reference, torch.float64)["output"]
    found, _ = streamed(problem, cuts, dtype=torch.float32, backend="triton")
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize(
    "options", [{}, {"linear_branch": True}, {"per_head": True, "normalize": False, "norm": True}], ids=str
)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3]], ids=str)
def test_a_state_goes_beyond_its_grid(layout, options):
    grid, blocks, causal = layout
    longer = (3 * grid[0], *grid[1:]), (3 * blocks[0], *blocks[1:])
    problem = make_problem(*longer, causal=causal, **options)
    trained = make_problem(grid, blocks, **options).tensors["mixing"]
    problem.tensors["mixing"] = extend_mixing(trained.double(), blocks, longer[1][0])
    expected = problem.run(reference, torch.float64)["output"]
    within = Problem(problem.tensors | {"mixing": trained}, grid, blocks, problem.options)
    sizes = set()
    for cuts in all_cuts(*longer, causal):
        found, state = streamed(within, cuts, beyond="relative")
        assert (found - expected).abs().max() <= ROUNDING * expected.abs().max(), cuts
        sizes.add(state.nbytes)
    assert len(sizes) == 1


@by_branch
@by_layout
def test_what_comes_later_changes_nothing(grid, blocks, causal, linear_branch):
    """Not even the last bit, where the same operations are done for a token whatever stands behind it."""
    problem = make_problem(grid, blocks, causal=causal, linear_branch=linear_branch, rotary=True)
    before = problem.attend()
    for end in ends_of(grid, blocks, causal)[:-1]:
        changed = {name: problem.tensors[name].clone() for name in ("query", "key", "value")}
        for x in changed.values():
            x[:, end:] = torch.randn_like(x[:, end:])
        after = problem.attend(**changed)
        assert torch.equal(before[:, :end], after[:, :end])
        assert not torch.equal(before[:, end:], after[:, end:])


# A state of 16 tokens in 4 blocks

MIXING = initial_mixing((4,))
BATCH, HEADS, DIM = 2, 2, 8


def tokens(count: int, batch: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, count, HEADS, DIM, generator=generator) for _ in range(3))


def weights_of(linear_branch: bool, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights of a step."""
    return {"mixing": MIXING} | ({"linear_weight": torch.ones(HEADS)} if linear_branch else {}) | given


def new_state(**given: Any) -> MHLAState:
    return MHLAState((16,), (4,), **({"causal": "token"} | given))


@by_branch
def test_what_it_takes_does_not_grow_with_the_sequence(linear_branch):
    """M summaries of D (D + 1) floats a head at most, beside a cache of keys and values of 2 N D."""
    state, sizes = new_state(beyond="relative"), []
    for step in range(80):
        state.step(*tokens(1, seed=step), **weights_of(linear_branch))
        sizes.append(state.nbytes)
    of_summaries = 4 * BATCH * HEADS * 4 * DIM * (DIM + 1)
    of_open_block = 4 * BATCH * 3 * 2 * HEADS * DIM if linear_branch else 0
    # the mixture that the open frame block sees is kept too, in the place of a further summary
    assert max(sizes) <= of_summaries * 5 / 4 + of_open_block
    assert max(sizes[:32]) == max(sizes[32:])
    assert sizes[-1] == 3 * of_summaries // 4 < 80 * 4 * BATCH * HEADS * 2 * DIM


@by_branch
def test_reorder_picks_samples(linear_branch):
    state, weights = new_state(), weights_of(linear_branch)
    begin, rest = tokens(6, batch=3), tokens(3, batch=2, seed=1)
    state.step(*begin, **weights)
    order = torch.tensor([2, 0])
    state.reorder(order)
    whole = [torch.cat([a[order], b], dim=1) for a, b in zip(begin, rest, strict=True)]
    expected = mhla_attention(*whole, grid=(16,), blocks=(4,), causal="token", **weights)
    torch.testing.assert_close(state.step(*rest, **weights), expected[:, 6:], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_steps_that_are_not_kept_may_learn():
    """The past is mixed once for all denoising steps; a mixture without gradients is of no use in one that learns."""
    state = new_state(causal="block")
    state.step(*tokens(12), MIXING)
    state.step(*tokens(4, seed=1), MIXING, keep=False)
    with torch.enable_grad():
        mixing = MIXING.clone().requires_grad_()
        state.step(*tokens(4, seed=3), mixing, keep=False).sum().backward()
    assert mixing.grad is not None and (mixing.grad[3, :3] != 0).all()


@by_branch
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_nothing_behind(linear_branch, error):
    """Though the error comes when the first of three frame blocks is over."""

    class Failing(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += state.length > 5
            if self.calls > 3:
                raise error("out of memory")
            return func(*args, **(kwargs or {}))

    state, other, weights = new_state(), new_state(), weights_of(linear_branch)
    for one in (state, other):
        one.step(*tokens(5), **weights)
    with pytest.raises(error), Failing():
        state.step(*tokens(9, seed=1), **weights)
    assert state.length == 5
    assert torch.equal(state.step(*tokens(9, seed=1), **weights), other.step(*tokens(9, seed=1), **weights))


@by_branch
def test_gradients_flow_through_steps(linear_branch):
    weights = {name: x.double().requires_grad_() for name, x in weights_of(linear_branch).items()}
    leaves = [x.double().requires_grad_() for x in tokens(13)]
    expected = mhla_attention(*leaves, grid=(16,), blocks=(4,), causal="token", **weights)
    state = new_state()
    parts = zip(*(x.split([5, 1, 7], dim=1) for x in leaves), strict=True)
    found = torch.cat([state.step(*part, **weights) for part in parts], dim=1)
    upstream = torch.randn_like(expected)
    of_found, of_whole = (torch.autograd.grad(x, [*leaves, *weights.values()], upstream) for x in (found, expected))
    torch.testing.assert_close(of_found, of_whole, rtol=1e-9, atol=1e-12)


def test_weights_may_be_trained_between_steps():
    """What follows an update is mixed with the new weights, also without gradients and within a block."""
    mixing, sequence, state = MIXING.double().requires_grad_(), [x.double() for x in tokens(7)], new_state()
    *learning, last = zip(*(x.split([5, 1, 1], dim=1) for x in sequence), strict=True)
    for part in learning:
        state.step(*part, mixing)
    with torch.no_grad():
        mixing.mul_(torch.linspace(0.5, 2, 16, dtype=torch.float64).view(4, 4))
        expected = mhla_attention(*sequence, grid=(16,), blocks=(4,), causal="token", mixing=mixing)[:, 6:]
        found = state.step(*last, mixing)
    assert not found.requires_grad and relative_error(found, expected) < ROUNDING


@by_branch
def test_autocast_changes_nothing(linear_branch):
    weights = weights_of(linear_branch)
    with torch.autocast("cpu", torch.bfloat16):
        found = new_state().step(*tokens(4), **weights)
    assert torch.equal(found, new_state().step(*tokens(4), **weights))
