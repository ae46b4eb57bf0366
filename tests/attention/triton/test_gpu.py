"""What only a GPU shows: offsets beyond 2^31, the same bits twice, CUDA graphs, compiled and autocast models.

``make gpu`` runs these and all other tests with the marker.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch

from mhla_diffusers import apply_mhla, mhla_layers
from mhla_diffusers.attention import mhla_attention, sparse_attention
from mhla_diffusers.benchmark.cases import models

from ...models import small_case
from ..problems import KINDS, Problem, make_problem, random_lists, relative_error
from ..problems import problem_of as small_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
GPU = torch.device("cuda")
by_kind = pytest.mark.parametrize("kind", KINDS)
OF_LAYERS = 5e-2
"""Largest relative error in bfloat16 of a transformer, whose layers round one after the other."""


def problem_of(kind: str, device: torch.device | str = GPU) -> Problem:
    """On a GPU in bfloat16; what has one number per head or block stays float32."""
    return small_problem(kind).to(device, torch.bfloat16)


def by_kernels(problem: Problem):
    return functools.partial(problem.attention, backend="triton")


@pytest.mark.parametrize("many", ["samples", "tokens", "samples, sparse"])
def test_offsets_beyond_32_bits(many):
    """The last sample and block of a call of more than 2^31 elements, against the same one alone.

    Blocks do not see each other: they are mixed by an identity matrix.
    """
    tokens, heads, head_dim, count = 16384, 16, 128, 65
    batch, blocks = (1, count) if many == "tokens" else (count, 1)
    size = (batch, blocks * tokens, heads, head_dim)
    assert math.prod(size) > 2**31
    # of a forward and backward pass: 16 tensors of the size of the query, some of them float32, and a margin
    needed, free = 18 * 2 * math.prod(size), torch.cuda.mem_get_info(GPU)[0]
    if needed > free:
        pytest.skip(f"it needs {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free")
    lists = None
    if "sparse" in many:
        lists = random_lists((tokens,), 64, 32, heads=heads, density=0.05)
        lists = replace(lists, keys=lists.keys.to(GPU))
    weights = {name: torch.ones(heads, device=GPU) for name in ("pooled_bias", "state_weight")}

    def attend(x: torch.Tensor, blocks: int) -> list[torch.Tensor]:
        """Output and gradient of query, key and value, which are one tensor to save memory."""
        x = x.detach().requires_grad_()
        if lists is not None:
            output = sparse_attention(x, x, x, (x.shape[1],), lists=lists, **weights, backend="triton")
        else:
            mixing = torch.eye(blocks, device=GPU)
            output = mhla_attention(x, x, x, mixing, (x.shape[1],), (blocks,), backend="triton")
        return [output.detach(), *torch.autograd.grad(output, [x], x.detach())]

    torch.manual_seed(0)
    whole = torch.randn(size, device=GPU, dtype=torch.bfloat16)
    last = slice(batch - 1, None), slice(-tokens, None)
    found = [x[last].clone() for x in attend(whole, blocks)]
    for one, expected in zip(found, attend(whole[last].clone(), 1), strict=True):
        assert relative_error(one, expected) < 3e-2


@pytest.mark.parametrize("kind", [*KINDS, "one long block"])
def test_the_same_bits_twice(kind):
    """Also of one block that several programs add up."""
    problem = make_problem((1187,), (1,), head_dim=32).to() if kind == "one long block" else problem_of(kind)
    first, second = (problem.run(by_kernels(problem)) for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@by_kind
def test_a_graph_reads_its_inputs_anew(kind):
    """Captured on one input and replayed on another."""
    problem = problem_of(kind)
    given = {name: x.clone() for name, x in problem.tensors.items()}
    attend = torch.no_grad()(functools.partial(by_kernels(problem), **given, **problem.settings))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, which cannot be captured
        attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend()
    given["query"].copy_(problem.tensors["query"].flip(1))
    graph.replay()
    assert torch.equal(output, attend())


@by_kind
def test_compiled_without_a_break(kind):
    """One graph; output and gradients."""
    problem = problem_of(kind)
    compiled = torch.compile(problem.attention, fullgraph=True, dynamic=False)
    found = problem.run(functools.partial(compiled, backend="triton"))
    torch.compiler.reset()
    for name, expected in problem.run(by_kernels(problem)).items():
        assert relative_error(found[name], expected) <= OF_LAYERS, name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
def test_a_device_that_is_not_the_current_one():
    there, here = problem_of("plain", "cuda:1"), problem_of("plain")
    found = there.run(by_kernels(there))
    for name, expected in here.run(by_kernels(here)).items():
        assert relative_error(found[name].to(GPU), expected) < 1e-2, name


def patched(name: str, backend: str, **settings):
    """A seeded transformer in float32, every layer patched, by MHLA if nothing else is said; and its arguments."""
    case = small_case(models()[name])
    transformer = case.build(GPU, torch.float32)
    inputs = case.inputs(transformer, torch.float32)
    settings = settings or {"blocks": case.model.blocks}
    return apply_mhla(transformer, layers="all", backend=backend, **settings), inputs


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana"])
def test_a_training_step_under_autocast(name):
    """The loss of the eager backend, and every mixing matrix gets a gradient and moves."""
    losses = {}
    for backend in ("eager", "triton"):
        transformer, inputs = patched(name, backend)
        optimizer = torch.optim.AdamW(transformer.train().parameters(), lr=1e-3)
        with torch.autocast("cuda", torch.bfloat16):
            output = transformer(**inputs)[0]
        loss = output.float().square().mean()
        loss.backward()
        mixings = [layer.mixing for layer in mhla_layers(transformer).values()]
        before = [x.detach().clone() for x in mixings]
        assert all(bool(x.grad.isfinite().all()) for x in mixings)
        optimizer.step()
        assert not any(map(torch.equal, mixings, before))
        losses[backend] = float(loss)
    assert losses["triton"] == pytest.approx(losses["eager"], rel=OF_LAYERS)


@pytest.mark.parametrize("settings", [{}, {"density": 0.1, "block_size": 16}], ids=["MHLA", "sparse"])
@torch.no_grad()
def test_compiled_repeated_blocks(settings):
    """Diffusers' own way to compile a transformer, after a patch."""
    transformer, inputs = patched("tiny-wan", "triton", **settings)
    expected = transformer(**inputs)[0]
    transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    assert relative_error(transformer(**inputs)[0], expected) <= OF_LAYERS
    torch.compiler.reset()
