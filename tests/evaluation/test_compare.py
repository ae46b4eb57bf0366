"""Variants side by side: scores, paired differences, similarities and the report."""

import json
import math
import sys

import pytest
import torch

from mhla_diffusers.evaluation.compare import bootstrap, compare_sets, known_scores, read_variants
from mhla_diffusers.evaluation.extractors import Extractor
from mhla_diffusers.evaluation.images import Images
from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.evaluation.report import difference_table, score_table, write_report
from mhla_diffusers.generation.generate import SampleSet, generate, plan_samples
from mhla_diffusers.generation.record import Sample, write_sample_list, write_video
from mhla_diffusers.generation.similarity import psnr

from .pictures import blocks, mhla, write_pictures

COUNT = 30


def write_set(folder, brightness, model=None, seed=0, size=8, **scores):
    write_pictures(folder, COUNT, seed=3, brightness=brightness, size=size)
    write_sample_list([Sample(f"{n:04d}.png", f"class <{n}>") for n in range(COUNT)], folder)
    choices = {"family": "dit", "model": model, "seed": seed, "settings": {"guidance_scale": 4}, "weights": folder.name}
    (folder / "generation.json").write_text(json.dumps(choices))
    if scores:
        (folder / "scores.json").write_text(json.dumps(scores))
    return folder


def brightness(images, texts):
    assert all(text.startswith("class") for text in texts)
    return torch.stack([image.float().mean() for image in images])


def steps(frames, reference):
    """Mean difference of each frame, of frames of 9 pixels or more."""
    difference = (frames.float() - reference.float()).mean(dim=(1, 2, 3))
    return difference if frames.shape[-1] >= 9 else difference * math.nan


@pytest.fixture
def folders(tmp_path):
    names = {"softmax": 128, "MHLA": 129, "linear": 170}
    write_pictures(tmp_path / "real", 40, seed=8, brightness=128)
    return [write_set(tmp_path / name, value, held_out_loss=value / 1000) for name, value in names.items()]


def compared(folders, **options):
    scores = {"sample_scores": {"brightness": brightness}}
    reference = {"reference": folders[0].parent / "real", "extractor": Extractor(blocks, "blocks", "")}
    return compare_sets(folders, **{**reference, **scores, **options})


def not_compared(folders, named, error=ValueError, **options):
    with pytest.raises(error, match=named):
        compare_sets(folders, **options)


def test_scores_and_paired_differences(folders):
    (softmax, mhla_row, linear), remarks = compared(folders)
    real, *own = (
        torch.cat([blocks(batch).pooled for batch in Images(folder).batches(9)])
        for folder in (folders[0].parent / "real", *folders)
    )
    assert softmax.scores["fid"] == pytest.approx(frechet_distance(own[0], real))
    assert linear.scores["held_out_loss"] == 0.170
    assert softmax.differences == {}
    change = linear.differences["fid"]
    assert change.value == pytest.approx(linear.scores["fid"] - softmax.scores["fid"])
    assert change.low < change.value < change.high
    assert change.low > 0 or change.high < 0
    # pictures differ by far more than 1 in brightness, but those of one seed by 1 throughout
    step = mhla_row.differences["brightness"]
    assert step.value == pytest.approx(1, abs=0.1)
    assert 0.8 < step.low < step.high < 1.2
    for text, name in zip(remarks, ("The reference real holds 40", "Every set holds 30"), strict=True):
        assert text.startswith(f"{name} images. ") and "about 60" in text


def test_the_command_prints_the_intervals_and_the_report_names_the_model(tmp_path):
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0))
    sets = [
        write_set(tmp_path / name, 128, held_out_loss=(losses + more).tolist()) for name, more in (("a", 0), ("b", 1))
    ]
    shown = mhla("eval", "compare", *sets, "--no-similarity", "--output", tmp_path / "report").output
    assert "95 % interval" in shown and "+1 to +1" in shown
    assert "model: the tiny pipeline," in (tmp_path / "report" / "report.html").read_text()


