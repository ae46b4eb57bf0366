"""The script that compares the quality of the adapted attentions of a tiny pipeline."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "finetune" / "quality.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quality", module)  # where dataclasses look names up
    spec.loader.exec_module(module)
    for name, fewer in (("HELD_OUT", 4), ("_RESAMPLES", 50), ("_FRECHET_RESAMPLES", 10)):
        monkeypatch.setattr(module, name, fewer)
    return module


@pytest.mark.slow
def test_what_ships_is_judged_against_the_control(script, tmp_path, monkeypatch, capsys):
    arguments = ("dit", "--scenes", 3, "--only", "exact", "--output", tmp_path)
    monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, arguments)])
    script.main()
    results = json.loads((tmp_path / "quality.json").read_text())
    assert list(results) == ["softmax", "MHLA, block-sparse", "softmax, as shipped"]
    sparse = results["MHLA, block-sparse"]
    assert set(sparse["differences"]) == {"held-out loss", "digits recognised", "Fréchet distance"}
    for interval in sparse["differences"].values():
        assert interval["low"] <= interval["high"]
    assert (tmp_path / "quality.md").read_text() in capsys.readouterr().out
    # what was generated is there, and is taken from there
    monkeypatch.setattr(script, "generate_scenes", None)
    script.main()
    assert json.loads((tmp_path / "quality.json").read_text()) == results
