"""Timing in turns, ratios, and the files of results; and what no command of ``mhla bench`` takes."""

from itertools import count

import pytest
import torch

from mhla_diffusers.benchmark.measure import Results, Row, gather_conditions, measured, tables_of, time_interleaved

from ..refusals import refused
from .commands import bench, read_rows

CPU = torch.device("cpu")
SHORT = 1e-9


def row(variant, seconds, **what):
    known = {"case": "a", "stage": "forward", "baseline": variant.startswith("softmax")}
    return measured(Row(variant, **known | what), [seconds] * 3, 2**30)


def test_variants_take_turns():
    calls = []
    rows = time_interleaved({Row(name): lambda name=name: calls.append(name) for name in "ab"}, CPU, SHORT)
    assert calls[-6:] == ["a", "b", "a", "b", "a", "b"]
    assert rows[0].repetitions == 3 and rows[0].peak_bytes is None and rows[0].median > 0


def test_median_and_percentiles_by_hand():
    found = measured(Row("a"), [6.0, 1.0, 2.0, 3.0, 5.0, 4.0], None)
    assert (found.p20, found.median, found.p80, found.repetitions) == pytest.approx((2, 3.5, 5, 6))


def test_what_cannot_run_is_listed_with_its_reason():
    def too_large():
        torch.empty(2**58)

    def refused():
        raise RuntimeError("No available kernel.\nmore")

    runs = {"gone": "not installed", "large": too_large, "refused": refused, "runs": lambda: None}
    rows = time_interleaved({Row(name): run for name, run in runs.items()}, CPU, SHORT)
    assert [one.variant for one in rows] == list(runs)
    assert [bool(one.median) for one in rows] == [False, False, False, True]
    assert (rows[0].reason, rows[2].reason) == ("not installed", "No available kernel.") and rows[1].reason


def test_memory_that_runs_out_while_timing_takes_one_row_alone():
    calls = count()

    def later():
        if next(calls) > 3:
            torch.empty(2**58)

    later_row, row = time_interleaved({Row("later"): later, Row("runs"): lambda: None}, CPU)
    assert (bool(later_row.reason), row.reason, row.repetitions) == (True, "", 30)


def test_ratios_are_to_the_fastest_baseline_of_case_and_stage():
    rows = [row("softmax", 2.0), row("MHLA", 0.5), row("softmax slow", 4.0), row("MHLA", 1.0, stage="backward")]
    rows += [Row("gone", "a", "forward", baseline=True, reason="none"), row("slow", 8)]
    forward, backward = tables_of(rows)
    for (_, (header, lines), _), ratios in ((forward, ["1.00", "4.00", "0.50", "0.25"]), (backward, [""])):
        assert [dict(zip(header, line, strict=True)).get("speedup", "") for line in lines] == ratios
        assert "PSNR, dB" not in header, "a column without numbers"
    assert (forward[2], backward[2]) == (["not measured: none: gone"], []), "below the table"


def test_results_are_read_as_they_were_written(tmp_path):
    results = Results("op", CPU, torch.float32, tmp_path)
    for case in ("a", "b, c"):
        what = {"case": case, "stage": "forward", "tokens": 7}
        runs = {Row("softmax", baseline=True, flops=10**9, **what): lambda: None, Row("gone", **what): "x | y"}
        results.add(time_interleaved(runs, CPU, SHORT))
        assert read_rows(results.file.with_suffix(".csv")) == results.rows, "also of a run that is cut off"
    found = [(one.flops, one.tokens, one.dtype) for one in results.rows[:2]]
    assert found == [(10**9, 7, "float32"), (None, 7, "float32")]
    page = results.file.with_suffix(".md").read_text()
    for name, value in gather_conditions(CPU).items():
        assert name in page and (name == "date" or value in page)
    assert f"torch: {torch.__version__}" in page and "not measured: x" in page
    results.rows = results.rows[1::2]
    with refused("gone"):
        results.finish()


@pytest.mark.parametrize(
    ("asked", "offending"),
    [
        ("op --model wan", "'wan'...wan2.1-1.3b"),
        ("op --model tiny-dit --size 8xa", "'8xa'"),
        ("transformer --model wan2.1-1.3b --size 480x850", "width=850...848...864"),
        ("transformer --model tiny-dit --size 64x80", "64x80"),
        ("transformer --model wan2.1-1.3b --frames 80", "frames=80...77...81"),
        ("transformer --model tiny-dit --frames 9", "--frames 9...tiny-dit"),
        ("transformer --model tiny-dit --size 64x64x9", "64x64x9"),
        ("pipeline --set height=64", "'height'"),
        ("pipeline --patch fast --change dense_first=1.2", "dense_first...1.2"),
        ("pipeline --change density=2", "density=2"),
        ("pipeline --patch .", "mhla.safetensors"),
        ("pipeline --model .", "model_index.json"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, asked, offending):
    monkeypatch.chdir(tmp_path)
    with refused(offending, error=(ValueError, OSError)):
        bench(*asked.split(), "--device", "cpu", "--output", tmp_path)
    assert not list(tmp_path.rglob("*.csv"))
