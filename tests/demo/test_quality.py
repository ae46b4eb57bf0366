"""The script that compares the quality of the adapted attentions of a tiny pipeline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script, *arguments]
    return subprocess.run([str(part) for part in command], check=True, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_what_ships_is_judged_against_the_control(tmp_path):
    script = [ROOT / "finetune" / "quality.py"]
    arguments = ("dit", "--scenes", 4, "--only", "exact", "--output", tmp_path)
    printed = call(script, *arguments).stdout
    results = json.loads((tmp_path / "quality.json").read_text())
    assert list(results) == ["softmax", "MHLA, block-sparse", "softmax, as shipped"]
    exact = results["MHLA, block-sparse"]
    assert set(exact["differences"]) == {"held-out loss", "digits recognised", "Fréchet distance"}
    for interval in exact["differences"].values():
        assert interval["low"] <= interval["value"] <= interval["high"]
    assert (tmp_path / "quality.md").read_text() in printed
    # what was generated is there, and is taken from there
    call(script, *arguments)
    assert json.loads((tmp_path / "quality.json").read_text()) == results
