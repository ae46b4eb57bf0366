"""VBench's suite, totals, and its command, which a small script plays."""

import json
import shlex
import sys

import pytest

from mhla_diffusers.evaluation.vbench import (
    DIMENSIONS,
    VBenchError,
    read_results,
    read_suite,
    suite_videos,
    total_scores,
)

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
    assert {f"videos/a cat and 3 dogs-{i}.mp4" for i in range(5)} <= names
    assert "videos/a still frame, 0-24.mp4" not in names
    assert "videos/a still frame, 0-24.mp4" in {video.file for video in all_videos}


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
        ('{"color": [91.6, []]}', [folder], "color_eval_results.json: color=91.6"),
        ('{"colour": [0.9, []]}', [folder], "color_eval_results.json: colour=0.9"),
        ('{"color": [', [folder], "color_eval_results.json"),
    ):
        (folder / "color_eval_results.json").write_text(content)
        with refused(named):
            read_results(sources)


def test_command_adds_up_results(tmp_path):
    folder = write_results(tmp_path / "results")
    shown = mhla("eval", "vbench", "--from", folder, "--output", tmp_path / "vbench.json")
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "vbench.json").read_text())["total"] == pytest.approx(81.61, abs=0.01)
    assert "total: 81.6" in shown.output
    (folder / "color_eval_results.json").unlink()
    assert "missing: color" in str(mhla("eval", "vbench", "--from", folder).exception)
    assert "Give --from" in str(mhla("eval", "vbench").exception)


STAND_IN = f"""#!{sys.executable}
import argparse, datetime, json, os
parser = argparse.ArgumentParser()
for name in ("command", "--dimension", "--videos_path", "--full_json_dir", "--output_path"):
    parser.add_argument(name)
given = parser.parse_args()
# VBench hands its line to a shell, with quotes around the videos alone
suite, output = (os.popen("echo " + text).read()[:-1] for text in (given.full_json_dir, given.output_path))
print("evaluating", given.dimension)
if os.environ.get("FAIL_IN") != given.dimension:  # it ends well all the same
    with open(suite) as file:
        prompts = [entry["prompt_en"] for entry in json.load(file) if given.dimension in entry["dimension"]]
    suffix = os.path.splitext(os.listdir(given.videos_path)[0])[1]
    files = [f"{{given.videos_path}}/{{prompt}}-{{number}}{{suffix}}" for prompt in prompts for number in range(5)]
    score = sum(map(os.path.isfile, files)) / len(files)
    os.makedirs(output, exist_ok=True)
    with open(f"{{output}}/results_{{datetime.datetime.now()}}_eval_results.json", "w") as file:
        json.dump({{given.dimension: [score, []]}}, file)
"""


@pytest.fixture
def given(tmp_path):
    """A set of every dimension, the suite, and a stand-in for VBench."""
    folder, suite, program = tmp_path / "a set", tmp_path / "the suite.json", tmp_path / "bin" / "vbench"
    entries = [{"prompt_en": f"{name} prompt", "dimension": [name]} for name in DIMENSIONS]
    suite.write_text(json.dumps(entries))
    (folder / "videos").mkdir(parents=True)
    for video in suite_videos(entries):
        (folder / video.file).touch()
    (folder / "samples.json").write_text("[]")
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return folder, suite, program


def test_commands_are_printed_or_run(given, tmp_path):
    folder, suite, program = given
    printed = mhla("eval", "vbench", folder, "--suite", suite)
    lines = [shlex.split(line) for line in printed.output.splitlines()]
    assert [line[:4] for line in lines] == [["vbench", "evaluate", "--dimension", name] for name in DIMENSIONS]
    assert str(folder / "videos") in lines[0] and not (folder / "vbench").exists()
    ran = mhla("eval", "vbench", folder, "--suite", suite, "--vbench", program, "--output", tmp_path / "vbench.json")
    assert ran.exit_code == 0, ran.exception
    assert json.loads((tmp_path / "vbench.json").read_text())["scene"] == 1.0
    assert set(read_results([folder / "vbench"]).values()) == {1.0}


def test_a_dimension_that_fails_is_named_and_the_rest_can_be_added(given, monkeypatch):
    folder, suite, program = given
    asked = ("eval", "vbench", folder, "--suite", suite, "--vbench", program)
    monkeypatch.setenv("FAIL_IN", DIMENSIONS[1])
    ended = mhla(*asked)
    assert isinstance(ended.exception, VBenchError) and DIMENSIONS[1] in str(ended.exception)
    monkeypatch.delenv("FAIL_IN")
    rest = [word for name in DIMENSIONS[1:] for word in ("--dimension", name)]
    assert mhla(*asked, *rest).exit_code == 0
    assert "total: " in mhla("eval", "vbench", "--from", folder / "vbench").output
    absent = mhla("eval", "vbench", folder, "--suite", suite, "--vbench", program.with_name("no-vbench"))
    assert isinstance(absent.exception, VBenchError) and "no-vbench" in str(absent.exception)


def test_flickering_is_evaluated_on_what_the_static_filter_has_left(given, tmp_path):
    folder, suite, program = given
    filtered = tmp_path / "filtered_videos"
    filtered.mkdir()
    asked = ("eval", "vbench", folder, "--suite", suite, "--vbench", program, "--flickering", filtered)
    asked += ("--dimension", "scene", "--dimension", "temporal_flickering")
    assert "filtered_videos/temporal_flickering prompt-0.mp4" in str(mhla(*asked).exception)
    for number in range(3):
        (filtered / f"temporal_flickering prompt-{number}.mp4").touch()
    assert mhla(*asked).exit_code == 0
    assert read_results([folder / "vbench"]) == {"scene": 1.0, "temporal_flickering": 0.6}


def test_missing_videos_and_unknown_dimensions_are_named_before_any_work(given):
    folder, suite, program = given
    (folder / "videos" / "scene prompt-3.mp4").unlink()
    asked = ("eval", "vbench", folder, "--suite", suite, "--vbench", program)
    for more, named in (((), "1 videos are missing, .*scene prompt-3.mp4"), (("--dimension", "colour"), "'colour'")):
        with pytest.raises(ValueError, match=named):
            raise mhla(*asked, *more).exception
    assert not (folder / "vbench").exists()
