"""Transformers with sparse attention over processes equal themselves on one process."""

from typing import Any

import pytest
import torch
from torch import nn

import mhla_diffusers as mhla

from .processes import Processes
from .test_families import within
from .test_operator import relative
from .transformers import case, errors, spread

SPARSE = {"block_size": 8, "density": 0.3}


@pytest.mark.parametrize("settings", [{}, {"far": "means"}], ids=str)
@pytest.mark.parametrize("name", ["wan", "flux"])
def test_two_processes_equal_one(two: Processes, name: str, settings: dict[str, str]) -> None:
    for found in two.run(errors, name, (1, 2), SPARSE | settings):
        assert within(found), found


def quantise(model: nn.Module, arguments: dict[str, Any]) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


@pytest.mark.parametrize("name", ["wan", "flux"])
@pytest.mark.parametrize("settings", [{}, SPARSE], ids=["MHLA", "sparse"])
def test_quantised_weights_over_two_processes(two: Processes, name: str, settings: dict[str, Any]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    for found in two.run(errors, name, (1, 2), settings, before=quantise, gradients_too=False):
        assert within(found), found


def error_of_compiled_blocks(degrees: tuple[int, int]) -> float:
    """Of the first call that there is."""
    model, arguments = case("flux")
    mhla.apply_mhla(model, **SPARSE)
    with torch.no_grad():
        expected = model(**arguments, return_dict=False)[0]
        spread(model, *degrees)
        model.compile_repeated_blocks(backend="aot_eager")
        return relative(model(**arguments, return_dict=False)[0], expected)


def test_blocks_compile(two: Processes) -> None:
    """Extra tokens among them."""
    assert max(two.run(error_of_compiled_blocks, (1, 2))) < 1e-5
