"""What every kind of call promises, on both backends."""

from functools import partial
from itertools import product

import pytest
import torch

from .problems import DEVICE, KINDS, Problem, problem_of, reference
from .test_reference import check

ON_KERNELS = ["MHLA", "causal by token, softmax", "lists", "by content, text"]
"""Kinds that together launch every kernel, of which the interpreter takes its time."""
by_kind = pytest.mark.parametrize("kind", KINDS)


def on_both(eager, triton):
    """Some kinds for each backend."""
    cases = [(kind, "eager") for kind in eager]
    cases += [pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in triton]
    return pytest.mark.parametrize(("kind", "backend"), cases)


by_kind_and_backend = on_both(KINDS, ON_KERNELS)


def running(problem: Problem, backend: str):
    """The attention of a backend with the arguments of :meth:`Problem.run`."""
    return partial(problem.attention, backend=backend)


def plain(kind: str, **changes) -> Problem:
    """Without what scales an output: its queries' weights sum to 1."""
    rope = "before" if KINDS[kind][1].get("rotary") and "blocks" in problem_of(kind).settings else None
    more = {"rope": rope} if rope else {}
    changes |= {"norm": False, "gate": False} | more
    if "not normalised" in kind:
        changes |= {"normalize": True, "feature_map": "relu"}
    return problem_of(kind, **changes)


@by_kind_and_backend
def test_weights_sum_to_one_and_large_logits_stay_finite(kind, backend):
    problem = plain(kind).to()
    value = torch.ones_like(problem.tensors["value"])
    for scale in (1, 300):
        found = problem.attend(value=value, query=scale * problem.tensors["query"], backend=backend)
        # of values that are all 1 the states are 0 but for rounding, which large queries multiply
        torch.testing.assert_close(found, value, rtol=1e-5, atol=2e-6 * scale)


@by_kind_and_backend
def test_a_sample_without_a_key_gets_nothing(kind, backend):
    """As from PyTorch's attention, forward and backward; the other samples do not notice."""
    if kind.startswith("causal"):
        pytest.skip("causal attention takes no mask")
    problem = problem_of(kind, batch=2, heads=1, mask=True)
    problem.options["key_mask"][0] = False
    problem = problem.to()
    found = problem.run(running(problem, backend))
    assert all(x.isfinite().all() for x in found.values())
    for name in ("output", "query", "key", "value"):
        assert not found[name][0].any(), name
    options = problem.options | {"key_mask": problem.options["key_mask"][1:]}
    tensors = {name: x[1:] if x.ndim == 4 else x for name, x in problem.tensors.items()}
    others = Problem(tensors, problem.grid, problem.blocks, options).run(running(problem, backend))
    torch.testing.assert_close(found["output"][1:], others["output"])
    if backend == "eager" and "content" not in kind:  # whose lists the reference takes from the call
        assert not reference(**problem.tensors, **problem.settings)[0].any()
        check(problem, torch.float64, "eager")


@by_kind_and_backend
def test_nan_is_shown_and_stays_in_its_sample_and_head(kind, backend):
    problem = problem_of(kind, per_head=False, mask=False).to()
    expected = problem.attend(backend=backend)
    for name in ("query", "key", "value"):
        spoilt = problem.tensors[name].clone()
        spoilt[0, 3, 0, 2] = torch.nan
        found = problem.attend(backend=backend, **{name: spoilt})
        assert found[0, 3, 0].isnan().any(), name
        is_nan = found[0, :, 0].isnan().any(dim=-1)
        if name == "query" and problem.blocks is not None:
            assert is_nan.sum() == 1
        elif name == "key" and not kind.startswith(("causal", "by content")):
            assert is_nan.all(), "every query of the head attends to it"
        assert torch.equal(found[1], expected[1]) and torch.equal(found[0, :, 1], expected[0, :, 1]), name


