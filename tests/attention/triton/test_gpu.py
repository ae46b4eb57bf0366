"""What only a GPU shows: offsets beyond 2^31, the same bits twice, and CUDA graphs.

``make gpu`` runs these and all other tests with the marker.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.attention import mhla_attention

from ..problems import KINDS, Problem, attend_sparse, make_problem, random_lists, relative_error
from ..problems import problem_of as small_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
GPU = torch.device("cuda")
by_kind = pytest.mark.parametrize("kind", KINDS)


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
            inputs = dict.fromkeys(("query", "key", "value"), x)
            output = attend_sparse("triton", **inputs, grid=(x.shape[1],), lists=lists, **weights)
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
