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


def error_of_carried_steps(degrees: tuple[int, int]) -> float:
    """Error of the steps that follow dense ones; the second dense step measures fading over all tokens."""
    model, arguments = case("wan")
    mhla.apply_mhla(model, **SPARSE, softmax_steps=2, refresh=3)
    latents = arguments.pop("hidden_states")

    @torch.no_grad()
    def steps() -> torch.Tensor:
        outputs = []
        for index in range(8):
            with model.cache_context("cond", step_index=index, num_inference_steps=8):
                outputs.append(model(latents * (1 + index / 100), **arguments, return_dict=False)[0])
        return torch.stack(outputs)

    expected = steps()
    spread(model, *degrees)
    return relative(steps(), expected)


def test_what_dense_steps_show_is_that_of_all_tokens(two: Processes) -> None:
    """With Ulysses alone: no softmax attention of diffusers goes around a ring on a CPU."""
    # int8 rounds on after the order of sums: 1/254 of the largest difference of a token may go either way
    assert max(two.run(error_of_carried_steps, (1, 2))) < 1e-3


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
