"""VBench's suite, totals and commands; GenEval's prompts and score."""

import json
import shlex

import pytest

from mhla_diffusers.evaluation.geneval import geneval_score
from mhla_diffusers.evaluation.vbench import DIMENSIONS, read_results, suite_videos, total_scores

from ..refusals import refused
from .pictures import mhla

COGVIDEOX = "96.23 96.52 98.66 96.92 70.97 61.98 62.90 85.23 62.11 99.40 82.81 66.35 53.20 24.91 25.38 27.59"
PUBLISHED = dict(zip(DIMENSIONS, (float(value) / 100 for value in COGVIDEOX.split()), strict=True))
"""CogVideoX-5B's."""


def test_a_published_row_gives_its_totals():
    assert tuple(total_scores(PUBLISHED).values()) == pytest.approx((82.75, 77.04, 81.61), abs=0.01)


def test_suite_has_as_many_videos_as_it_should():
    """As large as the real one: 946 entries, 944 distinct prompts, 75 of them in the flickering dimension."""
    others = [name for name in DIMENSIONS if name != "temporal_flickering"]
    entries = [{"prompt_en": f"a still frame, {i}", "dimension": ["temporal_flickering"]} for i in range(75)]
    entries += [{"prompt_en": f"a cat and {i} dogs", "dimension": [others[i % 15]]} for i in range(869)]
    entries += [{"prompt_en": f"a cat and {i} dogs", "dimension": ["scene", "color"]} for i in (0, 7)]
    names, all_names = (
        {video.file for video in suite_videos(entries, all_flickering=wanted)} for wanted in (False, True)
    )
    assert (len(names), len(all_names)) == (4720, 6220)
    assert {f"videos/a cat and 3 dogs-{i}.mp4" for i in range(5)} <= names
    assert "videos/a still frame, 0-24.mp4" in all_names - names


def write_results(folder):
    folder.mkdir()
    for name, score in PUBLISHED.items():
        (folder / f"{name}_eval_results.json").write_text(json.dumps({name: [score, [{"video_path": "x"}]]}))
    return folder


def test_results_are_read_from_one_file_or_many(tmp_path):
    folder = write_results(tmp_path / "results")
    scores = read_results([folder])
    assert scores == PUBLISHED
    one = tmp_path / "one.json"
    one.write_text(json.dumps({name.replace("_", " "): score for name, score in scores.items()}))
    assert read_results([one]) == scores
    for content, sources, named in (
        ('{"color": [0.1, []]}', [one, folder], "color="),
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
    assert "total: 81.6" in shown.output
    assert json.loads((tmp_path / "vbench.json").read_text())["total"] == pytest.approx(81.61, abs=0.01)
    (folder / "color_eval_results.json").unlink()
    for given, named in ((("--from", folder), "missing: color"), ((), "Give --from")):
        assert named in str(mhla("eval", "vbench", *given).exception)


@pytest.fixture
def given(tmp_path):
    """A set of every dimension, and the suite."""
    folder, suite = tmp_path / "a set", tmp_path / "the suite.json"
    entries = [{"prompt_en": f"{name} prompt", "dimension": [name]} for name in DIMENSIONS]
    suite.write_text(json.dumps(entries))
    (folder / "videos").mkdir(parents=True)
    for video in suite_videos(entries):
        (folder / video.file).touch()
    return folder, suite


def test_commands_are_printed(given, tmp_path):
    folder, suite = given
    lines = [shlex.split(line) for line in mhla("eval", "vbench", folder, "--suite", suite).output.splitlines()]
    assert [line[:4] for line in lines] == [["vbench", "evaluate", "--dimension", name] for name in DIMENSIONS]
    assert str(folder / "videos") in lines[0]
    # VBench hands its line to a shell, with quotes around the videos alone
    assert shlex.split(lines[0][lines[0].index("--full_json_dir") + 1]) == [str(suite)]
    # flickering is evaluated on what the static filter has left
    filtered = tmp_path / "filtered_videos"
    filtered.mkdir()
    (filtered / "temporal_flickering prompt-0.mp4").touch()
    lines = mhla("eval", "vbench", folder, "--suite", suite, "--flickering", filtered).output.splitlines()
    assert [str(filtered) in line for line in lines] == [name == "temporal_flickering" for name in DIMENSIONS]


def test_missing_videos_are_named(given, tmp_path):
    folder, suite = given
    asked = ("eval", "vbench", folder, "--suite", suite)
    assert "temporal_flickering prompt-0.mp4" in str(mhla(*asked, "--flickering", tmp_path).exception)
    (folder / "videos" / "scene prompt-3.mp4").unlink()
    assert "scene prompt-3.mp4" in str(mhla(*asked).exception)


RIGHT = {"single_object": (3, 3), "two_object": (1, 2), "counting": (0, 5), "colors": (1, 1)}
RIGHT |= {"position": (1, 4), "color_attr": (1, 4)}
LINES = [
    {"tag": tag, "correct": number < good, "filename": f"{tag}{number}"}
    for tag, (good, total) in RIGHT.items()
    for number in range(total)
]


def write_lines(folder, lines):
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "results.jsonl"


def test_geneval_score_is_the_mean_of_six_tags(tmp_path):
    scores = geneval_score(write_lines(tmp_path, LINES))
    assert scores["two_object"] == 0.5
    assert scores["overall"] == pytest.approx((1 + 0.5 + 0 + 1 + 0.25 + 0.25) / 6)


@pytest.mark.parametrize(
    ("lines", "named"),
    [(LINES[:4], "counting, colors, position, color_attr"), ([*LINES, LINES[4]], "'two_object1'")],
)
def test_results_that_are_not_of_one_whole_run_are_refused(tmp_path, lines, named):
    assert named in str(mhla("eval", "geneval", write_lines(tmp_path, lines)).exception)
