"""GenEval's prompts, and its score."""

import json

import pytest

from mhla_diffusers.evaluation.geneval import geneval_samples, geneval_score, read_geneval_metadata
from mhla_diffusers.generation.record import Sample

from ..refusals import refused
from .pictures import mhla


def write_metadata(file):
    entries = [{"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": f"{n} dogs"} for n in (2, 3)]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return entries


def test_prompts_are_laid_out_as_the_evaluator_reads_them(tmp_path):
    entries = write_metadata(tmp_path / "metadata.jsonl")
    assert read_geneval_metadata(tmp_path / "metadata.jsonl") == entries
    samples = geneval_samples(entries)
    assert len(samples) == 8
    assert samples[5] == Sample("00001/samples/0001.png", "3 dogs")
    (tmp_path / "metadata.jsonl").write_text('{"prompt": "x"}\n')
    with refused("Line 1", "tag"):
        read_geneval_metadata(tmp_path / "metadata.jsonl")


def test_geneval_score_is_the_mean_of_six_tags(tmp_path):
    file = tmp_path / "results.jsonl"
    right = {"single_object": (3, 3), "two_object": (1, 2), "counting": (0, 5), "colors": (1, 1)}
    right |= {"position": (1, 4), "color_attr": (1, 4)}
    lines = [
        {"tag": tag, "correct": number < good, "filename": f"{tag}{number}"}
        for tag, (good, total) in right.items()
        for number in range(total)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = geneval_score(file)
    assert scores["two_object"] == 0.5
    assert scores["overall"] == pytest.approx((1 + 0.5 + 0 + 1 + 0.25 + 0.25) / 6)
    for given, named in (
        (lines[:4], "counting, colors, position, color_attr"),
        ([*lines, lines[4]], "'two_object1'"),
        ([{"tag": "counting"}], "Line 1"),
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in given))
        assert named in str(mhla("eval", "geneval", file).exception)
