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
    kinds = ("softmax, trained on", "MHLA auto:2/3", "sparse")
    runs = list(zip(("diffusion", "transfer first, gentle", "distillation"), kinds, strict=True))
    monkeypatch.setitem(script.TABLES, "recipes", runs)
    small = ("--samples", 5, "--held-out", 1, "--batch-size", 1, "--timing-seconds", 0.01)
    steps = ("--steps", 1, "--transfer-steps", 1, "--seeds", 1, 2)
    monkeypatch.setattr(sys, "argv", ["compare.py", "recipes", "--output", str(tmp_path), *map(str, (*small, *steps))])
    script.main()
    with (tmp_path / "recipes.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["losses", "attention", "untrained", "0", "ms forward+backward"]
    assert [(row[0], row[1]) for row in rows] == runs
    assert all(" ± " in row[2] for row in rows), "of two seeds"
    # what is finished is kept
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/metrics.jsonl")}
    assert len(kept) == 2 * len(runs)
    script.main()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
