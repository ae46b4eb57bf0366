"""The operator on shares of the tokens, over processes on gloo, against the whole in one process."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mhla_diffusers.attention import BlockLists, mhla_attention, sparse_attention
from mhla_diffusers.attention.layout import block_count
from mhla_diffusers.attention.parallel.place import Group, Parallel, parts
from mhla_diffusers.benchmark.processes import make_config
from mhla_diffusers.patching.parallel import parallel_of

from ..refusals import refused
from .processes import Processes

HEADS, HEAD_DIM = 4, 12


def parallel(ring: int, ulysses: int, anything: bool = False) -> Parallel:
    """As diffusers sets it up."""
    return replace(parallel_of(make_config(ring, ulysses)), anything=anything)


def random_mask(grid: tuple[int, ...], block_size: int, samples: int, density: float = 0.3) -> torch.Tensor:
    """Of lists that differ in length; every query block has one key block at least."""
    blocks = block_count(grid, block_size)
    scores = torch.rand(samples, HEADS, blocks, blocks, generator=torch.Generator().manual_seed(2))
    return (scores < density) | (scores == scores.amin(dim=-1, keepdim=True))


def lists_of(mask: torch.Tensor, block_size: int, heads: slice) -> BlockLists:
    mask = mask[:, heads]
    return BlockLists.from_mask(block_size, mask if len(mask) > 1 else mask[0])


def own_tokens(place: Parallel, grid: tuple[int, ...], extra: tuple[int, int]) -> tuple[torch.Tensor, slice]:
    """Where a process's tokens stand in the sequence, as diffusers splits it, and on the grid those of the grid."""
    tokens, (before, after) = math.prod(grid), extra
    rank, size = place.whole.rank, place.whole.size
    first, count = place.own_share(tokens)
    own_before, own_after = parts(before, size)[rank], parts(after, size)[rank]
    ranges = own_before, (before + first, count), (before + tokens + own_after[0], own_after[1])
    return torch.cat([torch.arange(begin, begin + n) for begin, n in ranges]), slice(first, first + count)


def errors(
    degrees: tuple[int, int],
    anything: bool,
    grid: tuple[int, ...],
    blocks: tuple[int, ...],
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, float]:
    """Relative error of the output and of every gradient, of shares against the whole.

    Without ``blocks`` the settings are of sparse attention, else of MHLA.
    """
    place = parallel(*degrees, anything)
    settings = dict(settings)
    extra = settings.pop("extra", (0, 0))
    on_grid, batch = math.prod(grid), 2
    tokens = on_grid + sum(extra)
    make = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    leaves = {name: draw(batch, tokens, HEADS, HEAD_DIM) for name in ("query", "key", "value")}
    if blocks:
        leaves["mixing"] = draw(HEADS, math.prod(blocks), math.prod(blocks)).abs() + 0.1
        settings["blocks"] = blocks
    if settings.pop("norm", False):
        leaves["output_norm"] = draw(HEAD_DIM)
    if settings.pop("gate", False):
        leaves["output_gate"] = draw(batch, on_grid, HEADS, HEAD_DIM)
    if settings.pop("linear", False):
        leaves["linear_weight"] = draw(HEADS).exp()
    if settings.pop("given", False):
        settings |= {"pooled_bias": draw(HEADS), "state_weight": draw(HEADS).sigmoid()}
    if masked := settings.pop("mask", False):
        settings["key_mask"] = torch.rand(batch, tokens, generator=make) > 0.3
    if masked == "a sample whole":
        settings["key_mask"][0] = False
    if settings.pop("rotary", False):
        angles = draw(1, tokens, 1, HEAD_DIM // 2).repeat_interleave(2, dim=-1)
        settings["rotary"] = angles.cos(), angles.sin()
    size, samples = settings.pop("lists", None), settings.pop("samples", 1)
    mask = None if size is None else random_mask(grid, size, samples)
    towards = draw(batch, tokens, HEADS, HEAD_DIM)
    here, grid_here = own_tokens(place, grid, extra)

    def run(alone: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        given = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        used: dict[str, Any] = {**given, **settings, "extra": extra}
        if mask is not None:
            used["lists"] = lists_of(mask, size, slice(None) if alone else place.heads(HEADS))
        if not alone:
            used |= {n: used[n][:, here] for n in ("query", "key", "value", "key_mask") if n in used}
            if "output_gate" in used:
                used["output_gate"] = used["output_gate"][:, grid_here]
            if "rotary" in used:
                used["rotary"] = tuple(x[:, here] for x in used["rotary"])
            used["extra"] = tuple(parts(n, place.whole.size)[place.whole.rank][1] for n in extra)
        attention = mhla_attention if blocks else sparse_attention
        output = attention(grid=grid, parallel=None if alone else place, **used)
        loss = (output * (towards if alone else towards[:, here])).sum()
        return output, dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))

    expected, expected_gradients = run(alone=True)
    output, gradients = run(alone=False)
    found = {"output": relative(output, expected[:, here])}
    for name, gradient in gradients.items():
        torch.distributed.all_reduce(gradient)
        found[name] = relative(gradient, expected_gradients[name])
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))


