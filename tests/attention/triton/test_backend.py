"""When the Triton backend is taken or refused, and what PyTorch can do with its operators."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from mhla_diffusers.attention import (
    BlockLists,
    MHLACall,
    initial_mixing,
    mhla_attention,
    register_feature_map,
    sparse_attention,
)
from mhla_diffusers.attention.feature_maps import _FEATURE_MAPS
from mhla_diffusers.attention.rope import rotary_table
from mhla_diffusers.attention.triton import read, states
from mhla_diffusers.attention.triton.backend import why_not

from ...refusals import refused
from ..problems import errors_against_reference, make_problem
from ..shares import shares_of
from .test_kernels import DEVICE, EVERYTHING, on_device

pytestmark = pytest.mark.gpu

LAYOUT = {"mixing": torch.rand(4, 4, device=DEVICE), "grid": (4, 6), "blocks": (2, 2)}


def run(dtype=torch.float32, head_dim=8, **options):
    query, key, value = torch.randn(3, 1, 24, 1, head_dim, dtype=dtype, device=DEVICE)
    return mhla_attention(query, key, value, **LAYOUT, **({"backend": "triton"} | options))


def test_importing_the_package_does_not_make_kernels():
    """Diffusers itself imports Triton, through torch; the modules that need it here wait for the first call."""
    kernels = "any('mhla_diffusers.attention.triton.' + name in sys.modules for name in ('states', 'listed', 'pooled'))"
    script = f"import sys, mhla_diffusers; sys.exit({kernels})"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="auto takes the kernels on a GPU")
def test_auto_takes_eager_on_the_cpu():
    torch.manual_seed(0)
    found = run(backend="auto")
    torch.manual_seed(0)
    assert torch.equal(found, run(backend="eager"))


REFUSED = {
    "float64": {"dtype": torch.float64},
    "257...256": {"head_dim": 257},
    "output_gate is on meta, but query is on": {"output_gate": torch.ones(1, 24, 1, 8, device="meta")},
    "rotary is on meta, but query is on": {"rotary": (torch.ones(1, 24, 1, 8, device="meta"),) * 2},
}


@pytest.mark.parametrize(("words", "options"), REFUSED.items(), ids=REFUSED)
def test_what_it_cannot_run_is_refused_with_the_reason(words, options):
    with refused(words):
        run(**options)


@pytest.mark.parametrize("transform", ["jvp", "dual_level", "grad"])
def test_derivatives_that_the_kernels_lack_are_refused(transform):
    """A custom operator drops tangents without a word; so no operator runs then, and auto takes eager."""
    x = torch.randn(1, 24, 1, 8, device=DEVICE)

    def attend(x, backend="triton"):
        return mhla_attention(x, x, x, **LAYOUT, backend=backend).sum()

    def differentiate(function):
        if transform == "jvp":
            return torch.func.jvp(function, (x,), (x,))[1]
        if transform == "grad":
            return torch.func.grad(function)(x)
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent

    with refused("forward-mode", 'backend="eager"'):
        differentiate(attend)
    auto, eager = (differentiate(partial(attend, backend=backend)) for backend in ("auto", "eager"))
    torch.testing.assert_close(auto, eager)
    if transform == "grad":  # PyTorch itself refuses custom operators
        return
    place = [4, 6], [2, 2], 0, 0, "relu", 1e-6, False, True
    with refused('backend="eager" under torch.func.jvp', error=NotImplementedError):
        differentiate(lambda x: states.block_states(x, x, None, None, *place)[0].sum())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("block size is 4", {"block_size": 4}),
        ("block size is 48", {"block_size": 48, "key_block_size": 16}),
        ("block size is 8", {"block_size": 16, "key_block_size": 8}),
        ("rotary is on meta", {"block_size": 16, "rotary": (torch.ones(1, 24, 1, 8, device="meta"),) * 2}),
    ],
    ids=str,
)
def test_sparse_attention_that_it_cannot_run_is_refused_with_the_reason(words, options):
    query, key, value = torch.randn(3, 1, 24, 1, 8, device=DEVICE)
    with refused(words):
        sparse_attention(query, key, value, (4, 6), backend="triton", **options)


def test_a_feature_map_of_the_user_is_refused_and_runs_with_auto():
    register_feature_map("squared", lambda x, eps: x.square() + eps)
    try:
        with refused("squared"):
            run(feature_map="squared")
        assert run(feature_map="squared", backend="auto").isfinite().all()
    finally:
        del _FEATURE_MAPS["squared"]


def test_tensors_on_the_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refused("TRITON_INTERPRET"):
        mhla_attention(*torch.randn(3, 1, 24, 1, 8), LAYOUT["mixing"].cpu(), (4, 6), (2, 2), backend="triton")
    assert "meta" in why_not(torch.empty(1, 4, 1, 8, device="meta"), "relu")


def operator_arguments(everything):
    """Arguments of both operators; with everything, of a share of the tokens."""
    problem = on_device(make_problem((5, 7), (2, 1), batch=1, heads=1, **(EVERYTHING if everything else {})))
    tensors = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    call = MHLACall(**tensors, grid=problem.grid, blocks=problem.blocks, **problem.options)
    if everything:
        call = shares_of(call, (11, 24))[1]
    mixture = torch.rand(1, 1, 2, 8, 8, device=DEVICE, requires_grad=True)
    sums = torch.rand(1, 1, 2, 8, device=DEVICE, requires_grad=True)
    mask = None if call.key_mask is None else call.key_mask.float().contiguous()
    angles = None if call.rotary is None else rotary_table(call.rotary).contiguous()
    others = *(None,) * 3, call.output_norm, call.output_gate, angles
    place = list(call.grid), list(call.blocks), call.first, 0, call.feature_map, call.eps, False
    of_states = call.key, call.value, mask, angles, *place, True
    return of_states, (call.query, mixture, sums, *others, *place, everything)


def beside_arguments():
    """Arguments of both operators beside extra tokens, with rows that are padded."""
    rows, output = torch.randn(2, 1, 2, 48, 16, device=DEVICE)
    lse = torch.randn(2, 48, device=DEVICE)
    leaves = [rows, torch.rand(1, 2, 2, 16, 16), torch.rand(1, 2, 2, 16), output[0].clone(), lse, torch.rand(2)]
    query, mixture, sums, near, near_lse, weight = (x.to(DEVICE).requires_grad_() for x in leaves)
    place = [5, 7], [2, 1], 0, 16, "relu", 1e-6, False
    of_states = query, query, None, None, *place, True
    return of_states, (query, mixture, sums, near, near_lse, weight, None, None, None, *place, False)


ARGUMENTS = {
    "alone": lambda: operator_arguments(False),
    "everything": lambda: operator_arguments(True),
    "beside": beside_arguments,
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_opcheck(kind):
    of_states, of_read = ARGUMENTS[kind]()
    torch.library.opcheck(states.block_states, of_states)
    torch.library.opcheck(read.read_states, of_read)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_opcheck_of_the_backward(kind):
    of_states, of_read = tree_map_only(torch.Tensor, torch.Tensor.detach, ARGUMENTS[kind]())
    upstream = [torch.randn_like(x) for x in states.block_states(*of_states)]
    torch.library.opcheck(states.block_states_backward, (*upstream, *of_states))
    output, normaliser = read.read_states(*of_read)
    upstream = torch.randn_like(output), torch.randn_like(normaliser)
    torch.library.opcheck(read.read_states_backward, (*upstream, *of_read))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_second_derivative_is_refused(sparse):
    query = torch.randn(1, 24, 1, 16, device=DEVICE, requires_grad=True)
    if sparse:
        lists = BlockLists.from_mask(16, torch.eye(2, dtype=torch.bool, device=DEVICE)[None])
        output = sparse_attention(query, query, query, LAYOUT["grid"], lists=lists, backend="triton")
    else:
        output = mhla_attention(query, query, query, **LAYOUT, backend="triton")
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with refused('backend="eager"', error=NotImplementedError):
        gradient.sum().backward()


def test_kernels_that_cannot_be_imported_are_a_reason():
    """As with a Triton that is older than allowed: eager operations run, and the log says why, once."""
    script = """
