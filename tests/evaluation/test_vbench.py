"""VBench's suite, totals, and driving it; a small stand-in package plays VBench."""

import json
import sys
from pathlib import Path

import pytest

from mhla_diffusers.evaluation.vbench import (
    DIMENSIONS,
    VBenchError,
    read_augmented,
    read_results,
    read_suite,
    run_vbench,
    suite_videos,
    total_scores,
)
from mhla_diffusers.generation.record import Sample

from ..refusals import refused
from .pictures import mhla

PUBLISHED = {
    "CogVideoX-5B": (
        "96.23 96.52 98.66 96.92 70.97 61.98 62.90 85.23 62.11 99.40 82.81 66.35 53.20 24.91 25.38 27.59",
        (82.75, 77.04, 81.61),
    ),
    "HunyuanVideo": (
        "97.37 97.76 99.44 98.99 70.83 60.36 67.56 86.10 68.55 94.40 91.60 68.68 53.88 19.80 23.89 26.44",
        (85.09, 75.82, 83.24),
    ),
}


def published_scores(row):
    return dict(zip(DIMENSIONS, (float(value) / 100 for value in PUBLISHED[row][0].split()), strict=True))


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_rows_give_their_totals(row):
    totals = total_scores(published_scores(row))
    assert tuple(totals.values()) == pytest.approx(PUBLISHED[row][1], abs=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scene": None, "temporal_style": None}, "scene, temporal_style"),
        ({"color": 91.6}, "color=91.6"),
        ({"colour": 0.9}, "'colour'"),
    ],
)
def test_incomplete_and_impossible_scores_are_refused(changes, message):
    scores = published_scores("HunyuanVideo") | changes
    with pytest.raises(ValueError, match=message):
        total_scores({name: score for name, score in scores.items() if score is not None})


def write_suite(file):
    """As large as the real one: 946 entries, 944 distinct prompts, 75 of them in the flickering dimension."""
    others = [name for name in DIMENSIONS if name != "temporal_flickering"]
    entries = [{"prompt_en": f"a still frame, {i}", "dimension": ["temporal_flickering"]} for i in range(75)]
    entries += [{"prompt_en": f"a cat and {i} dogs", "dimension": [others[i % 15]]} for i in range(869)]
    entries += [{"prompt_en": f"a cat and {i} dogs", "dimension": ["scene", "color"]} for i in (0, 7)]
    file.write_text(json.dumps(entries))
    return file


def test_suite_has_as_many_videos_as_it_should(tmp_path):
    entries = read_suite(write_suite(tmp_path / "VBench_full_info.json"))
    videos, all_videos = suite_videos(entries), suite_videos(entries, all_flickering=True)
    assert (len(videos), len(all_videos)) == (4720, 6220)
    for some in (videos, all_videos):
        assert len({video.file for video in some}) == len(some)
    names = {video.file for video in videos}
    assert {f"a cat and 3 dogs-{i}.mp4" for i in range(5)} <= names
    assert "a still frame, 0-24.mp4" not in names
    assert "a still frame, 0-24.mp4" in {video.file for video in all_videos}


@pytest.mark.parametrize("lines", [946, 944])
def test_augmented_prompts_are_generated_and_the_file_keeps_the_original(tmp_path, lines):
    entries = read_suite(write_suite(tmp_path / "suite.json"))
    (tmp_path / "augmented.txt").write_text("\n".join(f"long form {i}" for i in range(lines)))
    videos = suite_videos(entries, read_augmented(tmp_path / "augmented.txt", entries))
    assert videos[375:377] == [
        Sample("a cat and 0 dogs-0.mp4", "long form 75"),
        Sample("a cat and 0 dogs-1.mp4", "long form 75"),
    ]
    (tmp_path / "augmented.txt").write_text("one line")
    with refused("1 ", " 946 ", " 944 "):
        read_augmented(tmp_path / "augmented.txt", entries)


def write_results(folder, row="CogVideoX-5B"):
    folder.mkdir()
    for name, score in published_scores(row).items():
        (folder / f"{name}_eval_results.json").write_text(json.dumps({name: [score, [{"video_path": "x"}]]}))
    return folder


def test_results_are_read_from_one_file_or_many(tmp_path):
    folder = write_results(tmp_path / "results")
    scores = read_results([folder])
    assert scores == published_scores("CogVideoX-5B")
    one = tmp_path / "one.json"
    one.write_text(json.dumps({name.replace("_", " "): score for name, score in scores.items()}))
    assert read_results([one]) == scores
    for content, sources, named in (
        ('{"color": [0.1, []]}', [one, folder], "scores color"),
        ('{"color": [NaN, []]}', [folder], "color_eval_results.json: color=nan"),
        ('{"color": [', [folder], "color_eval_results.json"),
    ):
        (folder / "color_eval_results.json").write_text(content)
        with refused(named):
            read_results(sources)


