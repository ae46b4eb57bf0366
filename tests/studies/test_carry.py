"""The study of residuals at a still smaller size: its rows, their costs, and that it goes on."""

import csv

import pytest

from ..scripts import load_script, run_script


@pytest.mark.slow
def test_costs_are_counted_and_finished_rows_are_kept(monkeypatch, tmp_path):
    script = load_script("studies/carry/carry.py", monkeypatch)
    dense = {"dense_first": 1, "dense_every": 10}
    rows = [script.Row(0.05, dense), script.Row(0.05, dense | {"correct": False}), script.Row(0.05)]
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(script, "rows_of", lambda steps: rows)
    asked = ("--family", "dit", "--steps", 20, "--scenes", 2)
    run_script(script, monkeypatch, *asked)
    with (tmp_path / "dit-20.csv").open() as file:
        found = {tuple(row[name] for name in list(row)[:4]): row for row in csv.DictReader(file)}
    assert list(found) == [("", "", "", ""), *(row.name for row in rows)]
    unpatched, corrected, dropped, alone = found.values()
    sparse = 0.05 + script.POOLED
    # of twenty steps two are dense, and the second one measures a residual too, as its own steps are still to come
    assert float(corrected["cost"]) == pytest.approx(0.1 * (1 + sparse) + 0.9 * sparse, abs=6e-4)
    assert float(dropped["cost"]) == pytest.approx(0.1 + 0.9 * sparse, abs=6e-4)
    assert float(alone["cost"]) == pytest.approx(sparse, abs=6e-4)
    assert float(unpatched["psnr"]) == 100 and float(unpatched["cost"]) == 1
    before = (tmp_path / "dit-20.csv").read_text()
    run_script(script, monkeypatch, *asked)
    assert (tmp_path / "dit-20.csv").read_text() == before
