"""What a CUDA graph must not meet, as far as a machine without a GPU can tell: waiting for it, or memory of the CPU.

The operators run on the meta device with nothing launched. Reading a value there is an error; a tensor that PyTorch
makes on the CPU would have to be copied over, which no graph can record.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mhla_diffusers.attention import Call, ExactTiles
from mhla_diffusers.attention.tiles import lists_with_outside
from mhla_diffusers.attention.triton import (
    exact_backward,
    exact_forward,
    exact_tile,
    launches,
    mixing_kernels,
    operators,
)
from mhla_diffusers.attention.triton.exact_key_gradients import OutputSide
from mhla_diffusers.attention.triton.exact_lists import ExactCall

GRID, COUNTS = (3, 4, 6), (1, 2, 3)


class OnlyOn(TorchDispatchMode):
    """Raises where an operation makes or reads a tensor of another device."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.device.type != self.device:
                raise AssertionError(f"{func} has to do with a tensor on {x.device}")
        return result


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch):
    for module in (launches, exact_tile, mixing_kernels):
        monkeypatch.setattr(module, "architecture_of", lambda _: "sm_90")
    with launches.launched_by(lambda launch: None):
        yield


def twice(run):
    """Caches, which the calls before a capture fill, are full at the second call."""
    run()
    with OnlyOn("meta"):
        run()


def draw(*size):
    return torch.empty(size, device="meta", dtype=torch.bfloat16)


def test_the_mode_sees_a_tensor_of_the_cpu():
    with pytest.raises(AssertionError, match="cpu"), OnlyOn("meta"):
        torch.arange(3).to("meta")


@pytest.mark.parametrize("blocks", [COUNTS, (2, 3, 4)], ids=str)
def test_mhla(blocks):
    row, size = (2, 72, 2, 8), math.prod(blocks)
    call = Call(
        draw(*row),
        draw(*row),
        draw(*row),
        torch.empty(2, size, size, device="meta"),
        GRID,
        blocks,
        rotary=torch.empty(1, 13, 1, 8, device="meta"),
        rotary_axes=(4, 2, 2),
        key_mask=torch.empty(2, 72, device="meta"),
        output_norm=draw(8),
        output_gate=draw(*row),
    )

    def run():
        summary = operators.summarise(call)
        output, normaliser = operators.read_summary(call, summary, True)
        of_summary, *_ = operators.read_summary_backward(call, summary, torch.empty_like(output), normaliser)
        operators.summarise_backward(call, of_summary)

    twice(run)


@pytest.mark.parametrize("outside", [0, 14])
@pytest.mark.parametrize("means", [False, True])
def test_exact_tiles(means, outside):
    mask = torch.eye(6, dtype=torch.bool).expand(2, -1, -1)
    tiles = ExactTiles.from_mask(COUNTS, mask)
    row = (2, 72 + outside, 2, 8)
    tiles = ExactTiles(COUNTS, 2, tiles.offsets.to("meta"), tiles.keys.to("meta"))
    given = (*(draw(*row) for _ in range(3)), torch.empty(2, device="meta") if means else None)
    mask = torch.empty(2, 72 + outside, device="meta")

    def run():
        lists = lists_with_outside(tiles, 2) if outside else (tiles.offsets, tiles.keys)
        call = ExactCall(*given, mask, *lists, GRID, COUNTS, outside)
        output, log_sum = exact_forward.forward(call)
        exact_backward.backward(call, OutputSide(output, log_sum, output, log_sum))

    twice(run)