def test_command_aggregates_results(tmp_path):
    folder = write_results(tmp_path / "results")
    shown = mhla("eval", "vbench", "--from", str(folder), "--output", str(tmp_path / "totals"))
    assert shown.exit_code == 0, shown.output
    written = json.loads((tmp_path / "totals" / "vbench.json").read_text())
    assert written["total"] == pytest.approx(81.61, abs=0.01)
    assert "total: 81.6" in shown.output
    (folder / "color_eval_results.json").unlink()
    refused = mhla("eval", "vbench", "--from", str(folder))
    assert "missing: color" in str(refused.exception)
    assert "Give --from" in str(mhla("eval", "vbench").exception)


STAND_IN = """
import json, os
class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.suite, self.output = full_info_dir, output_path
    def evaluate(self, videos_path, name, dimension_list):
        (dimension,) = dimension_list
        if os.environ.get("FAIL_IN") == dimension:
            raise RuntimeError("no such checkpoint")
        with open(self.suite) as file:
            prompts = [e["prompt_en"] for e in json.load(file) if dimension in e["dimension"]]
        names = sorted(os.listdir(videos_path), key=lambda name: name.endswith(".mp4"))
        suffix = os.path.splitext(names[0])[1]
        files = [f"{videos_path}/{p}-{i}{suffix}" for p in prompts for i in range(5)]
        found = sum(os.path.isfile(file) for file in files)
        with open(f"{self.output}/{name}_eval_results.json", "w") as file:
            json.dump({dimension: [found / 5 / len(prompts), []]}, file)
        print("evaluated", dimension)
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Arguments of a run over three dimensions, with a stand-in for VBench."""
    site = tmp_path / "site"
    for package, content in (("vbench", STAND_IN), ("torch", "device = str")):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(site))
    entries = [{"prompt_en": f"{name} prompt", "dimension": [name, "color"]} for name in ("scene", "human_action")]
    (tmp_path / "suite.json").write_text(json.dumps(entries))
    videos = tmp_path / "videos"
    videos.mkdir()
    for video in suite_videos(entries):
        (videos / video.file).touch()
    (videos / "samples.json").write_text("[]")
    paths = {"suite": tmp_path / "suite.json", "videos": videos, "output": tmp_path / "out"}
    return {"python": Path(sys.executable), **paths, "dimensions": ("scene", "color", "human_action"), "device": "cpu"}


def not_run(error, named, **given):
    with pytest.raises(error, match=f"(?s){named}"):
        list(run_vbench(**given))


def test_dimensions_run_one_by_one_and_go_on_after_a_failure(given, monkeypatch):
    monkeypatch.setenv("FAIL_IN", "color")
    not_run(VBenchError, "color.*RuntimeError: no such checkpoint", **given)
    monkeypatch.delenv("FAIL_IN")
    assert list(run_vbench(**given)) == [("scene", 1.0, False), ("color", 1.0, True), ("human_action", 1.0, True)]
    log = (given["output"] / "vbench.log").read_text()
    assert log.count("evaluated") == 3
    assert log.count("=== color") == 2


def test_missing_videos_are_named_before_any_work(given):
    (given["videos"] / "scene prompt-3.mp4").unlink()
    not_run(ValueError, "1 .*'scene prompt-3.mp4'", **given)
    assert not given["output"].exists()


def test_results_of_other_videos_are_not_mixed(given):
    list(run_vbench(**{**given, "dimensions": ("scene",)}))
    video = given["videos"] / "scene prompt-0.mp4"
    (given["videos"] / "human_action prompt-0.mp4").write_bytes(b"new")
    list(run_vbench(**given))
    video.write_bytes(b"new")
    not_run(ValueError, " scene ", **given)
    video.write_bytes(b"")
    other = given["videos"].rename(given["videos"].with_name("other"))
    not_run(ValueError, f"videos.*{other}", **{**given, "videos": other})


def test_flickering_is_evaluated_on_what_the_static_filter_has_left(given, tmp_path):
    entries = [*read_suite(given["suite"]), {"prompt_en": "a still frame", "dimension": ["temporal_flickering"]}]
    given["suite"].write_text(json.dumps(entries))
    filtered = tmp_path / "filtered_videos"
    filtered.mkdir()
    chosen = {**given, "dimensions": ("scene", "temporal_flickering"), "flickering": filtered}
    not_run(ValueError, "temporal_flickering; .* filtered_videos", **chosen)
    for number in range(3):
        (filtered / f"a still frame-{number}.mp4").touch()
    assert list(run_vbench(**chosen)) == [("scene", 1.0, True), ("temporal_flickering", 0.6, True)]
    not_run(ValueError, "videos, .*filtered_videos", **given)


def test_environment_without_vbench_is_said(given, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    not_run(VBenchError, "'vbench'", **given)
    not_run(FileNotFoundError, "no-python", **{**given, "python": Path("no-python")})
    not_run(ValueError, "'colour'", **{**given, "dimensions": ("colour",)})
