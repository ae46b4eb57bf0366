"""diffusers' tensor parallelism, by which every process has some of the heads: a patch before or after it."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import TensorParallelConfig
from diffusers.hooks import tensor_parallel
from torch.distributed.device_mesh import init_device_mesh

from .processes import Processes
from .test_families import ROUNDING
from .transformers import FEATURES, case, output_of, patched, relative


def error_of_split_heads(name: str, settings: dict[str, Any], is_patched_first: bool) -> float:
    """Return the error of the output against one process. The split is diffusers' own, which refuses CPUs."""
    model, arguments = case(name)
    expected = output_of(patched(copy.deepcopy(model), name, **settings), arguments)
    if is_patched_first:
        patched(model, name, **settings)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with (
        patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",)),
        patch.object(torch._C, "_get_accelerator", lambda: torch.device("cpu")),
        patch.object(torch.accelerator, "device_count", lambda: 1),
    ):
        model.enable_parallelism(config=TensorParallelConfig(mesh=mesh))
    if not is_patched_first:
        patched(model, name, **settings)
    return relative(output_of(model, arguments), expected)


SETTINGS = {"sparse": {"density": 0.3, "block_size": 4}, "MHLA": FEATURES}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["flux", "flux2", "qwenimage"])
def test_two_processes_with_some_of_the_heads_equal_one(two: Processes, name: str, settings: dict[str, Any]) -> None:
    for is_patched_first in (True, False):
        assert max(two.run(error_of_split_heads, name, settings, is_patched_first)) < ROUNDING
