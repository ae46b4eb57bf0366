"""``mhla bench all`` and ``mhla bench report``."""

import json
import re
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.benchmark.report import FIGURES, colour_of, fastest_by_group
from mhla_diffusers.benchmark.results import COMMANDS, CONTENT, Rates, Run, gather_conditions, make_row, write_run
from mhla_diffusers.benchmark.timing import Outcome, Timing

from .commands import bench

RATES = Rates(1e12, "float32", 1e10)


def write_results(folder, device):
    """A run of every command with every figure's rows, as a machine might have measured them."""
    conditions = replace(gather_conditions(torch.device("cpu")), device=device)

    def row(seconds, **what):
        stage = {"stage": "forward", "dtype": "float32", "baseline": what["variant"].startswith("softmax")} | what
        outcome = Outcome("measured", Timing(seconds, seconds, seconds, 3), peak_bytes=2**30)
        return make_row(outcome, RATES, whole_seconds=seconds, **stage)

    op = [row(2.0, case="a", variant="softmax flash"), row(0.1, case="a", variant="MHLA eager", blocks=4)]
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
            **stage,
        )
        for side in (16, 32)
        for frames in (5, 9)
        for name in ("softmax native", "MHLA", CONTENT, "MHLA + torch.compile")
        for stage in ({}, {"stage": "part: projections"}, {"stage": "part: rest"})
        if not (stage and name.endswith("compile"))
    ]
    train = [replace(one, stage="training step") for one in op]
    pipeline = [
        row(1.0, case="p", stage=stage, variant=name)
        for name in ("unpatched", "MHLA")
        for stage in ("whole call", "part: denoising", "part: VAE")
    ]
    for command, rows in zip(COMMANDS, (op, scaling, transformer, train, pipeline), strict=True):
        write_run(Run(command, conditions, RATES, rows), folder)


def test_the_sparse_branch_is_drawn_beside_mhla_and_not_as_one():
    def row(variant, seconds):
        outcome = Outcome("measured", Timing(seconds, seconds, seconds, 3))
        return make_row(
            outcome, RATES, case="a", stage="forward", variant=variant, baseline=False, dtype="float32", tokens=1
        )

    rows = [row("MHLA triton", 1.0), row("MHLA eager", 2.0), row(f"{CONTENT} eager", 3.0), row(CONTENT, 2.5)]
    rows += [row("listed blocks alone FlexAttention", 4.0), row("MHLA, exact tiles by content triton", 5.0)]
    found = {name: one.median for name, one in fastest_by_group(rows).items()}
    assert found == {"MHLA": 1.0, CONTENT: 2.5, "MHLA, exact tiles": 5.0, "listed blocks alone": 4.0}
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


@pytest.mark.slow
def test_all_measures_and_reports_everything(tmp_path):
    bench("all", "--tiny", "--device", "cpu", "--seconds", 0.001, "--output", tmp_path)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    for command in COMMANDS:
        saved = json.loads((folder / f"{command}.json").read_text())
        assert saved["command"] == command and any(row["status"] == "measured" for row in saved["rows"])
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(OSError, match="holds no results"):
        bench("report", tmp_path)
