"""What PyTorch asks of an operator, of every operator of the kernels; and that given lists are as chosen ones."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

from mhla_diffusers.attention import BlockLists, MHLACall
from mhla_diffusers.attention.rope import rotary_table
from mhla_diffusers.attention.triton import (
    branches,
    choose,
    fit,
    listed,
    merge,
    pooled,
    prepare,
    read,
    states,
)

from ..problems import DEVICE, EVERYTHING, make_problem
from ..test_shares import shares_of

pytestmark = pytest.mark.gpu


def detached(*arguments):
    """Arguments of a backward operator, or of one that has no gradient."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()


def positive(*shape):
    return random(*shape).detach().abs().requires_grad_()


def alone(everything):
    """Arguments of block_states and read_states; with everything, of a share of the tokens."""
    options = EVERYTHING if everything else {}
    problem = make_problem((5, 7), (2, 1), batch=1, heads=1, **options).to()
    tensors = {name: x.requires_grad_() for name, x in problem.tensors.items()}
    call = MHLACall(**tensors, **problem.settings)
    if everything:
        call = shares_of(call, (11, 24))[1]
    mask = None if call.key_mask is None else call.key_mask.float().contiguous()
    angles = None if call.rotary is None else rotary_table(call.rotary).contiguous()
    others = call.output_norm, call.output_gate, angles
    place = list(call.grid), list(call.blocks), call.first, call.feature_map, call.eps, False
    mixture = positive(1, 1, 2, 8, 8), positive(1, 1, 2, 8)
    return (call.key, call.value, mask, angles, *place, True), (call.query, *mixture, *others, *place)


def linear_calls(of_states, of_read):
    yield states.block_states, of_states
    yield read.read_states, of_read
    of_states, of_read = detached(of_states, of_read)
    upstream = map(torch.randn_like, states.block_states(*of_states))
    yield states.block_states_backward, (*upstream, *of_states)
    yield read.read_states_backward, (*map(torch.randn_like, read.read_states(*of_read)), *of_read)


def sparse_calls(mask, with_states):
    query, key, value = (random(2, 35 + 5, 2, 16) for _ in range(3))
    table = random(1, 40, 1, 16).detach()
    weights = (random(2, 40).detach() > -0.5).float() if mask else None
    place, whole, scale = ([5, 7], 16, 5), ([5, 7], 16, 16, 5), 0.25
    yield prepare.prepare, (query, key, value, table, weights, *whole, True, with_states)
    rows = prepare.prepare(query, key, value, table, weights, *whole, True, with_states)
    of_rows = detached(*rows)
    of_states = (of_rows[6], of_rows[8]) if with_states else (None, None)
    gradients = *of_rows[:3], *of_rows[4:6], *of_states
    of_keys = *of_rows[1:3], of_rows[7], table, weights
    yield prepare.prepare_backward, (*gradients[:3], of_rows[3], *gradients[3:], *of_keys, *whole, query.shape[2])
    *_, bias, of_blocks = of_rows
    bias = bias if mask else None
    q, k, v, pooled_query, pooled_key, pooled_value = (
        x.detach().contiguous().requires_grad_() for x in (rows[0][:, :48], *rows[1:6])
    )
    variance = random(4, 3, 3).detach().abs()
    gain = variance.clone().requires_grad_() if with_states else None
    chosen = pooled_query, pooled_key, gain, variance, of_blocks, None, 1, scale, *place
    yield choose.choose, chosen
    indices, counts, bits, mixing = detached(*choose.choose(*chosen))
    if with_states:
        yield choose.choose_backward, (torch.randn_like(mixing), bits, *detached(*chosen))
    outputs = []
    for operator, backward, inputs in (
        (listed.listed, listed.listed_backward, (q, k, v, bias, indices, counts, scale, *place, False)),
        (
            pooled.pooled,
            pooled.pooled_backward,
            (q, pooled_key, pooled_value, gain, of_blocks.log(), bits, scale),
        ),
    ):
        yield operator, inputs
        output, lse = detached(*operator(*inputs))
        outputs += [output, lse]
        yield backward, (torch.randn_like(output), torch.randn_like(lse), output, lse, *detached(*inputs))
    mixed, gamma = (random(4, 3, 16, 16), torch.rand(4, device=DEVICE)) if with_states else (None, None)
    yield fit.fit, detached(q, k, v, bias, *outputs, mixed, scale, *place)
    of_merge = *(x.requires_grad_() for x in outputs), q if with_states else None, mixed, gamma, scale, [5, 7], 16, 2
    yield merge.merge, of_merge
    yield merge.merge_backward, (random(2, 35, 2, 16).detach(), *detached(*of_merge))


CALLS = {
    "MHLA": lambda: linear_calls(*alone(False)),
    "MHLA, everything": lambda: linear_calls(*alone(True)),
    "sparse": lambda: sparse_calls(False, False),
    "sparse, mask and states": lambda: sparse_calls(True, True),
}


@pytest.mark.parametrize("kind", CALLS)
def test_opcheck(kind):
    """Of sparse attention not what PyTorch makes of an operator in a graph, which takes minutes."""
    of_graphs = () if "sparse" in kind else ("test_aot_dispatch_dynamic",)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", *of_graphs)
    for operator, inputs in CALLS[kind]():
        torch.library.opcheck(operator, inputs, test_utils=tests)


def test_given_lists_are_those_that_the_kernel_chooses():
    """Indices, counts and bits of lists by content, given back as lists, are the same."""
    make = torch.Generator().manual_seed(0)
    groups, blocks = 6, 40
    query, key = (torch.randn(groups, blocks, 16, generator=make).to(DEVICE) for _ in range(2))
    variance = torch.rand(groups, blocks, blocks, generator=make).to(DEVICE)
    tensors, place = (
        (query, key, None, variance, torch.ones(groups, blocks, device=DEVICE)),
        ([blocks * 16 - 3], 16, 20),
    )
    expected = choose.choose(*tensors, None, 12, 0.25, *place)
    base = torch.arange(groups, device=DEVICE)[:, None, None] * (blocks + 2)
    keys = expected[0].view(groups, blocks, -1)[..., :12].long() - base
    given = branches.bits_of(BlockLists(16, keys.view(2, 3, blocks, 12)), 2)
    assert all(map(torch.equal, choose.choose(*tensors, given, 12, 0.25, *place), expected))
