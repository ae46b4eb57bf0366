"""The operator on shares of the tokens, over processes on gloo, against the whole in one process."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mhla_diffusers.attention import BlockLists, mhla_attention
from mhla_diffusers.attention.layout import block_count
from mhla_diffusers.attention.parallel.place import Parallel, parts
from mhla_diffusers.benchmark.parallel import Layout, make_world

from .processes import Processes

HEADS, HEAD_DIM = 4, 12


def parallel(ring: int, ulysses: int, anything: bool = False) -> Parallel:
    """As diffusers sets it up."""
    return replace(make_world(Layout(ring, ulysses)).parallel, anything=anything)


def axial_rotary(grid: tuple[int, ...], axes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), dim=-1).view(-1, len(grid))
    angles = [places[:, i : i + 1] * 10 ** -torch.linspace(0, 1, n // 2) for i, n in enumerate(axes)]
    turned = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)[None, :, None]
    return turned.cos(), turned.sin()


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
    """Relative error of the output and of every gradient, of shares against the whole."""
    place = parallel(*degrees, anything)
    settings = dict(settings)
    extra = settings.pop("extra", (0, 0))
    on_grid, batch = math.prod(grid), 2
    tokens = on_grid + sum(extra)
    make = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    leaves = {name: draw(batch, tokens, HEADS, HEAD_DIM) for name in ("query", "key", "value")}
    count = math.prod(blocks)
    leaves["mixing"] = draw(HEADS, count, count).abs() + 0.1
    if settings.pop("norm", False):
        leaves["output_norm"] = draw(HEAD_DIM)
    if settings.pop("gate", False):
        leaves["output_gate"] = draw(batch, on_grid, HEADS, HEAD_DIM)
    if settings.pop("linear", False):
        leaves["linear_weight"] = draw(HEADS).exp()
    if settings.pop("pooled", False):
        leaves["pooled_bias"] = draw(HEADS)
    if masked := settings.pop("mask", False):
        settings["key_mask"] = torch.rand(batch, tokens, generator=make) > 0.3
    if masked == "a sample whole":
        settings["key_mask"][0] = False
    if axes := settings.pop("axes", None):
        before, after = extra
        turned = (axial_rotary(grid, axes)[i] for i in range(2))
        settings["rotary"] = tuple(
            torch.cat([x[:, :1].expand(-1, before, -1, -1), x, x[:, -1:].expand(-1, after, -1, -1)], dim=1)
            for x in turned
        )
        settings["rotary_axes"] = axes if settings.pop("tell_axes", True) else None
    size, samples = settings.pop("lists", None), settings.pop("samples", 1)
    mask = None if size is None else random_mask(grid, size, samples)
    towards = draw(batch, tokens, HEADS, HEAD_DIM)
    here, grid_here = own_tokens(place, grid, extra)

    def run(alone: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        given = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        used: dict[str, Any] = {**given, **settings, "extra": extra}
        if mask is not None:
            used["sparse"] = lists_of(mask, size, slice(None) if alone else place.heads(HEADS))
        if not alone:
            used |= {n: used[n][:, here] for n in ("query", "key", "value", "key_mask") if n in used}
            if "output_gate" in used:
                used["output_gate"] = used["output_gate"][:, grid_here]
            if "rotary" in used:
                used["rotary"] = tuple(x[:, here] for x in used["rotary"])
            used["extra"] = tuple(parts(n, place.whole.size)[place.whole.rank][1] for n in extra)
        output = mhla_attention(grid=grid, blocks=blocks, parallel=None if alone else place, **used)
        loss = (output * (towards if alone else towards[:, here])).sum()
        # without a linear branch the mixing matrix takes no part
        gradients = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
        return output, dict(zip(given, gradients, strict=True))

    expected, expected_gradients = run(alone=True)
    output, gradients = run(alone=False)
    found = {"output": relative(output, expected[:, here])}
    for name, gradient in gradients.items():
        torch.distributed.all_reduce(gradient)
        found[name] = relative(gradient, expected_gradients[name])
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))


ALL = {"norm": True, "gate": True, "mask": True, "axes": (4, 4, 4)}
CASES = {
    "plain": {},
    "all": ALL,
    "rope before": ALL | {"rope": "before"},
    "angles of any kind": ALL | {"tell_axes": False},
    "unnormalized": {"normalize": False, "axes": (4, 4, 4)},
    "a sample without a key": {"mask": "a sample whole"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_two_processes_equal_one(two: Processes, degrees: tuple[int, int], case: str) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for found in two.run(errors, degrees, False, (4, 5, 6), (3, 2, 2), CASES[case], dtype):
            assert max(found.values()) < limit, found


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4), (2, 2)])
def test_four_processes_equal_one(four: Processes, degrees: tuple[int, int]) -> None:
    for found in four.run(errors, degrees, False, (3, 4, 6), (2, 3, 2), ALL, torch.float64):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4)])
@pytest.mark.parametrize("grid", [(5, 3, 7), (1, 1, 6), (2, 5, 3)])
def test_shares_may_differ(four: Processes, degrees: tuple[int, int], grid: tuple[int, ...]) -> None:
    blocks = tuple(min(2, size) for size in grid)
    for found in four.run(errors, degrees, True, grid, blocks, ALL, torch.float64):
        assert max(found.values()) < 1e-12, found
