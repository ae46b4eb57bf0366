"""Timing in turns, files of results, and ``mhla bench report``."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.benchmark.report import FIGURES, colour_of, fastest_by_group
from mhla_diffusers.benchmark.results import (
    COMMANDS,
    CONTENT,
    Rates,
    Run,
    gather_conditions,
    make_row,
    read_run,
    read_runs,
    write_run,
)
from mhla_diffusers.benchmark.timing import Absent, Budget, Outcome, Timing, time_interleaved

from .commands import bench

CPU = torch.device("cpu")
RATES = Rates(1e12, "float32", 1e10)


def row(seconds, **what):
    known = {"case": "a", "stage": "forward", "dtype": "float32", "baseline": what["variant"].startswith("softmax")}
    outcome = Outcome("measured", Timing(seconds, seconds, seconds, 3), peak_bytes=2**30)
    return make_row(outcome, RATES, whole_seconds=seconds, **known | what)


def test_variants_take_turns():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "ab"}
    outcomes = time_interleaved(variants, CPU, Budget(seconds=1e-9, least=3))
    assert calls[-6:] == ["a", "b", "a", "b", "a", "b"]
    assert outcomes["a"].timing.repetitions == 3 and outcomes["a"].peak_bytes is None


def test_what_cannot_run_is_listed_with_its_reason():
    def too_large():
        torch.empty(2**58)

    def refused():
        raise RuntimeError("No available kernel.\nmore")

    variants = {"gone": Absent("not installed"), "large": too_large, "refused": refused, "runs": lambda: None}
    outcomes = time_interleaved(variants, CPU, Budget(seconds=1e-9))
    assert list(outcomes) == list(variants)
    assert [outcome.status for outcome in outcomes.values()] == ["absent", "out of memory", "absent", "measured"]
    assert (outcomes["gone"].reason, outcomes["refused"].reason) == ("not installed", "No available kernel.")


def test_the_budget_bounds_repetitions():
    budget = Budget(seconds=1, least=3, most=30)
    assert [budget.repetitions(seconds) for seconds in (1e-6, 0.1, 60)] == [30, 10, 3]
    with pytest.raises(ValueError, match="seconds=0"):
        Budget(seconds=0)


def a_run(**changes):
    gone = make_row(
        Outcome("absent", reason="none"),
        RATES,
        case="a",
        stage="forward",
        variant="gone",
        baseline=True,
        dtype="float32",
    )
    rows = [row(2.0, variant="softmax", flops=10**9), row(0.5, variant="MHLA", flops=10**9), gone]
    return Run("op", replace(gather_conditions(CPU), **changes), RATES, rows)


def test_a_run_is_read_as_it_was_written(tmp_path):
    run = a_run()
    file = write_run(run, tmp_path)
    assert read_run(file) == run
    rows = list(csv.DictReader(file.with_suffix(".csv").open()))
    assert [one["status"] for one in rows] == ["measured", "measured", "absent"]
    assert (rows[2]["median"], rows[0]["matmul_fraction"]) == ("", "0.0005")
    (tmp_path / "op.json").write_text("{}")
    with pytest.raises(ValueError, match="op.json is no result of mhla bench"):
        read_runs([tmp_path])


def test_ratios_are_to_the_fastest_baseline_of_the_case():
    run = a_run()
    run.rows.append(row(4.0, variant="softmax slow"))
    assert [run.times_baseline(one) for one in run.rows] == [1, 4, None, 0.5]
    assert run.times_baseline(replace(run.rows[1], stage="backward")) is None


def test_devices_are_kept_apart(tmp_path):
    first = write_run(a_run(device="Card A"), tmp_path)
    second = write_run(a_run(device="Card B"), tmp_path)
    assert first.parent.name == "card-a" and second.parent.name == "card-b"
    assert len(read_runs([tmp_path])) == 2
    before = first.read_bytes()
    with pytest.raises(OSError, match=r"results of 'Card A'; this is 'Card\(A\)'"):
        write_run(a_run(device="Card(A)"), tmp_path)
    assert first.read_bytes() == before


def test_conditions_name_the_checkout():
    conditions = gather_conditions(CPU)
    assert conditions.versions["torch"] == torch.__version__
    assert conditions.threads == torch.get_num_threads()
    assert conditions.commit is None or len(conditions.commit.removesuffix("+changes")) == 40


def write_results(folder, device):
    """A run of every command with every figure's rows, as a machine might have measured them."""
    op = [row(2.0, variant="softmax flash"), row(0.1, variant="MHLA eager", blocks=4)]
    scaling = [
        row(n * m * 1e-6, case=f"N={n}", variant="plain linear" if m == 1 else f"MHLA M={m}", tokens=n, blocks=m)
        for n in (8192, 32768)
        for m in (1, 4, 256)
    ]
    transformer = [
        row(
            1.0 * side * frames,
            case=f"w {side} {frames}",
            variant=name,
            model="w",
            height=side,
            width=side,
            frames=frames,
            stage=stage,
        )
        for side in (16, 32)
        for frames in (5, 9)
        for name in ("softmax native", "MHLA", CONTENT, "MHLA + torch.compile")
        for stage in ("forward", "part: projections", "part: rest")
        if stage == "forward" or not name.endswith("compile")
    ]
    train = [replace(one, stage="training step") for one in op]
    stages = ("whole call", "part: denoising", "part: VAE")
    pipeline = [row(1.0, case="p", stage=stage, variant=name) for name in ("unpatched", "MHLA") for stage in stages]
    conditions = replace(gather_conditions(CPU), device=device)
    for command, rows in zip(COMMANDS, (op, scaling, transformer, train, pipeline), strict=True):
        write_run(Run(command, conditions, RATES, rows), folder)


