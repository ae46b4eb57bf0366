"""Names of devices, as users write them."""

import pytest
import torch

from mhla_diffusers.devices import available_devices, choose_device


def test_devices_that_are_here():
    assert available_devices()[0] == "cpu"
    assert choose_device("cpu") == torch.device("cpu")
    for name in available_devices():
        torch.empty(1, device=choose_device(name))
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["tpu9", "", "meta", "cuda:99", "xpu:7"])
def test_device_that_is_not_here_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"device='{name}'.* cpu"):
        choose_device(name)