@on_both(
    [kind for kind in KINDS if kind != "all listed"], ["MHLA", "lists"]
)  # PyTorch's attention to all is as autocast says
def test_autocast_changes_no_bit(kind, backend):
    """Neither in the output nor, where PyTorch differentiates no product under autocast, in the gradients."""
    problem = problem_of(kind, batch=1).to()
    expected = problem.run(running(problem, backend))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = problem.run(running(problem, backend))
    is_sparse = problem.blocks is None
    names = expected if (is_sparse and backend == "eager") or (kind == "MHLA" and backend == "triton") else ["output"]
    for name in names:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@by_kind
def test_the_output_has_the_type_of_the_query(kind, dtype):
    problem = problem_of(kind).to("cpu", dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert problem.attend().dtype == dtype


# Layouts of memory: name → query, key and value (B, N, H, D)


STRIDED = {
    "fused": lambda b, n, h, d: torch.randn(b, n, 3, h, d).unbind(2),
    "heads before tokens": lambda b, n, h, d: torch.randn(3, b, h, n, d).transpose(2, 3).unbind(),
    "channels not last": lambda b, n, h, d: torch.randn(3, b, d, n, h).permute(0, 1, 3, 4, 2).unbind(),
    "expanded": lambda b, n, h, d: [
        x.expand(b, n, h, d) for x in (torch.randn(1, n, h, d), torch.randn(b, n, 1, d), torch.randn(b, 1, h, 1))
    ],
    # PyTorch cannot view them as complex numbers
    "every other token, not aligned": lambda b, n, h, d: torch.randn(3, b, 2 * n, h, d + 1)[:, :, ::2, :, 1:].unbind(),
}
VIEWED = [
    *product(("MHLA", "MHLA, RoPE before", "causal by token, softmax", "lists"), STRIDED, ["eager"]),
    *(pytest.param("MHLA", strided, "triton", marks=pytest.mark.gpu) for strided in STRIDED),
    *(pytest.param("lists", strided, "triton", marks=pytest.mark.gpu) for strided in list(STRIDED)[2:]),
]


@pytest.mark.parametrize(("kind", "strided", "backend"), VIEWED)
def test_views_give_what_copies_give_and_are_not_changed(kind, strided, backend):
    torch.manual_seed(0)
    problem = problem_of(kind, norm=False, gate=False, mask=False).to()
    views = [x.to(DEVICE) for x in STRIDED[strided](*problem.tensors["query"].shape)]
    before = [x.clone() for x in views]

    def run(copy):
        leaves = [(x.contiguous() if copy else x).detach().requires_grad_() for x in views]
        output = problem.attend(**dict(zip(("query", "key", "value"), leaves, strict=True)), backend=backend)
        return output.detach(), *torch.autograd.grad(output.sum(), leaves)

    for view, copy in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(view, copy)
    assert all(map(torch.equal, views, before))


@on_both(["causal by token", "causal by block, softmax"], ["MHLA", "lists", "by content, text"])
def test_compile_as_one_graph(kind, backend):
    """Output and gradients; lists are made outside, since a constructor may not read values while a graph is traced."""
    problem = problem_of(kind, batch=1).to()
    compiled = torch.compile(problem.attention, fullgraph=True, dynamic=False, backend="aot_eager")
    expected, found = problem.run(running(problem, backend)), problem.run(compiled, backend=backend)
    for name, value in expected.items():
        # compiled, RoPE is other operations, whose rounding a small normaliser makes as large as the largest gradients
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@on_both(["by content"], ["by content, text"])
@torch.no_grad()
def test_compile_as_one_graph_for_all_lengths_of_text(kind, backend):
    """Another length makes a graph for all."""
    torch.compiler.reset()  # shapes that changed between tests would be symbols from the begin
    compiled = torch.compile(problem_of(kind).attention, fullgraph=True, backend="aot_eager")
    for text in (3, 5, 6):
        problem = problem_of(kind, batch=1, mask=True, extra=(0, text)).to()
        found = compiled(**problem.tensors, **problem.settings, backend=backend)
        torch.testing.assert_close(found, problem.attend(backend=backend))
