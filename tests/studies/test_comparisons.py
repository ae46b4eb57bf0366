"""The studies that compare attentions on the tiny pipelines: what they tell, and that they go on."""

import csv
import json

import pytest
import torch

from mhla_diffusers.evaluation.metrics import frechet_distance

from ..scripts import load_script, run_script


def files_in(folder, pattern):
    """File → when it was written: what is finished is kept."""
    return {file: file.stat().st_mtime_ns for file in folder.glob(pattern)}


@pytest.mark.slow
def test_how_fast_attentions_adapt(tmp_path, monkeypatch):
    script = load_script("studies/adaptation/compare.py", monkeypatch)
    runs = [("diffusion", "softmax, trained on"), ("transfer first", "MHLA hybrid 2/3")]
    monkeypatch.setitem(script.TABLES, "recipes", runs)
    small = ("--samples", 5, "--held-out", 1, "--steps", 1, "--transfer-steps", 1)
    asked = ("recipes", "--output", tmp_path, *small)
    run_script(script, monkeypatch, *asked)
    with (tmp_path / "recipes.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["losses", "attention", "0"]
    assert [(row[0], row[1]) for row in rows] == runs
    kept = files_in(tmp_path, "*/metrics.jsonl")
    assert len(kept) == len(runs)
    run_script(script, monkeypatch, *asked)
    assert files_in(tmp_path, "*/metrics.jsonl") == kept


@pytest.mark.slow
def test_what_ships_is_judged_against_the_control(tmp_path, monkeypatch, capsys):
    script = load_script("studies/quality/quality.py", monkeypatch)
    monkeypatch.setattr(script, "HELD_OUT", 4)
    for score, (style, arrow, _) in script.SCORES.items():
        monkeypatch.setitem(script.SCORES, score, (style, arrow, 10))
    asked = ("dit", "--scenes", 3, "--only", "sparse", "--output", tmp_path)
    run_script(script, monkeypatch, *asked)
    results = json.loads((tmp_path / "quality.json").read_text())
    assert list(results) == ["softmax", "sparse, 5 %", "softmax, as shipped"]
    sparse = results["sparse, 5 %"]
    assert set(sparse["differences"]) == {"held-out loss", "digits recognised", "Fréchet distance"}
    assert all(interval["low"] <= interval["high"] for interval in sparse["differences"].values())
    assert (tmp_path / "quality.md").read_text() in capsys.readouterr().out
    # what was generated is there, and is taken from there
    monkeypatch.setattr(script.Yardstick, "generate", None)
    run_script(script, monkeypatch, *asked)
    assert json.loads((tmp_path / "quality.json").read_text()) == results


@pytest.mark.parametrize("spread", [0.6, 0.8, 1.4])
def test_the_interval_of_a_frechet_distance_covers_the_truth_although_few_samples_raise_it(spread, monkeypatch):
    bootstrap = load_script("studies/quality/quality.py", monkeypatch).bootstrap
    channels, samples, runs = 16, 100, 12
    target = torch.zeros(channels, dtype=torch.float64), torch.eye(channels, dtype=torch.float64)
    covered = 0
    for seed in range(runs):
        one, other = torch.randn(2, samples, channels, generator=torch.Generator().manual_seed(seed))

        def difference(chosen, one=one, other=spread * other):
            return frechet_distance(other[chosen], target) - frechet_distance(one[chosen], target)

        interval = bootstrap(difference, samples, 100, seed)
        covered += interval["low"] <= channels * (spread - 1) ** 2 <= interval["high"]
    assert covered >= runs - 1


def test_gap_is_that_between_linear_attention_and_the_control(tmp_path, monkeypatch):
    script = load_script("studies/adaptation/compare.py", monkeypatch)
    for seed, end in enumerate((2.0, 3.0)):
        for short, loss in (("control", 1.0), ("linear", 5.0), ("mhla", end)):
            folder = tmp_path / f"seed-{seed}" / "patches" / f"tiny-wan-{short}"
            folder.mkdir(parents=True)
            curve = [[step, loss] for step in script.GAPS.values()]
            (folder / script.ADAPTED_RECORD).write_text(json.dumps({"held-out loss by update": curve}))
    run_script(script, monkeypatch, "gap", tmp_path / "seed-0", tmp_path / "seed-1", "--output", tmp_path)
    mhla = (tmp_path / "gap.md").read_text().splitlines()[-1]
    assert mhla.startswith("| MHLA | 2.5000 ± 0.7071 |") and "62.5 ± 17.7 %" in mhla


@pytest.mark.slow
def test_costs_of_residuals_are_counted_and_finished_rows_are_kept(monkeypatch, tmp_path):
    script = load_script("studies/carry/carry.py", monkeypatch)
    dense = {"dense_first": 1, "dense_every": 10}
    rows = [script.Row(0.05, dense), script.Row(0.05, dense | {"correct": False}), script.Row(0.05)]
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(script, "rows_of", lambda steps: rows)
    asked = ("--steps", 20, "--scenes", 2)
    run_script(script, monkeypatch, *asked)
    with (tmp_path / "wan-20.csv").open() as file:
        found = {tuple(row[name] for name in list(row)[:4]): row for row in csv.DictReader(file)}
    assert list(found) == [("", "", "", ""), *(row.name for row in rows)]
    unpatched, corrected, dropped, alone = found.values()
    sparse = 0.05 + script.POOLED
    # of twenty steps two are dense, and the second one measures a residual too, as its own steps are still to come
    assert float(corrected["cost"]) == pytest.approx(0.1 * (1 + sparse) + 0.9 * sparse, abs=6e-4)
    assert float(dropped["cost"]) == pytest.approx(0.1 + 0.9 * sparse, abs=6e-4)
    assert float(alone["cost"]) == pytest.approx(sparse, abs=6e-4)
    assert float(unpatched["psnr"]) == 100 and float(unpatched["cost"]) == 1
    before = (tmp_path / "wan-20.csv").read_text()
    run_script(script, monkeypatch, *asked)
    assert (tmp_path / "wan-20.csv").read_text() == before
