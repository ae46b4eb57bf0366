"""PSNR, SSIM and LPIPS of two samples that began as the same noise."""

import json
import math
import sys

import pytest
import torch

from mhla_diffusers.evaluation.compare import compare_sets
from mhla_diffusers.generation.record import write_video
from mhla_diffusers.generation.similarity import Similarity, psnr

from .pictures import mhla, write_pictures
from .test_compare import write_set


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