def test_the_sparse_branch_is_drawn_beside_mhla_and_not_as_one():
    names = ("MHLA triton", "MHLA eager", CONTENT, f"{CONTENT} eager", "listed blocks alone FlexAttention")
    rows = [
        row(1.0 + place, variant=name) for place, name in enumerate((*names, "MHLA, exact tiles by content triton"))
    ]
    found = {name: one.median for name, one in fastest_by_group(rows).items()}
    assert found == {"MHLA": 1.0, CONTENT: 3.0, "listed blocks alone": 5.0, "MHLA, exact tiles": 6.0}
    assert len({colour_of(name) for name in found}) == 4


@pytest.mark.slow
def test_the_page_holds_every_figure_of_every_device(tmp_path):
    for device in ("Card A", "Card B"):
        write_results(tmp_path / device[-1], device)
    bench("report", tmp_path / "A", tmp_path / "B", "--output", tmp_path / "report")
    names = {name for figures in FIGURES.values() for name in figures}
    for device in ("card-a", "card-b"):
        files = list((tmp_path / "report" / device / "plots").iterdir())
        assert {file.name for file in files} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
        assert all(file.stat().st_size > 1000 for file in files)
    page = (tmp_path / "report" / "report.html").read_text()
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(images) == 2 * len(names) + 1
    assert all(ElementTree.fromstring(b64decode(image)).tag.endswith("svg") for image in images)
    assert not re.search(r'(src|href)="(?!data:)', page)
    for text in ("Card A", "Card B", "MHLA + torch.compile", torch.__version__):
        assert text in page
    with pytest.raises(OSError, match="holds no results"):
        bench("report", tmp_path / "report" / "card-a" / "plots")


@pytest.mark.slow
def test_all_measures_and_reports_everything(tmp_path):
    bench("all", "--tiny", "--device", "cpu", "--seconds", 0.001, "--output", tmp_path)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    for command in COMMANDS:
        saved = json.loads((folder / f"{command}.json").read_text())
        assert saved["command"] == command and any(one["status"] == "measured" for one in saved["rows"])
    assert (tmp_path / "report.html").stat().st_size > 10_000