def test_lists_of_scores_are_paired(tmp_path):
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0))
    first = write_set(tmp_path / "a", 128, held_out_loss=losses.tolist())
    second = write_set(tmp_path / "b", 128, held_out_loss=(losses + 0.01).tolist())
    row = compare_sets([first, second])[0][1]
    assert row.scores["held_out_loss"] == pytest.approx(float(losses.mean()) + 0.01)
    # the losses differ by far more than 0.01, but those of one sample by 0.01 throughout
    assert row.differences["held_out_loss"] == pytest.approx((0.01, 0.01, 0.01), rel=1e-3)
    for wrong, named in (([0.1], "50 .*held_out_loss, .*b 1"), (["x"], "held_out_loss.*x")):
        (second / "scores.json").write_text(json.dumps({"held_out_loss": wrong}))
        not_compared([first, second], named)


def test_pictures_that_no_list_names_are_left_out_and_named(folders):
    before = compared(folders)[0][2]
    write_pictures(folders[2] / "stray", 1)
    variants, remarks = compared(folders)
    assert variants[2].scores == before.scores and variants[2].differences == before.differences
    assert any("linear is scored without stray/0000.png" in remark for remark in remarks)


def test_scores_that_are_not_finite_are_refused_by_name(folders):
    def undefined(images, texts):
        return brightness(images, texts) + torch.tensor([math.nan if "<4>" in text else 0 for text in texts])

    not_compared(folders, r"odd of .*softmax/0004\.png .*nan", sample_scores={"odd": undefined})
    (folders[1] / "scores.json").write_text('{"held_out_loss": NaN}')
    not_compared(folders, r"MHLA/scores\.json: held_out_loss .*nan")


def test_the_distance_of_many_channels_has_no_interval(folders, tmp_path):
    def wide(images):
        return torch.cat([blocks(images).pooled, torch.zeros(len(images), 300)], dim=1)

    variants, remarks = compared(folders, extractor=Extractor(wide, "wide", ""), sample_scores={})
    assert "fid" in variants[1].scores and "fid" not in variants[1].differences
    page = write_report(variants, tmp_path / "report", remarks=remarks)
    assert "channels has no interval" in page.read_text()


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(100):
        values = torch.randn(40, generator=torch.Generator().manual_seed(seed))
        interval = bootstrap(lambda chosen, values=values: float(values[chosen].mean()), 40, 300, seed)
        covered += interval.low <= 0 <= interval.high
    assert 86 <= covered <= 99


@pytest.mark.parametrize("spread", [0.6, 0.8, 1.4])
def test_the_interval_of_a_frechet_distance_covers_the_truth_although_few_samples_raise_it(spread):
    channels, samples, runs = 16, 100, 12
    target = torch.zeros(channels, dtype=torch.float64), torch.eye(channels, dtype=torch.float64)
    covered = 0
    for seed in range(runs):
        one, other = torch.randn(2, samples, channels, generator=torch.Generator().manual_seed(seed))

        def difference(chosen, one=one, other=spread * other):
            return frechet_distance(other[chosen], target) - frechet_distance(one[chosen], target)

        interval = bootstrap(difference, samples, 100, seed)
        covered += interval.low <= channels * (spread - 1) ** 2 <= interval.high
    assert covered >= runs - 1


def test_the_distance_of_few_samples_per_channel_has_no_interval(folders):
    def wider(images):
        return torch.cat([blocks(images).pooled, torch.zeros(len(images), 9)], dim=1)

    variants, remarks = compared(folders, extractor=Extractor(wider, "wider", ""), sample_scores={})
    assert "fid" in variants[1].scores and "fid" not in variants[1].differences
    assert "21 channels has no interval: that needs 32 samples, and every set holds 30" in remarks[-1]


