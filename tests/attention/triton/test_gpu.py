"""What only a GPU shows: offsets beyond 2^31, the same bits twice, CUDA graphs, compiled and autocast models.

``make gpu`` runs these and all other tests with the marker.
"""

import functools
import math

import pytest
import torch

from mhla_diffusers import apply_mhla, mhla_layers
from mhla_diffusers.attention import BlockLists, ContentRule, mhla_attention
from mhla_diffusers.benchmark.measure import free_bytes
from mhla_diffusers.benchmark.models import build_transformer, make_forward_inputs, models, small_size

from ..problems import Problem, make_problem, relative_error
from ..test_sparse import make, random_lists
from .test_kernels import EVERYTHING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
GPU = torch.device("cuda")
TRITON = functools.partial(mhla_attention, backend="triton")
GRID, SIZE = (3, 8, 8), 16
PROBLEMS = {
    "plain": make_problem(GRID, (1, 2, 2), head_dim=16, **EVERYTHING),
    "sparse": make(GRID, SIZE, head_dim=16, **EVERYTHING),
    "sparse by content": make(GRID, SIZE, head_dim=16, **EVERYTHING),
    "causal": make_problem((64,), (4,), head_dim=16, causal="token", rotary=True, rope="before"),
}
PROBLEMS["sparse by content"].options["sparse"] = ContentRule(SIZE, 0.3, fit_pooled_bias=False)
by_kind = pytest.mark.parametrize("kind", PROBLEMS)
OF_LAYERS = 5e-2
"""Largest relative error in bfloat16 of a transformer, whose layers round one after the other."""


def moved(x, device=GPU):
    """Tensors, pairs of them and block lists on a device."""
    if isinstance(x, tuple):
        return tuple(moved(one, device) for one in x)
    if isinstance(x, BlockLists):
        return BlockLists(x.block_size, x.keys.to(device), x.pairs)
    return x.to(device) if isinstance(x, torch.Tensor) else x


def problem_of(kind: str, device: torch.device | str = GPU) -> Problem:
    """On a GPU in bfloat16; what has one number per head or block stays float32."""
    problem = PROBLEMS[kind]
    tensors = {name: x.bfloat16() if x.ndim == 4 else x for name, x in moved(tuple(problem.tensors.items()), device)}
    return Problem(tensors, problem.grid, problem.blocks, dict(moved(tuple(problem.options.items()), device)))


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
    needed, free = 18 * 2 * math.prod(size), free_bytes(GPU)
    if needed > free:
        pytest.skip(f"it needs {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free")
    options = {}
    if "sparse" in many:
        options = {"sparse": moved(random_lists((tokens,), 64, heads, 0.05))}
        options |= {"pooled_bias": torch.zeros(heads, device=GPU), "linear_weight": torch.ones(heads, device=GPU)}

    def attend(x: torch.Tensor, blocks: int) -> list[torch.Tensor]:
        """Output and gradient of query, key and value, which are one tensor to save memory."""
        x = x.detach().requires_grad_()
        output = TRITON(x, x, x, torch.eye(blocks, device=GPU), (x.shape[1],), (blocks,), **options)
        return [output.detach(), *torch.autograd.grad(output, [x], x.detach())]

    torch.manual_seed(0)
    whole = torch.randn(size, device=GPU, dtype=torch.bfloat16)
    last = slice(batch - 1, None), slice(-tokens, None)
    found = [x[last].clone() for x in attend(whole, blocks)]
    for one, expected in zip(found, attend(whole[last].clone(), 1), strict=True):
        assert relative_error(one, expected) < 3e-2


@by_kind
def test_the_same_bits_twice(kind):
    problem = problem_of(kind)
    first, second = problem.run(TRITON), problem.run(TRITON)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@by_kind
def test_a_graph_reads_its_inputs_anew(kind):
    """Captured on one input and replayed on another."""
    problem = problem_of(kind)
    given = {name: x.clone() for name, x in problem.tensors.items()}
    attend = torch.no_grad()(
        functools.partial(TRITON, **given, grid=problem.grid, blocks=problem.blocks, **problem.options)
    )
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
    compiled = torch.compile(mhla_attention, fullgraph=True, dynamic=False)
    found = problem.run(functools.partial(compiled, backend="triton"))
    torch.compiler.reset()
    for name, expected in problem.run(TRITON).items():
        assert relative_error(found[name], expected) <= OF_LAYERS, name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
def test_a_device_that_is_not_the_current_one():
    found = problem_of("plain", "cuda:1").run(TRITON)
    for name, expected in problem_of("plain").run(TRITON).items():
        assert relative_error(found[name].to(GPU), expected) < 1e-2, name


def patched(name: str, backend: str):
    """A seeded transformer in float32, every layer patched, and the arguments of its forward."""
    model = models()[name]
    transformer = build_transformer(model, small_size(model), None, GPU, torch.float32)
    inputs = make_forward_inputs(model, transformer, small_size(model), GPU, torch.float32)
    return apply_mhla(transformer, blocks=model.blocks, sparse="none", layers="all", backend=backend), inputs


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


@torch.no_grad()
def test_compiled_repeated_blocks():
    """Diffusers' own way to compile a transformer, after a patch."""
    transformer, inputs = patched("tiny-wan", "triton")
    expected = transformer(**inputs)[0]
    transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    assert relative_error(transformer(**inputs)[0], expected) <= OF_LAYERS
    torch.compiler.reset()
