"""What a patch does to quality, and the script that tells it for patches without training."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mhla_diffusers.demo.fidelity import Fidelity

SCRIPT = Path(__file__).parents[2] / "finetune" / "fidelity.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("fidelity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fidelity"] = module  # where dataclasses look names up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fidelity"]


def run(script, monkeypatch, folder, family):
    small = ("--family", family, "--scenes", 4, "--held-out", 2, "--output", folder)
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "untrained", *map(str, small)])
    script.main()
    with (folder / f"untrained-{family}.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header[:3] == ["self-attention", "density", "held-out loss ↓"]
    return {(row[0], row[1]): row[2:] for row in rows}


def number(cell):
    return float(cell.split()[0])


def test_means_come_with_their_error():
    cells = Fidelity([0.1, 0.2], [0.5, 1.0], [0.25, 0.35], 12.34).cells
    assert cells == ("0.1500 ± 0.0500", "75.0 ± 25.0 %", "12.3", "0.300 ± 0.050")
    assert Fidelity([0.1], [1.0], [], 1.0).cells == ("0.1000", "100.0 %", "1.0", "–")


@pytest.mark.slow
def test_linear_attention_is_mhla_with_every_block_alike(script, monkeypatch, tmp_path):
    """SANA has no softmax to be sparse; a uniform matrix is its own attention."""
    rows = run(script, monkeypatch, tmp_path, "sana")
    assert list(rows) == [("own linear attention", ""), ("MHLA, every block alike", ""), ("MHLA", "")]
    own, alike, mhla = rows.values()
    assert alike[:2] == own[:2]
    assert number(alike[3]) < 0.005 < number(mhla[3])


@pytest.mark.slow
def test_the_more_takes_part_the_nearer_the_pictures(script, monkeypatch, tmp_path):
    names = ("sparse alone", "sparse and pooled keys, β fitted", "sparse and MHLA, calibrated")
    monkeypatch.setattr(script, "DENSITIES", (0.1, 0.25))
    chosen = [row for row in script.rows_of(script.TINY["dit"]) if row.name in ("MHLA", *names)]
    monkeypatch.setitem(script.TABLES, "untrained", replace(script.TABLES["untrained"], rows=lambda _: iter(chosen)))
    rows = run(script, monkeypatch, tmp_path, "dit")
    alone, pooled, calibrated = (number(rows[name, "10%"][3]) for name in names)
    assert calibrated < alone
    assert pooled < min(alone, number(rows["MHLA", ""][3]))
    for name in names[2:]:
        assert number(rows[name, "25%"][3]) < number(rows[name, "10%"][3])
    # what is finished is kept
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json")}
    assert run(script, monkeypatch, tmp_path, "dit") == rows
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
