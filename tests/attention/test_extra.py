"""MHLA beside extra tokens: the eager backend against the float64 reference and softmax attention; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import mhla_attention, reference_attention, reference_weights

from ..refusals import refused
from .problems import call_of, errors_against_reference, make_problem, make_sparse_problem
from .test_linear import TOLERANCE

SIDES = [(3, 0), (0, 5), (2, 4), (0, 1), (70, 30)]
"""The last are more than a block of rows holds."""
GRIDS = [(12,), (7, 9), (5, 7, 3), (4, 3)]
SUMS = ("linear_weight", "output_norm")
"""Their gradients are sums over all tokens of products of both signs, of which rounded halves leave too little to hold
them to the bound of one rounding; float32 and float64 do."""


def make(grid, extra, **options):
    return make_problem(grid, tuple(min(2, size) for size in grid), extra=extra, **options)


def make_both(extra, **options):
    """A problem of MHLA, and one of sparse attention."""
    return make((5, 6), extra, **options), make_sparse_problem((5, 6), 6, key_size=2, extra=extra, **options)


def check(problem, dtype=torch.float32):
    for name, error in errors_against_reference(problem, dtype, "eager").items():
        if dtype.itemsize > 2 or name not in SUMS:
            assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("linear_branch", [False, True])
def test_even_and_ragged_grids(grid, linear_branch):
    for extra in ((2, 3), (0, 14)):
        check(make(grid, extra, linear_branch=linear_branch))


@pytest.mark.parametrize("extra", SIDES)
def test_before_and_after(extra):
    for problem in make_both(extra, rotary=True, mask=True):
        check(problem)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("option", ["rotary", "mask", "norm", "gate", "per_head", "linear_branch"])
def test_options(dtype, option):
    check(make((5, 7, 3), (2, 3), **{option: True}), dtype)


def test_rope_of_every_sample():
    for problem in make_both((3, 4), rotary=True):
        problem.options["rotary"] = tuple(torch.cat([x, x.flip(1)]) for x in problem.options["rotary"])
        check(problem)


@st.composite
def problems(draw):
    grid = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    extra = draw(st.sampled_from([(1, 0), (0, 1), (2, 3), (0, 11), (40, 1)]))
    names = "rotary", "mask", "norm", "gate", "per_head", "linear_branch"
    return make(grid, extra, seed=draw(st.integers(0, 99)), **{name: draw(st.booleans()) for name in names})


@settings(max_examples=25, deadline=None)
@given(problems())
def test_drawn_problems(problem):
    for name, error in errors_against_reference(problem, torch.float64, "eager").items():
        assert error <= 1e-9, f"{name}: relative error {error:.2e}"


def test_extra_queries_attend_as_softmax_attention_does():
    """Whatever the others attend to; norm and gate are not theirs."""
    for problem in (make((5, 6), (3, 4), norm=True, gate=True), make_both((3, 4))[1]):
        query, key, value = (problem.tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        found = problem.attend()
        for place in (slice(0, 3), slice(33, 37)):
            torch.testing.assert_close(found[:, place], expected[:, place], rtol=1e-5, atol=1e-6)


def test_where_in_the_sequence_they_stand_changes_nothing_else():
    for problem in make_both((3, 4), rotary=True, mask=True):
        found = problem.attend()
        order = [*range(3, 33), *range(3), *range(33, 37)]
        moved = {name: x[:, order] if x.ndim == 4 else x for name, x in problem.tensors.items()}
        tables = tuple(x[:, order] for x in problem.options["rotary"])
        mask = problem.options["key_mask"][:, order]
        assert torch.equal(problem.attend(**moved, extra=(0, 7), rotary=tables, key_mask=mask), found[:, order])


def test_masked_tokens_are_as_good_as_absent():
    """As padded text is; its own outputs are finite, and nobody's input."""
    for problem in make_both((2, 9)):
        keep = torch.ones(2, 41, dtype=torch.bool)
        keep[:, 36:] = False
        padded = problem.attend(key_mask=keep)
        shorter = {name: x[:, :36] if x.ndim == 4 else x for name, x in problem.tensors.items()}
        torch.testing.assert_close(padded[:, :36], problem.attend(**shorter, extra=(2, 4)), rtol=1e-5, atol=1e-6)
        assert padded.isfinite().all()


def test_mhla_alone_remains_where_all_extra_tokens_are_masked():
    problem = make((5, 6), (2, 4), linear_branch=True)
    keep = torch.ones(2, 36, dtype=torch.bool)
    keep[0, [0, 1, *range(32, 36)]] = False
    problem.options["key_mask"] = keep
    check(problem)
    query, key, value, mixing, _ = problem.tensors.values()
    on_grid = (x[:1, 2:32] for x in (query, key, value))
    alone = mhla_attention(*on_grid, mixing, (5, 6), problem.blocks)
    torch.testing.assert_close(problem.attend()[:1, 2:32], alone, rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite_and_weights_sum_to_one():
    problem = make((7, 9), (3, 4), linear_branch=True)
    found = problem.attend(value=torch.ones_like(problem.tensors["value"]), query=300 * problem.tensors["query"])
    torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-5, atol=1e-5)


def test_reference_weights_are_of_the_sequence():
    for problem in make_both((3, 4), mask=True):
        call = call_of(**problem.tensors, **problem.settings)
        weights, value = reference_weights(call), problem.tensors["value"].double()
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 37, dtype=torch.float64))
        torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights, value), reference_attention(call))
        masked = ~problem.options["key_mask"][:, None, :].expand(-1, 37, -1)
        assert not weights.transpose(0, 1)[:, masked].abs().gt(1e-9).any()


@pytest.mark.parametrize("kind", ["MHLA", "sparse"])
def test_compile_in_one_graph(kind):
    """For one length of text, and for another, which makes a graph for all."""

    def attend_to(problem_settings, tensors):
        extra, mask = problem_settings
        if kind == "MHLA":
            return mhla_attention(**tensors, grid=(4, 6), blocks=(2, 2), extra=extra, key_mask=mask) * 2
        from mhla_diffusers.attention import sparse_attention

        return sparse_attention(**tensors, grid=(4, 6), density=0.3, block_size=4, extra=extra, key_mask=mask) * 2

    compiled = torch.compile(attend_to, fullgraph=True, backend="aot_eager")
    for after in (3, 5, 6):
        problem = make((4, 6), (0, after), mask=True)
        if kind == "sparse":
            del problem.tensors["mixing"]
        given = (problem.options["extra"], problem.options["key_mask"]), problem.tensors
        torch.testing.assert_close(compiled(*given), attend_to(*given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": (3,)}, "extra=(3,)"),
        ({"extra": 7}, "extra=7"),
        ({"extra": (-1, 8)}, "extra=(-1, 8)"),
        ({"extra": (3.0, 4)}, "extra=(3.0, 4)"),
        ({"extra": (3, 5)}, "(4, 6)...24...N=31...extra=(3, 5)"),
        ({"extra": (0, 0)}, "24...N=31"),
        ({"normalize": False}, "normalize=True"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"output_gate": torch.ones(2, 31, 2, 8)}, "output_gate...(2, 24, 2, 8)...(2, 31, 2, 8)"),
        ({"key_mask": torch.ones(2, 24)}, "key_mask...(2, 31)...(2, 24)"),
        ({"rotary": (torch.ones(1, 24, 1, 8),) * 2}, "rotary...1 or 31, 1, 8)...(1, 24, 1, 8)"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    with refused(words):
        make((4, 6), (3, 4)).attend(**change)
