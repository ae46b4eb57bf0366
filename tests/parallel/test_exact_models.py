"""Patched transformers with exact tiles over processes equal themselves on one process."""

import copy
from typing import Any

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.attention import mhla_attention
from mhla_diffusers.attention.parallel.tiles import fetch_plan

from .processes import Processes
from .test_exact import COUNTS, GRID
from .test_operator import HEAD_DIM, HEADS, lists_of, parallel, random_tiles, relative
from .transformers import case, choose_tiles, errors, spread

ROUNDING = 1e-5
"""Relative, of float32 sums in another order."""
TILES = {"wan": (2, 2, 2), "flux": (2, 2)}


@pytest.mark.parametrize("exact", ["calibrated", "content"])
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_two_processes_equal_one(two: Processes, name: str, degrees: tuple[int, int], exact: str) -> None:
    for found in two.run(errors, name, degrees, {"exact": exact, "exact_tiles": TILES[name]}):
        assert max(found.values()) < ROUNDING, found


def flux() -> tuple[Any, dict[str, Any]]:
    model, arguments = case("flux")
    return model, arguments | {"return_dict": False}


def error_after_other_lists(degrees: tuple[int, int]) -> float:
    """Of a layer whose lists change after its first call over processes."""
    model, arguments = flux()
    mhla.apply_mhla(model, blocks=(2, 2), sparse="calibrated", exact_tiles=TILES["flux"])
    choose_tiles(model)
    alone = copy.deepcopy(model)
    spread(model, *degrees)
    with torch.no_grad():
        model(**arguments)
        for each in (alone, model):
            for layer in mhla.mhla_layers(each).values():
                layer.sparse.choose(~layer.sparse.mask | torch.eye(4, dtype=torch.bool))
        return relative(model(**arguments)[0], alone(**arguments)[0])


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_other_lists_are_seen(two: Processes, degrees: tuple[int, int]) -> None:
    assert max(two.run(error_after_other_lists, degrees)) < ROUNDING


def error_of_compiled_blocks(degrees: tuple[int, int]) -> float:
    """Of the first call that there is."""
    model, arguments = flux()
    mhla.apply_mhla(model, blocks=(2, 2), sparse="calibrated", exact_tiles=TILES["flux"])
    choose_tiles(model)
    with torch.no_grad():
        expected = model(**arguments)[0]
        spread(model, *degrees)
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        return relative(model(**arguments)[0], expected)


def test_blocks_are_compiled_without_a_break(two: Processes) -> None:
    """Extra tokens and calibrated lists among them."""
    assert max(two.run(error_of_compiled_blocks, (2, 1))) < ROUNDING


def errors_of_compiled_operator() -> dict[str, float]:
    """Of output and gradients, against the same without torch.compile."""
    place, make = parallel(2, 1), torch.Generator().manual_seed(torch.distributed.get_rank())
    count = place.own_share(90)[1]
    exact = lists_of(random_tiles(COUNTS, HEADS, 1), COUNTS, slice(None))
    fetch_plan(exact, GRID, place.segments(90), place.ring.rank)
    leaves = [torch.randn(2, count, HEADS, HEAD_DIM, generator=make).requires_grad_() for _ in range(3)]
    weights = {"linear_weight": torch.ones(HEADS), "pooled_bias": torch.zeros(HEADS)}

    def attend(*given: torch.Tensor) -> torch.Tensor:
        mixing = torch.ones(12, 12)
        return mhla_attention(*given, mixing, GRID, (3, 2, 2), sparse=exact, parallel=place, **weights)

    def run(function: Any) -> list[torch.Tensor]:
        output = function(*leaves)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    found, expected = run(torch.compile(attend, backend="aot_eager", fullgraph=True)), run(attend)
    names = ("output", "query", "key", "value")
    return {name: relative(*pair) for name, *pair in zip(names, found, expected, strict=True)}


def test_the_operator_is_compiled_with_its_gradients(two: Processes) -> None:
    for found in two.run(errors_of_compiled_operator):
        assert max(found.values()) < ROUNDING, found
