"""Files of results."""

import csv
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.benchmark.results import (
    Rates,
    Row,
    Run,
    gather_conditions,
    make_row,
    read_run,
    read_runs,
    write_run,
)
from mhla_diffusers.benchmark.timing import Outcome, Timing

WHAT = {"case": "a", "stage": "forward", "dtype": "float32"}
RATES = Rates(1e12, "float32", 1e10)


def a_run(**changes):
    slow, fast = (
        make_row(Outcome("measured", Timing(s, s, s, 3)), RATES, flops=10**9, variant=f"{s}", baseline=s > 1, **WHAT)
        for s in (2.0, 0.5)
    )
    gone = make_row(Outcome("absent", reason="not installed"), RATES, variant="gone", baseline=True, **WHAT)
    return Run("op", replace(gather_conditions(torch.device("cpu")), **changes), RATES, [slow, fast, gone])


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = a_run()
    file = write_run(run, tmp_path)
    assert read_run(file) == run
    rows = list(csv.DictReader(file.with_suffix(".csv").open()))
    assert [row["status"] for row in rows] == ["measured", "measured", "absent"]
    assert rows[2]["median"] == "" and rows[0]["peak_bytes"] == ""


def test_ratios_are_to_the_fastest_baseline_of_the_case():
    run = a_run()
    assert [run.times_baseline(row) for row in run.rows] == [1, 4, None]
    assert run.times_baseline(replace(run.rows[1], stage="backward")) is None


def test_devices_are_kept_apart(tmp_path):
    first = write_run(a_run(device="Card A"), tmp_path)
    second = write_run(a_run(device="Card B"), tmp_path)
    assert first.parent.name == "card-a" and second.parent.name == "card-b"
    assert len(read_runs([tmp_path])) == 2
    before = first.read_bytes()
    with pytest.raises(OSError, match=r"results of 'Card A'; this is 'Card\(A\)'.*another output folder"):
        write_run(a_run(device="Card(A)"), tmp_path)
    assert first.read_bytes() == before


def test_conditions_name_the_checkout():
    conditions = gather_conditions(torch.device("cpu"))
    assert conditions.versions["torch"] == torch.__version__
    assert conditions.threads == torch.get_num_threads()
    assert conditions.commit is None or len(conditions.commit.removesuffix("+changes")) == 40


def test_another_file_is_refused(tmp_path):
    (tmp_path / "op.json").write_text("{}")
    with pytest.raises(ValueError, match="op.json is no result of mhla bench"):
        read_runs([tmp_path])


def test_an_empty_row_has_no_numbers():
    assert Row("a", "forward", "x", False, "float32", "absent").median is None
