"""FLOPs counted from configurations: by part, with and without a patch, and what the pages say of them."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mhla_diffusers.benchmark.cases import Case, choose_cases, models
from mhla_diffusers.benchmark.counts import ATTENTION, PARTS, count_forward, count_parts
from mhla_diffusers.cli import app
from mhla_diffusers.config import MHLAConfig, SparseConfig
from mhla_diffusers.patching import apply_mhla

from ..models import small_case
from ..refusals import refused

ROOT = Path(__file__).parents[2]
META = torch.device("meta")


def info(*options):
    result = CliRunner().invoke(app, ["info", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-flux"])
def test_layers_are_extrapolated_exactly(name):
    (case,) = choose_cases([name], smallest=True)
    transformer = case.build(META, torch.bfloat16)
    whole = count_parts(transformer, case.inputs(transformer, torch.bfloat16))
    assert count_forward(case) == whole and all(whole[part] >= 0 for part in PARTS)


@pytest.mark.parametrize("config", [MHLAConfig(blocks=(7, 3, 5)), SparseConfig()], ids=["MHLA", "sparse"])
def test_counts_are_those_that_follow_from_sizes(config):
    """For Wan2.1-1.3B, the products of its layers, and costs of its attention as computed from sizes."""
    model = models()["wan2.1-1.3b"]
    case = Case(model, 480, 800, 81)  # which 7 x 3 x 5 blocks divide
    plain, patched = count_forward(case), count_forward(case, config)
    tokens, width = 31_500, model.heads * model.head_dim
    sizes = config.sizes_on(case.grid, model.heads, model.head_dim)
    assert plain[ATTENTION] == model.layers * sizes.softmax_flops
    assert patched[ATTENTION] == model.layers * sizes.flops
    assert plain["projections"] == patched["projections"] == model.layers * 4 * 2 * tokens * width**2
    assert plain["feed-forward"] == patched["feed-forward"] == model.layers * 2 * 2 * tokens * width * 8960
    half = count_forward(case, config.replace(layers=range(15)))
    assert half[ATTENTION] == (plain[ATTENTION] + patched[ATTENTION]) / 2


@pytest.mark.parametrize("name", ["wan2.1-1.3b", "flux-dev", "sd3.5-large", "qwen-image", "pixart-alpha-xl-2"])
def test_the_count_of_a_loaded_model_is_that_of_its_configuration(name):
    """By which ``apply_mhla`` says what a patch brings at most; without modulation, embeddings and the last layer."""
    case = choose_cases([name])[0]
    family, model, layer = case.family, case.build(META, torch.bfloat16), (case.model.heads, case.model.head_dim)
    softmax = SparseConfig().sizes_on(case.grid, *layer, family.extra_tokens).softmax_flops
    found = family.other_flops(model, case.grid) + len(family.self_attentions(model)) * softmax
    assert found == pytest.approx(sum(count_forward(case).values()), rel=0.002)


def test_blocks_that_do_not_fit_are_refused():
    with refused("(64, 64, 64)"):
        count_forward(Case(models()["wan2.1-1.3b"], 480, 800, 81), MHLAConfig(blocks=(64, 64, 64)))


def test_sizes_are_what_a_patched_model_computes():
    """Counted operator by operator, of whole blocks; sums of normalisers are no products, and count in sizes alone."""
    case = small_case(models()["tiny-wan"])
    config = case.family.complete({"blocks": case.model.blocks})
    patched = count_forward(case, change=lambda transformer: apply_mhla(transformer, config))
    assert sum(patched.values()) == pytest.approx(sum(count_forward(case, config).values()), rel=0.02)


def factors(name, *options):
    """What a patch brings at most, from the smallest size of a model on."""
    table = info("--model", name, *options).partition("by size\n")[2]
    return [float(line.split()[-1]) for line in table.splitlines()[1:]]


def test_a_patch_pays_at_large_sizes():
    found = factors("dit-xl-2")
    assert found == [0.94, 1.11, 1.46, 2.54, 4.6]
    assert not factors("dit-xl-2", "--size", "512"), "one size has no table"


def test_info_on_a_model():
    shown = info("--model", "wan2.1-1.3b", "--size", "720x1280", "--frames", "81")
    forward = factors("wan2.1-1.3b")[1]
    summary = " ".join(shown.split("\n\n")[0].split())
    assert "21x45x80 = 75,600 tokens" in summary and f"at most {forward}" in summary
    assert "works untrained" in summary and "1.25 PFLOP → 340 TFLOP" in summary
    assert "Self-attention is 84%" in shown and max(map(len, shown.splitlines())) <= 80
    assert info("--model", "dit-xl-2", "--density", "0.3") != info("--model", "dit-xl-2")
    assert info("--model", "dit-xl-2", "--patch", "faithful") == info("--model", "dit-xl-2")
    most = float(summary.partition("of 50 and in layer 0: a call at most ")[2])
    assert most == pytest.approx(50 / (14 + 36 / forward), abs=0.02)
    assert "dense in steps 1-3, 7, 11, 15, 18 of 18" in " ".join(
        info("--model", "dit-xl-2", "--dense-first", "3", "--dense-every", "4", "--steps", "18").split()
    )
    assert "density 2.5%" in info("--patch", "fast")
    assert "of mhla generate" in info("--model", "tiny-wan") and "of mhla generate" not in shown
    hybrid = info("--model", "wan2.1-1.3b", "--patch", "wan2.1-t2v-1.3b-hybrid")
    assert "in layers 2/3" in hybrid and "has to be adapted first" in hybrid and "sparse" not in hybrid


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        (("--model", "wan2.1-t2v-1.3b"), "'wan2.1-t2v-1.3b'"),
        (("--model", "wan2.1-1.3b", "--frames", "4097"), "wan2.1-1.3b...x4097"),
        (("--model", "dit-xl-2", "--patch", "sana-0.6b"), "'sana'...'dit'"),
        (("--model", "sana-0.6b", "--density", "0.1"), "density...MHLA"),
        (("--model", "dit-xl-2", "--dense-every", "1"), "dense_every=1"),
        (("--dense-every", "5"), "--dense-every 5"),
        (("--density", "0.1"), "--density 0.1"),
        (("--model", "dit-xl-2", "--report"), "--report...--model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, offending):
    with refused(offending):
        info(*options)
