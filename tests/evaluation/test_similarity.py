"""PSNR, SSIM and LPIPS of two samples that began as the same noise."""

import json
import math
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy
import pytest
import torch
from scipy.ndimage import gaussian_filter

from mhla_diffusers.evaluation.compare import compare_sets
from mhla_diffusers.evaluation.similarity import Similarity, load_similarities, psnr, ssim
from mhla_diffusers.generation.record import write_video

from .pictures import mhla, write_pictures
from .test_compare import write_set


def noise(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def test_psnr_by_hand():
    frames = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
    reference = frames.clone()
    frames[0] = 16  # mean squared error 256
    frames[1, 0, 0, 0] = 255  # one value of 48: 255² / 48
    found = psnr(frames, reference)
    assert found.tolist() == pytest.approx([20 * math.log10(255 / 16), 10 * math.log10(48), 100])
    assert torch.equal(found, psnr(reference, frames)), "differences of uint8 below zero"


def test_ssim_by_hand():
    reference = torch.full((2, 3, 16, 16), 100, dtype=torch.uint8)
    frames = torch.stack([reference[0], reference[0] + 55])
    # flat frames differ in luminance alone
    first, second = 100 / 255, 155 / 255
    expected = (2 * first * second + 1e-4) / (first**2 + second**2 + 1e-4)
    # variances of flat frames are rounding errors beside 0.03²
    assert ssim(frames, reference).tolist() == pytest.approx([1, expected], abs=2e-4)


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


def steps(frames, reference):
    """Mean difference of each frame."""
    return (frames.float() - reference.float()).mean(dim=(1, 2, 3))


def test_sets_are_compared_with_the_first_sample_by_sample(tmp_path):
    sets = [write_set(tmp_path / name, value) for name, value in (("softmax", 100), ("near", 101), ("far", 110))]
    base, near, far = compare_sets(
        sets, similarities={"step": Similarity(steps), "large": Similarity(steps, 9)}
    ).variants
    assert (base.scores, base.similarities) == ({}, {})
    # a few pixels are cut off at 255
    assert near.scores == {"step": pytest.approx(1, abs=0.01)}
    assert far.similarities["step"].value == far.scores["step"] == pytest.approx(10, abs=0.1)
    assert far.similarities["step"].low <= far.scores["step"] <= far.similarities["step"].high


def test_measures_that_are_not_defined_for_small_pictures_are_left_out_with_a_remark(tmp_path):
    sets = [write_set(tmp_path / name, 128) for name in ("a", "b")]
    write_pictures(tmp_path / "a", 1, size=16)
    write_pictures(tmp_path / "b", 1, size=16)
    comparison = compare_sets(sets, similarities={"large": Similarity(steps, 9)})
    assert comparison.variants[1].scores == {"large": 0}
    assert comparison.variants[1].similarities == {}
    assert comparison.remarks == [
        "large is of 1 of 30 samples: the others have fewer than 9 pixels in height or width."
    ]
    write_pictures(tmp_path / "b", 1, size=15)
    with pytest.raises(ValueError, match=r"0000.png has .*\(1, 16, 16\) in .*a and \(1, 15, 15\) in .*b; generate"):
        compare_sets(sets, similarities={"large": Similarity(steps)})


def test_videos_are_averaged_over_frames(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("av")
    sets = []
    for name, last in (("a", 0.0), ("b", 0.5)):
        folder = tmp_path / name
        folder.mkdir()
        frames = torch.zeros(10, 32, 32, 3)
        frames[-1] = last
        write_video(frames, folder / "0.mp4", 6)
        (folder / "samples.json").write_text('[{"file": "0.mp4", "text": "a cat"}]')
        (folder / "generation.json").write_text("{}")
        sets.append(folder)
    found = compare_sets(sets, similarities={"step": Similarity(steps), "psnr": Similarity(psnr)}).variants[1].scores
    # H.264 is not exact, but for a flat frame nearly so
    assert found["step"] == pytest.approx(0.5 * 255 / 10, abs=0.3)
    # nine frames are equal; of the others' errors a tenth would be a mean of 16 dB
    assert found["psnr"] == pytest.approx((9 * 100 + 20 * math.log10(2)) / 10, abs=0.1)


def test_command_shows_and_writes_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    sets = [write_set(tmp_path / name, value) for name, value in (("softmax", 100), ("MHLA", 110))]
    for folder, brightness in zip(sets, (100, 110), strict=True):
        write_pictures(folder, 30, seed=3, size=16, brightness=brightness)
    shown = mhla("eval", "compare", *sets, "--output", tmp_path / "report")
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in ("PSNR (dB) ↑", "SSIM ↑", "LPIPS is left out"))
    written = json.loads((tmp_path / "report" / "comparison.json").read_text())["variants"]["MHLA"]
    assert written["scores"]["psnr"] == pytest.approx(20 * math.log10(255 / 10), abs=0.1)
    assert written["similarities"]["ssim"]["low"] <= written["scores"]["ssim"] <= 1
    for name in ("report.html", "report.md"):
        assert "similarity to softmax" in (tmp_path / "report" / name).read_text()


def test_missing_lpips_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    found, why = load_similarities()
    assert list(found) == ["psnr", "ssim"]
    assert "LPIPS is left out: lpips cannot be imported" in why
    assert "pip install" in why
    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    found, why = load_similarities()
    assert list(found) == ["psnr", "ssim"]
    assert f"there is no {tmp_path}/hub/checkpoints/alexnet-owt" in why and "https://" in why


def test_lpips_gets_frames_in_the_range_that_it_takes(tmp_path, monkeypatch):
    """By a stand-in, since its package needs the torchvision of one torch."""

    class Stand:
        def __init__(self, net, verbose):
            assert net == "alex"

        def to(self, device):
            return self

        def __call__(self, frames, reference):
            assert frames.min() == -1 and frames.max() == 1
            return (frames - reference).abs().mean(dim=(1, 2, 3), keepdim=True)

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=Stand))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth").touch()
    found, why = load_similarities()
    assert why is None
    frames, reference = noise(4, 3, 32, 32), torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    expected = 2 * frames.float().mean(dim=(1, 2, 3)) / 255
    torch.testing.assert_close(found["lpips"].of(frames, reference), expected)


def test_lpips_itself(tmp_path, monkeypatch):
    """With an AlexNet of random weights: nothing of equal frames, more of what differs more, from 31 pixels on."""
    try:
        import_module("lpips")
        from torchvision.models import alexnet
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"lpips or a torchvision that fits torch is missing: {error}")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(alexnet().state_dict(), tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth")
    measure = load_similarities()[0]["lpips"]
    reference = noise(2, 3, measure.smallest, measure.smallest)
    frames = reference.clone()
    frames[1] = noise(3, measure.smallest, measure.smallest, seed=1)
    with torch.no_grad():
        same, other = measure.of(frames, reference).tolist()
    assert same == pytest.approx(0, abs=1e-6) and other > 1e-4
