"""``mhla bench ceilings``: what is counted is what a forward of the model would count."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mhla_diffusers.benchmark.ceilings import ceilings
from mhla_diffusers.benchmark.forecast_text import Options, forecast_text
from mhla_diffusers.benchmark.models import (
    build_transformer,
    family_of_model,
    find_models,
    make_forward_inputs,
    models,
)
from mhla_diffusers.cli import app
from mhla_diffusers.reporting import scaled


@pytest.mark.parametrize("name", ["tiny-dit", "tiny-flux"])
def test_a_forward_is_counted(name):
    (model,) = find_models([name], "cpu")
    (found,) = ceilings([model])
    meta = torch.device("meta")
    transformer = build_transformer(model, found.question.size, None, meta, torch.bfloat16)
    inputs = make_forward_inputs(model, transformer, found.question.size, meta, torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        transformer(**inputs)
    assert found.flops == counter.get_total_flops()
    assert found.attention_flops < found.flops
    assert found.ceiling == pytest.approx(found.flops / found.patched_flops)


def test_forecasts_count_the_same_patch():
    """Of the size at which they disagreed: the patch that ``apply_mhla(pipe)`` makes."""
    model = models()["wan2.1-1.3b"]
    (shown,) = [
        line
        for line in forecast_text(model.name, None, Options(steps=1, passes=1)).splitlines()
        if line[:9] == "denoising"
    ]
    (found,) = ceilings([replace(model, sizes=model.sizes[:1])])
    assert shown.split()[1:5] == [
        *scaled(found.flops, 1000, "").split(),
        *scaled(found.patched_flops, 1000, "").split(),
    ]


def test_it_pays_at_large_sizes_and_not_at_small_ones():
    found = ceilings(find_models(["flux-dev"], "cpu"))
    assert [one.question.size.height for one in found] == [1024, 2048, 4096]
    assert found[0].ceiling < 1.3 < found[1].ceiling < 2 < found[2].ceiling


def test_command(tmp_path):
    result = CliRunner().invoke(app, ["bench", "ceilings", "--model", "tiny-dit", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (row,) = csv.DictReader((tmp_path / "ceilings.csv").read_text().splitlines())
    assert row["model"] == "tiny-dit" and row["tokens"] == "16"
    assert "| tiny-dit | 64x64 |" in (tmp_path / "ceilings.md").read_text() and "tiny-dit" in result.output
    # a linear attention leaves nothing to save
    assert not ceilings(find_models(["sana-0.6b"], "cpu"))


def test_the_page_of_models_tells_what_is_counted():
    """Its table is the file that the command has written; of one model it is counted anew."""
    root = Path(__file__).parents[2]
    table = (root / "assets/models/ceilings.md").read_text().rstrip()
    assert table in (root / "docs/models.md").read_text()
    for found in ceilings(find_models(["sd3.5-large"], "cpu")):
        assert f"| {' | '.join(found.cells())} |" in table
    named = {row.split(" | ")[0].strip("| ") for row in table.splitlines()[2:]}
    softmax = {model.name for model in models().values() if family_of_model(model).own_attention == "softmax"}
    assert named == {name for name in softmax if not name.startswith("tiny")}