def test_sets_are_compared_with_the_first_sample_by_sample(tmp_path):
    sets = [
        write_set(tmp_path / name, value, size=9) for name, value in (("softmax", 100), ("near", 101), ("far", 110))
    ]
    (base, near, far), remarks = compare_sets(sets, similarities={"step": steps})
    assert (base.scores, base.similarities, remarks) == ({}, {}, [])
    # a few pixels are cut off at 255
    assert near.scores == {"step": pytest.approx(1, abs=0.01)}
    assert far.similarities["step"].value == far.scores["step"] == pytest.approx(10, abs=0.1)
    assert far.similarities["step"].low <= far.scores["step"] <= far.similarities["step"].high


def test_measures_that_are_not_defined_for_small_pictures_are_left_out_with_a_remark(tmp_path):
    sets = [write_set(tmp_path / name, 128) for name in ("a", "b")]
    for folder in sets:
        write_pictures(folder, 1, size=16)
    variants, (remark,) = compare_sets(sets, similarities={"step": steps})
    assert variants[1].scores == {"step": 0}
    assert variants[1].similarities == {}
    assert remark.startswith("step is of 1 of 30 samples")
    write_pictures(sets[1], 1, size=15)
    not_compared(sets, r"0000.png .*\(1, 16, 16\) .*a .*\(1, 15, 15\) .*b", similarities={"step": steps})


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
    (_, other), (worst,) = compare_sets(sets, similarities={"step": steps, "psnr": psnr})
    found = other.scores
    assert "b is 6.0 dB, of frame 9 of 0.mp4" in worst
    # H.264 is not exact, but for a flat frame nearly so
    assert found["step"] == pytest.approx(0.5 * 255 / 10, abs=0.3)
    # nine frames are equal; of the others' errors a tenth would be a mean of 16 dB
    assert found["psnr"] == pytest.approx((9 * 100 + 20 * math.log10(2)) / 10, abs=0.1)


def test_report_shows_everything_and_needs_nothing_beside_it(folders, tmp_path):
    variants, _ = compared(folders)
    page = write_report(variants, tmp_path / "report", shown=4).read_text()
    assert page.count("data:image/png;base64,") == 3 * 4
    assert "http" not in page
    assert 'src="/' not in page
    assert "class &lt;3&gt;" in page
    assert "class &lt;4&gt;" not in page
    assert score_table(variants)[0][1:3] == ["held-out loss ↓", "FID ↓"]
    assert score_table(variants)[0][-1] == "brightness"
    for row in score_table(variants)[1] + difference_table(variants)[1]:
        assert "".join(f"<td>{cell}</td>" for cell in row) in page
    written = json.loads((tmp_path / "report" / "comparison.json").read_text())["variants"]
    assert written["linear"]["scores"] == pytest.approx(variants[2].scores)
    assert list(written) == ["softmax", "MHLA", "linear"]


def test_results_of_the_official_evaluators_are_included(tmp_path):
    sets = [write_set(tmp_path / name, 128, fid=9.9) for name in ("a", "b")]
    (sets[0] / "vbench.json").write_text('{"quality": 84.2, "total": 82.6}')
    (sets[0] / "geneval.json").write_text('{"counting": 0.2, "overall": 0.64}')
    first, second = compare_sets(sets)[0]
    assert first.scores == {"fid": 9.9, "quality": 84.2, "total": 82.6, "geneval": 0.64}
    assert second.scores == {"fid": 9.9}


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ('{"loss": true}', "loss .*True"),
        ('{"loss": [0.5, false]}', "loss .*False"),
        ('{"loss": "0.5"}', "loss .*'0.5'"),
        ('{"loss": 1, "loss": 2}', "'loss'"),
        ('{"quality": 1}', "quality"),
    ],
)
def test_scores_that_are_none_are_refused_with_their_file(tmp_path, content, value):
    folder = write_set(tmp_path / "a", 128)
    (folder / "vbench.json").write_text('{"quality": 84.2}')
    (folder / "scores.json").write_text(content)
    with pytest.raises(ValueError, match=rf"(scores|vbench)\.json.*{value}"):
        known_scores(folder)
    (folder / "scores.json").write_text('{"overall": 3, "loss": 2, "extractor": "own"}')
    assert known_scores(folder) == {"overall": 3, "loss": 2, "quality": 84.2}


