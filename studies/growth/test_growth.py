"""Where curves cross, what a run writes, and that the page says what was measured."""

import json
from pathlib import Path

import growth
import pytest
from growth import MHLA, SOFTMAX, SPARSE, Growth, about, main

ROOT = Path(__file__).parents[2]
TOKENS = (1000, 2000, 4000)


def growth_of(sparse, mhla, softmax=lambda n: 1e-9 * n**2):
    functions = {SOFTMAX: softmax, SPARSE: sparse, MHLA: mhla}
    curves = {name: [(n, f(n)) for n in TOKENS] for name, f in functions.items()}
    return Growth("some CPU", "float32", "2026-11-23", 4, curves, spread=0.1, ended="the seconds are spent")


def test_curves_cross_where_powers_of_n_are_equal():
    """Softmax takes 1e-9 N², the others c N: equal at N = 1e9 c, wherever it lies between the N measured."""
    one = growth_of(sparse=lambda n: 2.5e-6 * n, mhla=lambda n: 1.3e-6 * n)
    assert one.crossing(SPARSE) == pytest.approx(2500)
    assert one.crossing(MHLA) == pytest.approx(1300)
    never = growth_of(sparse=lambda n: 8e-6 * n, mhla=lambda n: 0.5e-6 * n)
    assert (never.crossing(SPARSE), never.crossing(MHLA)) == (None, 1000)


def test_a_run_writes_table_and_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(growth, "GRIDS", ((1, 6, 10), (2, 6, 10)))
    main(["--output", str(tmp_path), "--device", "cpu"])
    found = Growth(**json.loads((tmp_path / "growth.json").read_text()))
    assert [n for n, _ in found.curves[MHLA]] == [60, 120]
    assert "overtakes softmax at" in capsys.readouterr().out
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_the_results_page_says_what_was_measured():
    measured = Growth(**json.loads((ROOT / "studies/growth/growth.json").read_text()))
    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    for name, curve in measured.curves.items():
        if name != SOFTMAX:
            assert f"overtakes softmax at about {about(measured.crossing(name))}" in page
        line = " | ".join((name, *(f"{1000 * seconds:,.0f}" for _, seconds in curve)))
        assert f"| {line} |" in page
