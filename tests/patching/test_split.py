"""diffusers' context parallelism: MHLA over two processes, which hold half of the tokens each, equals one process."""

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import ContextParallelConfig, WanPipeline

import mhla_diffusers as mhla
from mhla_diffusers.tiny import pipeline_folder

from .. import models
from ..pipelines import wan_pipeline
from ..processes import process_group
from ..refusals import refused
from .shared import own_form, trained

ROUNDING = 1e-5
"""Relative, of float32 sums in another order."""
_ROOT = Path(__file__).parents[2]
_PATCH = str(_ROOT / "patches" / "tiny-wan-mhla")
LEARNED = {"output_norm": True, "output_gate": True, "mixing_per_head": True}


@pytest.fixture(scope="module")
def in_two() -> Iterator[Callable[..., list[Any]]]:
    """What runs a function in both of two processes."""
    with process_group(2) as run_in_all:
        yield run_in_all


def one_device() -> Any:
    """diffusers divides the rank by the number of devices, which is 0 on a CPU."""
    return patch.object(torch.accelerator, "device_count", lambda: 1)


def spread(model: Any) -> Any:
    with one_device():
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    return model


def run(model: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Output, and gradients of the latents and of all parameters."""
    latents = arguments["hidden_states"].clone().requires_grad_()
    output = model(**{**arguments, "hidden_states": latents}, return_dict=False)[0]
    goal = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output * goal).sum().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"output": output.detach(), "latents": latents.grad, **gradients}


def relative(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(least))


def errors(name: str, ragged: bool, compiled: bool, settings: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the output, and of the gradients of both processes together."""
    model, arguments = trained(name, **settings), models.inputs(name, ragged=ragged)
    alone = copy.deepcopy(model)
    spread(model)
    if compiled:  # diffusers' hooks of the first block, which split the tokens, make no graph
        torch._dynamo.reset()
        model.blocks[1].compile(backend="aot_eager", fullgraph=True)
    found, expected = run(model, arguments), run(alone, arguments)
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(x.norm()) for x in expected.values())
    for key, x in found.items():
        if key != "output":
            torch.distributed.all_reduce(x)
    return {key: relative(x, expected[key], least) for key, x in found.items()}


CASES: dict[str, tuple[Any, ...]] = {
    "blocks within a process": ("wan", False, False, LEARNED),
    "blocks of both processes": ("wan", False, False, {"blocks": (1, 2, 3), **LEARNED}),
    "a split within a row": ("wan", True, False, {"normalize": False, "output_norm": True, "rope": "before"}),
    "layers that keep softmax": ("wan", False, False, {"layers": "1/2"}),
    "sparse attention": ("wan", False, False, {"density": 0.3, "block_size": 4, "far": "means"}),
    "a picture to begin with": ("wan_i2v", False, False, {}),
    "a compiled block": ("wan", False, True, LEARNED),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_processes_equal_one(in_two: Any, case: tuple[Any, ...]) -> None:
    for found in in_two(errors, *case):
        assert max(found.values()) < ROUNDING, found


def errors_of_order() -> list[float]:
    """Errors of a transformer that is spread before it is patched, then with the patch off, then without it."""
    arguments = models.inputs("wan")
    own, alone = models.FAMILIES["wan"].build(), models.patched("wan")
    model = mhla.apply_mhla(spread(copy.deepcopy(own)), blocks=models.FAMILIES["wan"].blocks)

    def output(one: Any) -> torch.Tensor:
        with torch.no_grad():
            return one(**arguments, return_dict=False)[0]

    found = [relative(output(model), output(alone))]
    with mhla.mhla_disabled(model):
        found.append(relative(output(model), output(own)))
    mhla.remove_mhla(model)
    return [*found, relative(output(model), output(own))]


def test_a_patch_comes_after_and_goes(in_two: Any) -> None:
    for found in in_two(errors_of_order):
        assert max(found) < ROUNDING, found


def errors_of_residuals() -> list[float]:
    """Errors of a pipeline call with dense steps, with and without correction."""
    found = []
    for is_split, correct in ((False, True), (True, True), (True, False)):
        settings = {"density": 0.2, "block_size": 4, "far": "means", "dense_layers": 0, "dense_first": 1}
        pipe = mhla.apply_mhla(wan_pipeline(), **settings, correct=correct)
        if is_split:
            spread(pipe.transformer)
        call = {"num_frames": 9, "height": 32, "width": 64, "num_inference_steps": 4, "output_type": "latent"}
        found.append(pipe("a cat", **call, generator=torch.Generator().manual_seed(0)).frames)
    return [relative(one, found[0]) for one in found[1:]]


def test_what_dense_steps_measure(in_two: Any) -> None:
    """Each process measures how its heads fade, so that the two differ by a part of the correction."""
    for corrected, dropped in in_two(errors_of_residuals):
        assert corrected < 0.1 * dropped


def refuse() -> None:
    """What needs all tokens, and diffusers' own form, which does not know how they are split."""
    own = own_form("wan", blocks=models.FAMILIES["wan"].blocks)
    for model, words in ((models.patched("wan", convolution=3), "convolution=3"), (own, "apply_mhla")):
        with refused(words):
            spread(model)(**models.inputs("wan"), return_dict=False)


def test_what_cannot_be_split_is_refused(in_two: Any) -> None:
    in_two(refuse)


def video_of_script() -> list[Any]:
    written: list[Any] = []
    sizes = ["--frames", "9", "--height", "96", "--width", "64", "--steps", "2"]
    line = ["script", "seven", "--model", str(pipeline_folder("wan")), "--weights", _PATCH, *sizes]
    with (
        one_device(),
        patch.object(sys, "argv", line),
        patch("mhla_diffusers.generation.record.write_video", lambda video, *_, **__: written.append(video)),
    ):
        runpy.run_path(str(_ROOT / "pipelines" / "generate_wan_parallel.py"), run_name="__main__")
    return written


def test_the_script_makes_the_video_of_one_process() -> None:
    pipe = mhla.load_mhla(WanPipeline.from_pretrained(pipeline_folder("wan")), _PATCH)
    pipe.set_progress_bar_config(disable=True)
    call = {"num_frames": 9, "height": 96, "width": 64, "num_inference_steps": 2}
    expected = pipe("seven", **call, generator=torch.Generator().manual_seed(0)).frames[0]
    with process_group(3) as run_in_all:  # of its own, since the script ends their group
        (first,), *others = run_in_all(video_of_script)
    assert not any(others)
    assert np.abs(first - expected).max() < 1e-4  # of pixels from 0 to 1, through the autoencoder in float32