def test_sets_that_are_not_paired_are_refused(folders, tmp_path):
    other = write_set(tmp_path / "other", 128, seed=1)
    choices = json.loads((folders[0] / "generation.json").read_text())
    more = {name: write_set(tmp_path / name, 128) for name in ("model_content", "dtype")}
    for name, folder in more.items():
        (folder / "generation.json").write_text(json.dumps({**choices, name: "another"}))
    shorter = write_set(tmp_path / "shorter", 128)
    write_sample_list([Sample("0000.png", "class <0>")], shorter)
    not_compared(folders[:1], "got 1")
    not_compared([folders[0], folders[0]], "softmax.*softmax")
    not_compared([folders[0], other], r"seed \(0 and 1\)")
    not_compared([folders[0], more["dtype"]], r"dtype \(None and 'another'\)")
    not_compared([folders[0], more["model_content"]], r"model_content \(None and 'another'\)")
    not_compared([folders[0], shorter], "different samples")
    not_compared(folders, "reference.*extractor", reference=folders[0])
    (folders[1] / "0007.png").unlink()
    not_compared(folders, "1 of 30 .*0007.png", FileNotFoundError)


def test_what_mhla_generate_wrote_is_compared(tmp_path):
    settings = {"num_inference_steps": 1}
    for name, patch in (("softmax", None), ("linear", "dit-xl-2-256")):
        for seeds in ((0,), (5, 0)):  # one after the other into a folder, whose list then holds both
            samples = plan_samples(["a seven", "3"], ".png", seeds)
            list(generate(SampleSet("dit", samples, tmp_path / name, seed=None, patch=patch, settings=settings)))
    variants = read_variants([tmp_path / "softmax", tmp_path / "linear"])
    found = {sample.file: (sample.text, sample.seed) for sample in variants[0].samples}
    prompts = enumerate((("a-seven", "a seven"), ("3", "3")))
    assert found == {f"000{n}-{s}-{name}.png": (text, s) for n, (name, text) in prompts for s in (0, 5)}


def test_nothing_to_compare_by_is_said(tmp_path):
    sets = [write_set(tmp_path / name, 128) for name in ("a", "b")]
    shown = mhla("eval", "compare", *sets, "--output", tmp_path / "report", "--no-similarity")
    for way in ("--reference", "--clip-model", "--score", "--similarity", "scores.json"):
        assert way in str(shown.exception)
    assert not (tmp_path / "report").exists()
    (sets[1] / "scores.json").write_text('{"held_out_loss": 0.5}')
    assert compare_sets(sets)[0][1].scores == {"held_out_loss": 0.5}


def test_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    write_pictures(tmp_path / "real", 40, seed=8, size=16)
    sets = [write_set(tmp_path / name, value, size=16) for name, value in (("softmax", 100), ("MHLA", 110))]
    plug = "tests.evaluation.test_compare:brightness"
    shown = mhla(
        *("eval", "compare", *sets, "--reference", tmp_path / "real", "--output", tmp_path / "report"),
        *("--extractor", "tests.evaluation.pictures:blocks", "--score", f"brightness={plug}"),
    )
    assert mhla("eval", "compare", *sets, "--shown", -1).exit_code == 2
    assert "'a' is given twice" in str(mhla("eval", "compare", *sets, "--score", "a=x:y", "--score", "a=x:z").exception)
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in ("softmax", "PSNR (dB) ↑", "SSIM ↑", "LPIPS is left out"))
    written = json.loads((tmp_path / "report" / "comparison.json").read_text())["variants"]["MHLA"]
    assert set(written["differences"]) == {"fid", "brightness"}
    assert written["scores"]["psnr"] == pytest.approx(20 * math.log10(255 / 10), abs=0.1)
    assert written["similarities"]["ssim"]["low"] <= written["scores"]["ssim"] <= 1
    assert "similarity to softmax" in (tmp_path / "report" / "report.html").read_text()
    assert "must look like NAME=" in str(mhla("eval", "compare", *sets, "--score", plug).exception)
