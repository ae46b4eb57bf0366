"""The study at length at a still smaller size: all its parts, and that it goes on."""

import csv
import json
import signal
import sys
from dataclasses import replace

import pytest

from ..scripts import load_script, run_script

ROWS = {"softmax", "MHLA", "sparse 10%"}


@pytest.fixture
def script(monkeypatch):
    script = load_script("studies/length/length.py", monkeypatch)
    small = {"curriculum": ((1, 4, 2), (4, 2, 2)), "classifier": (2, 4), "transfer_steps": 1, "adapted_steps": 1}
    small |= {"clips": 2, "held_out": 2, "sampler_steps": 1, "timing_seconds": 0.001}
    monkeypatch.setattr(script, "TOY", replace(script.TOY, **small))
    monkeypatch.setattr(script, "SCENES", 16)
    every = script.rows_of
    monkeypatch.setattr(script, "rows_of", lambda size: [row for row in every(size) if row.name in ROWS])
    yield script
    sys.modules.pop("scenes")


@pytest.mark.slow
def test_a_study_that_is_ended_goes_on(script, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    draw, drawn = script.Captions.__getitem__, []

    def ended(self, index):
        if not drawn:
            signal.raise_signal(signal.SIGTERM)
        drawn.append(index)
        return draw(self, index)

    monkeypatch.setattr(script.Captions, "__getitem__", ended)
    run_script(script, monkeypatch, "--toy", "--output", tmp_path)
    assert "the same command goes on" in capsys.readouterr().out
    assert not list(tmp_path.glob("rows/*"))
    run_script(script, monkeypatch, "--toy", "--output", tmp_path)
    metrics = (tmp_path / "runs" / "softmax-1-frames" / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if "loss" in line] == [1, 2]

    rows = {
        (row["name"], row["adapted"]): row for row in map(json.loads, (f.read_text() for f in tmp_path.glob("rows/*")))
    }
    assert len(rows) == 5
    assert not [row["failed"] for row in rows.values() if "failed" in row]
    errors = {name: rows[name, False]["error"] for name in ROWS}
    assert errors["softmax"] == 0 < errors["sparse 10%"] < errors["MHLA"]
    with (tmp_path / "length.csv").open() as file:
        header, *table = csv.reader(file)
    assert len(table) == 5 and all(len(line) == len(header) for line in table)
    assert (tmp_path / "length.png").stat().st_size > 1000
    # ended, it makes nothing again
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("rows/*.json")}
    monkeypatch.setattr(script.Study, "make", None)
    run_script(script, monkeypatch, "--toy", "--output", tmp_path)
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("rows/*")}
