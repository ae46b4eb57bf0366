"""Variants over the same samples: scores, paired differences and similarities."""

import json
import math

import pytest
import torch

from mhla_diffusers.evaluation.compare import compare_sets, mean_of
from mhla_diffusers.files import write_json
from mhla_diffusers.generation.record import write_video
from mhla_diffusers.generation.similarity import psnr

from .pictures import mhla, write_pictures, write_set

COUNT = 30
PLUG = "tests.evaluation.test_compare:brightness"


def made(folder, brightness, size=8, count=COUNT, **choices):
    write_pictures(folder, COUNT, seed=3, brightness=brightness, size=size)
    common = {"family": "dit", "model": "m", "settings": {"guidance_scale": 4}, "weights": folder.name}
    return write_set(folder, [f"class <{n}>" for n in range(count)], **(common | choices))


def brightness(images, texts):
    assert all(text.startswith("class") for text in texts)
    return torch.stack([image.float().mean() for image in images])


def steps(frames, reference):
    """Mean difference of each frame."""
    return (frames.float() - reference.float()).mean(dim=(1, 2, 3))


@pytest.fixture
def folders(tmp_path):
    return [made(tmp_path / name, value) for name, value in (("softmax", 128), ("MHLA", 129), ("linear", 170))]


def test_scores_and_paired_differences(folders):
    (softmax, patched, linear), _ = compare_sets(folders, sample_scores={"brightness": brightness})
    assert softmax.differences == {}
    assert linear.scores["brightness"].value - softmax.scores["brightness"].value > 30
    # pictures differ by far more than 1 in brightness, but those of one seed by 1 throughout
    step = patched.differences["brightness"]
    assert step.value == pytest.approx(1, abs=0.1)
    noise = softmax.scores["brightness"]
    assert step.high - step.low < 0.08 < noise.high - noise.low


def test_nineteen_of_twenty_intervals_hold_the_mean_and_none_leaves_the_range():
    samples = torch.rand(200, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    intervals = [mean_of(one) for one in samples]
    held = sum(one.low <= 0.5 <= one.high for one in intervals)
    assert 180 <= held <= 198
    equal = torch.tensor([100.0] * 9 + [40.0], dtype=torch.float64)  # dB; 100 is the maximum
    assert 40 <= mean_of(equal).low <= mean_of(equal).high <= 100
    assert mean_of(equal[:1]) == (100, None, None)


def test_videos_are_averaged_over_frames(tmp_path):
    pytest.importorskip("av")
    sets = []
    for name, last in (("a", 0.0), ("b", 0.5)):
        folder = tmp_path / name
        folder.mkdir()
        frames = torch.zeros(10, 32, 32, 3)
        frames[-1] = last
        write_video(frames, folder / "0.mp4", 6)
        write_json({"choices": {}, "samples": [{"file": "0.mp4", "text": "a cat"}]}, folder / "samples.json")
        sets.append(folder)
    (_, other), (worst,) = compare_sets(sets, similarities={"step": steps, "psnr": psnr})
    assert "b is 6.0 dB, of frame 9 of 0.mp4" in worst
    # H.264 is not exact, but for a flat frame nearly so
    assert other.scores["step"].value == pytest.approx(0.5 * 255 / 10, abs=0.3)
    # nine frames are equal; of the others' errors a tenth would be a mean of 16 dB
    assert other.scores["psnr"].value == pytest.approx((9 * 100 + 20 * math.log10(2)) / 10, abs=0.1)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda sets: [sets[0], sets[0]], {}, "'softmax' is given twice"),
        (lambda sets: [sets[0], made(sets[0].parent / "other", 128, dtype="a")], {}, r"dtype \(None and 'a'\)"),
        (lambda sets: [sets[0], made(sets[0].parent / "other", 128, model_content="a")], {}, "model_content"),
        (lambda sets: [sets[0], made(sets[0].parent / "other", 128, count=9)], {}, "different samples"),
        (
            lambda sets: [write_pictures(sets[1], 1, size=9), *sets][1:],
            {"similarities": {"x": psnr}},
            "0000.png .*9, 9",
        ),
        (lambda sets: sets, {"sample_scores": {"odd": lambda images, texts: torch.full((30,), math.nan)}}, "odd .*nan"),
        (lambda sets: sets, {}, "--clip-model, --score .*a second set"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(folders, change, options, message):
    with pytest.raises(ValueError, match=message):
        compare_sets(change(folders), **options)


def test_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    sets = [made(tmp_path / name, value, size=16) for name, value in (("softmax", 100), ("MHLA", 110))]
    shown = mhla("eval", "compare", *sets, "--score", f"brightness={PLUG}", "--output", tmp_path / "compared.json")
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in ("softmax", "psnr", "lowest PSNR in MHLA", "LPIPS is left out"))
    written = json.loads((tmp_path / "compared.json").read_text())["variants"]["MHLA"]
    assert set(written["differences"]) == {"brightness"}
    assert written["scores"]["psnr"]["value"] == pytest.approx(20 * math.log10(255 / 10), abs=0.1)
    assert "must look like key=value" in str(mhla("eval", "compare", *sets, "--score", PLUG).exception)
