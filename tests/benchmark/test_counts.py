"""FLOPs counted from configurations, with and without a patch, and what ``mhla info`` says of them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mhla_diffusers.benchmark.cases import Case, choose_cases, models
from mhla_diffusers.cli import app
from mhla_diffusers.config import MHLAConfig, SparseConfig
from mhla_diffusers.patching import apply_mhla

from ..models import small_case
from ..refusals import refused

META = torch.device("meta")


def info(*options):
    return CliRunner().invoke(app, ["info", *options], catch_exceptions=False).output


def counted(case, change=lambda transformer: None):
    """FLOPs of a forward, operator by operator, on the meta device."""
    transformer = case.build(META, torch.bfloat16)
    change(transformer)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        transformer(**case.inputs(transformer, torch.bfloat16))
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "flux-dev", "sd3.5-large", "pixart-alpha-xl-2", "sana-1.6b"])
def test_the_flops_of_a_forward_are_those_that_pytorch_counts(name):
    """Without embeddings, modulation and the last layer."""
    case = choose_cases(name)[0]
    assert sum(case.flops().values()) == pytest.approx(counted(case), rel=0.008)


def test_what_a_patch_changes_is_what_pytorch_counts():
    """The blocks are whole. PyTorch counts only products, so it misses the sums of the normalisers."""
    case = small_case(models()["tiny-wan"])
    config = case.family.complete({"blocks": case.model.blocks})
    others = counted(case) - sum(case.flops().values())
    found = others + sum(case.flops(config).values())
    assert found == pytest.approx(counted(case, lambda one: apply_mhla(one, config)), rel=0.02)


@pytest.mark.parametrize("config", [MHLAConfig(blocks=(7, 3, 5)), SparseConfig(dense_layers=1)], ids=["MHLA", "sparse"])
def test_a_patch_counts_in_the_layers_that_it_replaces(config):
    """For Wan2.1-1.3B, whose first layer stays dense under sparse attention."""
    model = models()["wan2.1-1.3b"]
    case = Case(model, 480, 800, 81)  # which 7 x 3 x 5 blocks divide
    plain, patched = case.flops(), case.flops(config)
    sizes = config.sizes_on(case.grid, model.heads, model.head_dim)
    dense = getattr(config, "dense_layers", 0)
    assert plain["self-attention"] == model.layers * sizes.softmax_flops
    assert patched["self-attention"] == dense * sizes.softmax_flops + (model.layers - dense) * sizes.flops
    assert {**plain, "self-attention": 0} == {**patched, "self-attention": 0}
    with refused("(64, 64, 64)"):
        case.flops(MHLAConfig(blocks=(64, 64, 64)))


def factors(name, *options):
    """What a patch brings at most, from the smallest size of a model on."""
    table = info("--model", name, *options).partition("by size\n")[2]
    return [float(line.split()[-1]) for line in table.splitlines()[1:]]


def test_info_on_a_model():
    shown = info("--model", "wan2.1-1.3b", "--size", "720x1280", "--frames", "81")
    assert factors("dit-xl-2") == [0.94, 1.11, 1.44, 2.41, 4.08], "it pays at large sizes"
    forward = factors("wan2.1-1.3b")[1]
    summary = " ".join(shown.split("\n\n")[0].split())
    assert "21x45x80 = 75,600 tokens" in summary and f"at most {forward}" in summary
    assert "works untrained" in summary and "1.25 PFLOP → 371 TFLOP" in summary
    assert shown.split()[-2] == "84%" and max(map(len, shown.splitlines())) <= 80
    assert info("--model", "dit-xl-2", "--change", "density=0.3") != info("--model", "dit-xl-2")
    assert info("--model", "dit-xl-2", "--patch", "faithful") == info("--model", "dit-xl-2")
    most = float(summary.partition("of 50 and in layer 0: a call is at most ")[2].split()[0])
    assert most == pytest.approx(50 / (14 + 36 / forward), abs=0.02)
    assert "dense in steps 1-3, 7, 11, 15, 18 of 18" in " ".join(
        info("--model", "dit-xl-2", "--change", "dense_first=3", "--change", "dense_every=4", "--steps", "18").split()
    )
    assert "density 2.5%" in info("--patch", "fast")
    hybrid = info("--model", "wan2.1-1.3b", "--patch", "wan2.1-t2v-1.3b-hybrid")
    assert "in layers 2/3" in hybrid and "has to be adapted first" in hybrid and "sparse" not in hybrid


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (("--model", "wan2.1-t2v-1.3b"), "'wan2.1-t2v-1.3b'"),
        (("--model", "dit-xl-2", "--patch", "sana-0.6b"), "'sana'...'dit'"),
        (("--model", "sana-0.6b", "--change", "density=0.1"), "MHLA has no density"),
        (("--change", "density=0.1"), "--change needs --model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, offending):
    with refused(offending):
        info(*options)
