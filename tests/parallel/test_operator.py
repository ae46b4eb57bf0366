"""The operator on shares of the tokens, over processes on gloo, against the whole in one process."""

import math
from typing import Any

import pytest
import torch

from mhla_diffusers.attention import mhla_attention
from mhla_diffusers.attention.parallel.place import Parallel
from mhla_diffusers.patching.parallel import parallel_of

from .processes import Processes

HEADS, HEAD_DIM = 4, 12


def parallel(ring: int, ulysses: int, anything: bool = False) -> Parallel:
    """As diffusers sets it up."""
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    settings = ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        ring_anything=anything and ring > 1,
        ulysses_anything=anything and ulysses > 1,
    )
    mesh = init_device_mesh("cpu", settings.mesh_shape, mesh_dim_names=settings.mesh_dim_names)
    settings.setup(torch.distributed.get_rank(), ring * ulysses, torch.device("cpu"), mesh)
    found = parallel_of(ParallelConfig(context_parallel_config=settings))
    assert found is not None
    return found


def axial_rotary(grid: tuple[int, ...], axes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), dim=-1).view(-1, len(grid))
    angles = [places[:, i : i + 1] * 10 ** -torch.linspace(0, 1, n // 2) for i, n in enumerate(axes)]
    turned = torch.cat(angles, dim=-1).repeat_interleave(2, dim=-1)[None, :, None]
    return turned.cos(), turned.sin()


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
    tokens, batch = math.prod(grid), 2
    make = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    leaves = {name: draw(batch, tokens, HEADS, HEAD_DIM) for name in ("query", "key", "value")}
    count = math.prod(blocks)
    leaves["mixing"] = draw(HEADS, count, count).abs() + 0.1
    settings = dict(settings)
    if settings.pop("norm", False):
        leaves["output_norm"] = draw(HEAD_DIM)
    if settings.pop("gate", False):
        leaves["output_gate"] = draw(batch, tokens, HEADS, HEAD_DIM)
    if settings.pop("mask", False):
        settings["key_mask"] = torch.rand(batch, tokens, generator=make) > 0.3
    if axes := settings.pop("axes", None):
        settings["rotary"] = axial_rotary(grid, axes)
        settings["rotary_axes"] = axes if settings.pop("tell_axes", True) else None
    towards = draw(batch, tokens, HEADS, HEAD_DIM)

    def run(own: slice | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        given = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        used: dict[str, Any] = {**given, **settings}
        if own is not None:
            used |= {n: used[n][:, own] for n in ("query", "key", "value", "output_gate", "key_mask") if n in used}
            if "rotary" in used:
                used["rotary"] = tuple(x[:, own] for x in used["rotary"])
        output = mhla_attention(grid=grid, blocks=blocks, parallel=place if own else None, **used)
        goal = towards if own is None else towards[:, own]
        gradients = torch.autograd.grad((output * goal).sum(), list(given.values()))
        return output, dict(zip(given, gradients, strict=True))

    expected, expected_gradients = run(None)
    first, own_count = place.own_share(tokens)
    own = slice(first, first + own_count)
    output, gradients = run(own)
    found = {"output": relative(output, expected[:, own])}
    for name, gradient in gradients.items():
        torch.distributed.all_reduce(gradient)
        found[name] = relative(gradient, expected_gradients[name])
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


ALL = {"norm": True, "gate": True, "mask": True, "axes": (4, 4, 4)}
CASES = {
    "plain": {},
    "all": ALL,
    "rope before": ALL | {"rope": "before"},
    "angles of any kind": ALL | {"tell_axes": False},
    "unnormalized": {"normalize": False, "axes": (4, 4, 4)},
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
