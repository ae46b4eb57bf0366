"""``mhla bench transformer``: models as data, variants that share weights, and their forwards."""

import json

import pytest
import torch

from mhla_diffusers import families, is_patched
from mhla_diffusers.benchmark.cases import choose_cases
from mhla_diffusers.benchmark.forward import COMPILED, HYBRID, forward_runs
from mhla_diffusers.benchmark.operator import MHLA, PLAIN, SOFTMAX, SPARSE
from mhla_diffusers.families import get_family, register_family
from mhla_diffusers.tiny import pipeline_folder

from ..families.cogview3plus import COGVIEW3PLUS
from .commands import measure, medians

CPU, META = torch.device("cpu"), torch.device("meta")


def a_case(name):
    return choose_cases(name)[0]


def test_tiny_wan_is_the_transformer_of_the_pipeline_of_this_name():
    """But for the length of its RoPE, which has no weights; its clips have as many tokens."""
    ships = json.loads((pipeline_folder("wan") / "transformer" / "config.json").read_text())
    case = a_case("tiny-wan")
    built = case.build(META, torch.float32).config
    built = {name: list(value) if isinstance(value, tuple) else value for name, value in built.items()}
    differ = {name for name, value in ships.items() if name[0] != "_" and built.get(name) != value}
    assert (differ, case.size, case.grid) == ({"rope_max_seq_len"}, "64x64x9", (9, 8, 8))


@pytest.mark.parametrize(
    ("name", "parameters", "tokens"),
    [("wan2.1-1.3b", 1.42e9, 32_760), ("sana-0.6b", 0.59e9, 256), ("dit-s-2", 33e6, 256)],
)
def test_configurations_are_those_of_the_real_models(name, parameters, tokens):
    case = a_case(name)
    transformer = case.build(META, torch.float32)
    inputs = case.inputs(transformer, torch.float32)
    # diffusers' DiT holds class and time embedders in every layer, which the published count does not
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == pytest.approx(parameters, rel=0.25 if "dit" in name else 0.02)
    grid = get_family(transformer).token_grid(transformer, inputs["hidden_states"])
    assert torch.Size(grid).numel() == tokens
    attn = next(iter(get_family(transformer).self_attentions(transformer).values()))
    assert (attn.heads, attn.inner_dim // attn.heads) == (case.model.heads, case.model.head_dim)


@torch.no_grad()
@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana"])
def test_variants_share_weights_and_compute_what_they_say(name):
    case = a_case(name)
    transformer = case.build(CPU, torch.float32)
    runs = forward_runs(case, transformer, case.inputs(transformer, torch.float32), compile=False)
    gpu_only = "softmax cudnn", "softmax efficient"
    outputs = {row.variant: run()[0] for row, run in runs.items() if row.variant not in gpu_only}
    copies = [runs[row].args[0] for row in runs if row.variant in outputs]
    expected = outputs["softmax native"]
    for (variant, found), changed in zip(outputs.items(), copies, strict=True):
        own = zip(changed.parameters(), transformer.parameters(), strict=False)
        assert is_patched(changed) or all(weight is other for weight, other in own)
        change = float((found - expected).norm() / expected.norm())
        if variant.startswith(SOFTMAX):
            assert change < 1e-4, variant
        if is_patched(changed):
            assert change > 1e-5, variant
    assert sum(map(is_patched, copies)) == (3 if name == "tiny-sana" else 4)
    assert (SPARSE in outputs) == (name != "tiny-sana") and not is_patched(transformer)
    if name == "tiny-sana":  # whose own attention is plain and linear
        own, plain = outputs["own linear"], outputs[PLAIN]
        assert (plain - own).norm() < 1e-3 * (expected - own).norm() + 1e-5 * own.norm()


@pytest.mark.slow
def test_compiled_layers_compute_the_same():
    case = a_case("tiny-dit")
    transformer = case.build(CPU, torch.float32)
    inputs = case.inputs(transformer, torch.float32)
    rows = forward_runs(case, transformer, inputs, compile=True)
    runs = {row.variant: run for row, run in rows.items()}
    with torch.no_grad():
        torch.testing.assert_close(runs[MHLA + COMPILED]()[0], runs[MHLA]()[0], rtol=1e-3, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "own"), [("wan", "softmax native"), ("sana", "own linear")])
def test_every_attention_has_a_row(tmp_path, name, own):
    rows = {row.variant: row for row in measure(tmp_path, "transformer", "--model", f"tiny-{name}")}
    measured = {name for name, row in rows.items() if row.median}
    assert {own, "softmax native", PLAIN, MHLA, HYBRID} <= measured and (SPARSE in measured) == (name != "sana")
    assert rows[own].baseline and not rows[MHLA].baseline
    assert rows["softmax cudnn"].reason and not rows["softmax cudnn"].median
    if name == "wan":
        assert 0 < rows[PLAIN].flops < rows[SPARSE].flops < rows["softmax native"].flops


def test_a_family_of_the_users_own_is_measured(tmp_path, monkeypatch):
    """It tells its models and what conditions them."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    register_family(COGVIEW3PLUS)
    rows = measure(tmp_path, "transformer", "--model", "tiny-cogview3plus", "--size", "64x96")
    assert {"softmax native", SPARSE} <= set(medians(rows)) and MHLA not in medians(rows)
    assert rows[0].tokens == 24
    rows = measure(tmp_path / "op", "op", "--model", "tiny-cogview3plus")
    assert {"MHLA eager", f"{SPARSE} eager"} <= set(medians(rows))