import torch, triton
del triton.jit
from mhla_diffusers.attention import mhla_attention
from mhla_diffusers.attention.triton.backend import why_not
query = torch.ones(1, 4, 1, 8)
for _ in range(2):
    assert "cannot be imported" in why_not(query, "relu")
assert mhla_attention(query, query, query, torch.ones(1, 1), (4,), (1,)).isfinite().all()
try:
    mhla_attention(query, query, query, torch.ones(1, 1), (4,), (1,), backend="triton")
except ValueError as error:
    assert "cannot be imported" in str(error)
else:
    raise SystemExit("not refused")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True)
    assert done.stderr.count("The Triton kernels cannot be imported") == 1


@pytest.mark.parametrize("options", [{}, {"rotary": True, "norm": True}], ids=str)
def test_a_query_that_gives_weight_to_masked_keys_alone_gets_nothing(options):
    """As in eager: its row of the mixing matrix has zeros for all other blocks."""
    problem = make_problem((12,), (3,), head_dim=16, mask=True, **options)
    problem.tensors["mixing"] = initial_mixing((3,))
    problem.options["key_mask"] = (torch.arange(12) < 4).expand(2, -1)
    problem = on_device(problem)
    found = problem.run(mhla_attention, backend="triton")
    assert all(x.isfinite().all() for x in found.values())
    assert not found["output"][:, 4:].any() and found["output"][:, :4].any(dim=-1).all()
    for name, error in errors_against_reference(problem, torch.float32, "triton").items():
        assert error <= 5e-6, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_in_one_graph(dynamic):
    def attend(query, key, value, mixing, grid):
        return mhla_attention(query, key, value, mixing, grid, (2, 2), backend="triton") * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for grid in ((4, 6), (5, 3)):
        problem = on_device(make_problem(grid, (2, 2), batch=1, heads=1))
        results = []
        for function in (attend, compiled):
            leaves = [problem.tensors[name].clone().requires_grad_() for name in ("query", "key", "value", "mixing")]
            output = function(*leaves, grid)
            output.square().sum().backward()
            results.append([output.detach(), *(leaf.grad for leaf in leaves)])
        for eager, found in zip(*results, strict=True):
            torch.testing.assert_close(found, eager)


def test_activation_checkpointing():
    problem = on_device(make_problem((4, 6), (2, 2), batch=1, heads=1, **EVERYTHING))

    def attend(**arguments):
        return mhla_attention(**arguments, backend="triton")

    def checkpointed(**arguments):
        return checkpoint(attend, use_reentrant=False, **arguments)

    plain, kept = problem.run(attend), problem.run(checkpointed)
    for name in plain:
        assert torch.equal(plain[name], kept[name]), name


def test_autocast_does_not_lower_the_accumulation():
    problem = on_device(make_problem((4, 6), (2, 2), batch=1, heads=1))
    plain = problem.run(mhla_attention, backend="triton")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cast = problem.run(mhla_attention, backend="triton")
    for name in plain:
        assert torch.equal(plain[name], cast[name]), name
