"""Names of devices, as users write them."""

import pytest
import torch

from mhla_diffusers.devices import choose_device, launched_on_cpus


@pytest.mark.parametrize("name", ["tpu9", "", "meta", "cuda:99"])
def test_device_that_is_not_here_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"device='{name}'.* cpu"):
        choose_device(name)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "2"}, False),  # a cluster's, without a launcher
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, False),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, not torch.accelerator.is_available()),
        ({"ACCELERATE_USE_CPU": "true"}, True),
    ],
)
def test_processes_of_torchrun_run_on_cpus_where_there_is_nothing_else(environment, expected, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched_on_cpus() is expected
