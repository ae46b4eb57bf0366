"""``mhla bench ceilings``: what is counted is what a forward of the model would count."""

import csv

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mhla_diffusers.benchmark.ceilings import ceilings
from mhla_diffusers.benchmark.models import build_transformer, find_models, make_forward_inputs
from mhla_diffusers.cli import app


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
