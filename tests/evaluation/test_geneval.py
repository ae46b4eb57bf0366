"""GenEval's prompts, and its score."""

import json

import pytest

from mhla_diffusers.evaluation.geneval import geneval_samples, geneval_score
from mhla_diffusers.generation.record import Sample

from .pictures import mhla

RIGHT = {"single_object": (3, 3), "two_object": (1, 2), "counting": (0, 5), "colors": (1, 1)}
RIGHT |= {"position": (1, 4), "color_attr": (1, 4)}
LINES = [
    {"tag": tag, "correct": number < good, "filename": f"{tag}{number}"}
    for tag, (good, total) in RIGHT.items()
    for number in range(total)
]


def test_prompts_are_laid_out_as_the_evaluator_reads_them():
    samples = geneval_samples([{"tag": "counting", "prompt": f"{n} dogs"} for n in (2, 3)])
    assert len(samples) == 8
    assert samples[5] == Sample("00001/samples/0001.png", "3 dogs")


def test_geneval_score_is_the_mean_of_six_tags(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    scores = geneval_score(file)
    assert scores["two_object"] == 0.5
    assert scores["overall"] == pytest.approx((1 + 0.5 + 0 + 1 + 0.25 + 0.25) / 6)


@pytest.mark.parametrize(
    ("lines", "named"),
    [(LINES[:4], "counting, colors, position, color_attr"), ([*LINES, LINES[4]], "'two_object1'")],
)
def test_results_that_are_not_of_one_whole_run_are_refused(tmp_path, lines, named):
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert named in str(mhla("eval", "geneval", file).exception)
