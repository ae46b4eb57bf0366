"""What is counted without processes is what processes send, and what is counted beside MHLA is softmax."""

import torch
from torch.testing import assert_close

from mhla_diffusers.benchmark.parallel import MHLA, SOFTMAX, Layout, Traffic, attend, make_share, make_world, sent
from mhla_diffusers.benchmark.shapes import TINY

from .diffusers_on_cpu import diffusers_on_cpu

LAYOUTS = [Layout(4, 1), Layout(1, 2), Layout(2, 1), Layout(2, 2)]


def test_processes_send_what_is_counted(two, four):
    for layout in LAYOUTS:
        if TINY.heads % layout.ulysses == 0:
            for attention in (SOFTMAX, MHLA):
                expected = [sent(attention, TINY, layout, backward).bytes for backward in (False, True)]
                everyone = (two if layout.processes == 2 else four).run(_send, attention, layout)
                assert all(found == expected for found in everyone)


def _send(attention: str, layout: Layout) -> list[int]:
    found, world = [], make_world(layout)
    for backward in (False, True):
        share = make_share(TINY, world, torch.device("cpu"), torch.bfloat16, backward)
        with diffusers_on_cpu(), Traffic() as traffic:
            output = attend(attention, share)
            if backward:
                output.sum().backward()
        found.append(traffic.bytes)
    return found


def test_the_ring_that_is_counted_is_softmax(two):
    """Diffusers' ring with PyTorch's kernel for CPUs, output and gradients, against one process; float32."""
    two.run(_compare)


def _compare() -> None:
    world = make_world(Layout(ring=2))
    torch.manual_seed(0)
    size = (3, 1, TINY.tokens, TINY.heads, TINY.head_dim)
    whole, direction = torch.randn(size).requires_grad_(), torch.randn(size[1:])
    first, count = world.parallel.own_share(TINY.tokens)
    mine = slice(first, first + count)
    share = make_share(TINY, world, torch.device("cpu"), torch.float32, backward=True)
    with torch.no_grad():
        for name, x in zip(("query", "key", "value"), whole, strict=True):
            share.tensors[name].copy_(x[:, mine])
    with diffusers_on_cpu():
        output = attend(SOFTMAX, share)
        output.backward(direction[:, mine])
    query, key, value = (x.transpose(1, 2) for x in whole)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    expected.backward(direction)
    assert_close(output, expected[:, mine], rtol=1e-5, atol=1e-6)
    for name, gradient in zip(("query", "key", "value"), whole.grad, strict=True):
        assert_close(share.tensors[name].grad, gradient[:, mine], rtol=1e-5, atol=1e-5)
