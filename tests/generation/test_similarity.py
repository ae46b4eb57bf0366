"""PSNR and SSIM by their definitions, and LPIPS where it is not."""

import math

import numpy
import pytest
import torch
from scipy.ndimage import gaussian_filter

from mhla_diffusers.generation.similarity import load_similarities, psnr, ssim


def noise(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def test_psnr_by_hand():
    frames = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    reference = frames.clone()
    frames[0] = 16  # mean squared error 256
    frames[1, 0, 0, 0] = 255  # one value of 48: 255² / 48
    found = psnr(frames, reference)
    # torchmetrics takes the logarithm of the range in float32
    assert found.tolist() == pytest.approx([20 * math.log10(255 / 16), 10 * math.log10(48), 100], rel=1e-6)
    assert torch.equal(found, psnr(reference, frames)), "differences of uint8 below zero"


def test_ssim_is_that_of_the_definition():
    """Written out with scipy's Gaussian filter in float64, whose window of 11 pixels ends at 5/1.5 deviations."""
    first, second = noise(1, 3, 20, 27), noise(1, 3, 20, 27, seed=1)
    second = (0.6 * first + 0.4 * second).byte()

    def mean(image):
        return gaussian_filter(image, 1.5, truncate=5 / 1.5)

    values = []
    for x, y in zip(first[0].double().numpy(), second[0].double().numpy(), strict=True):
        covariance = [[mean(a * b) - mean(a) * mean(b) for b in (x, y)] for a in (x, y)]
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        found = (2 * mean(x) * mean(y) + c1) * (2 * covariance[0][1] + c2)
        found /= (mean(x) ** 2 + mean(y) ** 2 + c1) * (covariance[0][0] + covariance[1][1] + c2)
        values.append(found[5:-5, 5:-5])
    assert ssim(second, first).item() == pytest.approx(numpy.mean(values), abs=1e-5)
    assert 0.3 < numpy.mean(values) < 0.9
    assert ssim(first, first).item() == pytest.approx(1)
    with pytest.raises(ValueError, match="11 pixels"):
        ssim(second[..., :10], first[..., :10])


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    found, (why,) = load_similarities()
    assert list(found) == ["psnr", "ssim"]
    assert f"there is no {tmp_path}/hub/checkpoints/alexnet-owt" in why and "https://" in why


def test_lpips_itself(tmp_path, monkeypatch):
    """With an AlexNet of random weights: nothing of equal frames, more of what differs more, from 31 pixels on."""
    try:
        from torchvision.models import alexnet
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"a torchvision that fits torch is missing: {error}")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(alexnet().state_dict(), tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth")
    measure = load_similarities()[0]["lpips"]
    reference = noise(2, 3, 31, 31)
    frames = reference.clone()
    frames[1] = noise(3, 31, 31, seed=1)
    with torch.no_grad():
        same, other = measure(frames, reference).tolist()
    assert same == pytest.approx(0, abs=1e-6) and other > 1e-4
