"""The script that compares how fast attentions adapt."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "finetune" / "compare.py"


@pytest.mark.slow
def test_script_adapts_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("compare", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    runs = [("diffusion", "softmax, trained on"), ("distillation", "MHLA auto:2/3")]
    monkeypatch.setitem(script.TABLES, "recipes", runs)
    small = ("--samples", 16, "--held-out", 2, "--steps", 1, "--timing-seconds", 0.01)
    monkeypatch.setattr(sys, "argv", ["compare.py", "recipes", "--output", str(tmp_path), *map(str, small)])
    script.main()
    with (tmp_path / "recipes.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["losses", "attention", "untrained", "0", "ms forward+backward"]
    assert [(row[0], row[1]) for row in rows] == runs
    # what is finished is kept
    result = tmp_path / "distillation-MHLA-auto:2-3-1" / "result" / "mhla_config.json"
    before = result.stat().st_mtime_ns
    script.main()
    assert result.stat().st_mtime_ns == before