PLAIN, CURVE, SIZE = (4, 5, 6), (3, 5, 6), 8
"""Grids; of the second, half of the tokens, or a quarter, ends within a uniform block of 8."""
ALL = {"norm": True, "gate": True, "mask": True, "rotary": True}
MASKED = {"mask": True, "rotary": True}
CONTENT = MASKED | {"density": 0.25, "block_size": SIZE}
LISTS = MASKED | {"lists": SIZE}
LINEAR_CASES = {
    "plain": {},
    "all": ALL,
    "rope before": ALL | {"rope": "before"},
    "unnormalized": {"normalize": False, "rotary": True},
    "a sample without a key": {"mask": "a sample whole"},
}
TEXT_CASES = {
    "text before": {"extra": (6, 0)},
    "text after": {"extra": (0, 6), "linear": True},
    "text and all": ALL | {"extra": (4, 2)},
    "text that fills more than a block": {"extra": (0, 140)},
}
SPARSE_CASES = {
    "content": CONTENT,
    "curve": CONTENT | {"order": "curve"},
    "means": CONTENT | {"far": "means"},
    "smaller blocks of keys": CONTENT | {"key_block_size": 2},
    "lists": LISTS,
    "lists, weights given": LISTS | {"given": True},
    "lists of every sample": LISTS | {"samples": 2},
    "single tokens": LISTS | {"lists": 1},
    "one block": LISTS | {"lists": 128},
    "everything": CONTENT | {"density": 1.0},
    "text and content": CONTENT | {"extra": (0, 8)},
    "text and lists": LISTS | {"extra": (6, 4)},
}
BLOCKS = (3, 2, 2)
HEADS_CASES = {f"ring {name}": (2, 1, PLAIN, BLOCKS, case, 2e-6) for name, case in LINEAR_CASES.items()}
HEADS_CASES |= {f"heads {name}": (1, 2, PLAIN, BLOCKS, case, 2e-6) for name, case in LINEAR_CASES.items()}
HEADS_CASES |= {f"heads {name}": (1, 2, CURVE, BLOCKS, case, 1e-5) for name, case in TEXT_CASES.items()}
HEADS_CASES |= {f"heads {name}": (1, 2, CURVE, (), case, 1e-5) for name, case in SPARSE_CASES.items()}


@pytest.mark.parametrize(("ring", "ulysses", "grid", "blocks", "case", "limit"), HEADS_CASES.values(), ids=HEADS_CASES)
def test_two_processes_equal_one(
    two: Processes, ring: int, ulysses: int, grid: Any, blocks: Any, case: Any, limit: float
) -> None:
    for dtype, largest in ((torch.float64, 1e-12), (torch.float32, limit)):
        for found in two.run(errors, (ring, ulysses), False, grid, blocks, case, dtype):
            assert max(found.values()) < largest, found


@pytest.mark.parametrize("degrees", [(4, 1), (2, 2)], ids=str)
def test_four_processes_equal_one(four: Processes, degrees: tuple[int, int]) -> None:
    for found in four.run(errors, degrees, False, (3, 4, 6), (2, 3, 2), ALL, torch.float64):
        assert max(found.values()) < 1e-12, found


RAGGED = {
    "all": (4, 1, (5, 3, 7), ALL),
    "few tokens": (4, 1, (1, 1, 6), ALL),
    "few rows": (4, 1, (2, 5, 3), ALL),
    "heads, few rows": (1, 4, (2, 5, 3), ALL),
    "text around": (1, 4, (5, 3, 7), ALL | {"extra": (4, 6)}),
    "lists of every sample": (1, 4, (2, 3, 2), LISTS | {"samples": 2}),
    "content": (1, 4, (5, 3, 7), CONTENT),
    "text before content": (1, 4, (5, 3, 7), CONTENT | {"extra": (5, 0)}),
}


@pytest.mark.parametrize(("ring", "ulysses", "grid", "case"), RAGGED.values(), ids=RAGGED)
def test_shares_may_differ(four: Processes, ring: int, ulysses: int, grid: Any, case: Any) -> None:
    blocks = () if {"lists", "density"} & case.keys() else tuple(min(2, size) for size in grid)
    for found in four.run(errors, (ring, ulysses), True, grid, blocks, case, torch.float64):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "text"])
def test_a_ring_refuses_what_softmax_attends_to(is_sparse: bool) -> None:
    ring, alone = Group("ring", 2, 0), Group("", 1, 0)
    place = Parallel(ring, alone, ring)
    x = torch.randn(1, 12 + (0 if is_sparse else 6), HEADS, HEAD_DIM)
    attend, arguments = sparse_attention, {"block_size": 4, "density": 0.5}
    if not is_sparse:
        attend, arguments = mhla_attention, {"mixing": torch.ones(1, 1), "blocks": (1, 1, 1), "extra": (0, 6)}
    with refused("ring_degree=2", "ulysses_degree"):
        attend(x, x, x, grid=(2, 3, 4), parallel=place, **arguments)


def interpreted(*arguments: Any) -> dict[str, float]:
    from ..attention.triton.interpreter import make_interpreter_fast

    make_interpreter_fast()
    return errors(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes are on the CPU, where only the interpreter runs")
def test_kernels_over_two_processes_equal_one(two: Processes) -> None:
    settings = ALL | {"backend": "triton"}
    for found in two.run(interpreted, (2, 1), True, (3, 3, 3), (2, 1, 1), settings, torch.float32):
        assert max(found.values()) < 1e-5, found
