"""``mhla bench transformer`` on tiny configurations of the real classes."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from mhla_diffusers import is_patched, layer
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError
from mhla_diffusers.benchmark.models import GPU_MODELS, MODELS, build_transformer, choose_sizes, make_forward_inputs
from mhla_diffusers.benchmark.parts import PARTS
from mhla_diffusers.benchmark.transformer import REST, TransformerCase
from mhla_diffusers.benchmark.variants import (
    Choice,
    attention_choices,
    can_compile,
    compile_layers,
    make_context,
    make_variant,
)
from mhla_diffusers.families import get_family

from .commands import bench, measure, medians

CPU = torch.device("cpu")
LINEAR = {"plain linear", "MHLA", "MHLA hybrid 2/3"}


def a_case(name, layers=None):
    model = MODELS[name]
    return TransformerCase(model, choose_sizes(model, None, None, "cpu")[0], layers, CPU, torch.float32)


def output(case, transformer, choice):
    torch.manual_seed(0)
    with torch.no_grad(), make_context(transformer, choice)():
        return transformer(**case.inputs(transformer))[0]


@pytest.mark.parametrize(
    ("name", "own", "absent"),
    [("wan", "softmax native", "_flash_3"), ("sana", "own linear", "cudnn"), ("dit", "softmax native", "cudnn")],
)
def test_every_attention_has_a_row(tmp_path, name, own, absent):
    run = measure(tmp_path, "transformer", "--model", f"tiny-{name}")
    measured = medians(run)
    assert {own, "softmax native", *LINEAR} <= set(measured)
    rows = {row.variant: row for row in run.rows if row.stage == "forward"}
    assert rows[own].baseline and not rows["MHLA"].baseline
    assert rows[f"softmax {absent}"].status == "absent" and rows[f"softmax {absent}"].reason
    assert rows["MHLA"].whole_seconds == rows["MHLA"].median
    assert 0 < rows["plain linear"].flops < rows["softmax native"].flops
    parts = {row.stage for row in run.rows if row.variant == "MHLA"} - {"forward"}
    assert parts == {f"part: {part}" for part in PARTS}


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana", "tiny-dit"])
def test_variants_share_weights_and_compute_what_they_say(name):
    case = a_case(name)
    transformer = case.build()
    native = Choice("softmax native", "softmax", baseline=True)
    expected = output(case, make_variant(transformer, case.model, native), native)
    choices = [one for one in attention_choices(case.model, transformer, 4, CPU) if one.absent is None]
    for choice in choices:
        variant = make_variant(transformer, case.model, choice)
        assert all(
            parameter is own for parameter, own in zip(variant.parameters(), transformer.parameters(), strict=False)
        ) or is_patched(variant)
        found = output(case, variant, choice)
        change = float((found - expected).norm() / expected.norm())
        if choice.kind == "softmax":
            assert change < 1e-4, choice
        if choice.kind in LINEAR:
            assert is_patched(variant) and change > 1e-5, choice
    assert not is_patched(transformer)
    assert _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE


def test_plain_linear_attention_is_what_sana_has():
    case = a_case("tiny-sana")
    transformer = case.build()
    kinds = [Choice(kind, kind, baseline=False) for kind in ("own", "plain linear", "softmax")]
    own, plain, softmax = (output(case, make_variant(transformer, case.model, kind), kind) for kind in kinds)
    assert (plain - own).norm() < 1e-3 * (softmax - own).norm() + 1e-5 * own.norm()


def test_fewer_layers_are_extrapolated(tmp_path):
    run = measure(tmp_path, "transformer", "--model", "tiny-dit", "--layers", 2)
    rows = {row.variant: row for row in run.rows if row.stage == "forward"}
    assert rows[REST].layers == 0 and rows[REST].whole_seconds is None
    mhla = rows["MHLA"]
    assert (mhla.layers, mhla.all_layers) == (2, 3)
    rest = rows[REST].median
    assert mhla.whole_seconds == pytest.approx(rest + (mhla.median - rest) * 3 / 2)
    assert "2 of 3 layers" in mhla.reason
    fastest = min(row.whole_seconds for row in rows.values() if row.baseline and row.whole_seconds)
    assert run.times_baseline(mhla) == pytest.approx(fastest / mhla.whole_seconds)
    assert run.times_baseline(rows[REST]) is None
    assert "multiple of 3" in rows["MHLA hybrid 2/3"].reason


@pytest.mark.slow
def test_compiled_layers_compute_the_same():
    case, choice = a_case("tiny-dit", layers=1), Choice("MHLA", "MHLA", baseline=False)
    transformer = case.build()
    variant = make_variant(transformer, case.model, choice)
    expected = output(case, variant, choice)
    compile_layers(variant)
    torch.testing.assert_close(output(case, variant, choice), expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()


def test_pytorch_backends_are_not_compiled_apart():
    assert can_compile(Choice("softmax flash", "softmax", baseline=True, backend="flash")) is not None
    assert can_compile(Choice("MHLA", "MHLA", baseline=False)) is None


def test_a_wrong_attention_is_not_timed(tmp_path, monkeypatch):
    right = layer.mhla_attention
    monkeypatch.setattr(layer, "mhla_attention", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(IncorrectAttentionError, match="patched attention.*Nothing was timed"):
        measure(tmp_path, "transformer", "--model", "tiny-dit")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "wan"), "Unknown model 'wan'; allowed: wan2.1-1.3b"),
        (("--model", "tiny-wan", "--size", "480x850"), "width=850 is not divisible by 16 .*848 and 864"),
        (("--model", "sana-0.6b", "--size", "500"), "height=500 is not divisible by 32 .*480 and 512"),
        (("--model", "tiny-dit", "--size", "64x80"), "square images only; got 64x80"),
        (("--model", "tiny-wan", "--frames", "80"), "frames=80 .*77 and 81"),
        (("--model", "tiny-dit", "--size", "big"), "size='big' is unknown; write HEIGHTxWIDTH"),
        (("--model", "tiny-dit", "--layers", "9"), "layers=9 must be from 1 to 3"),
    ],
)
def test_wrong_sizes_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        bench("transformer", "--device", "cpu", *options, "--output", tmp_path)


def test_what_does_not_fit_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("mhla_diffusers.benchmark.transformer.free_bytes", lambda device: 1000)
    (row,) = measure(tmp_path, "transformer", "--model", "tiny-dit").rows
    assert row.status == "out of memory" and "--layers" in row.reason


@pytest.mark.parametrize(
    ("name", "parameters", "tokens"),
    [
        ("wan2.1-1.3b", 1.42e9, 32_760),
        ("wan2.1-14b", 14.3e9, 32_760),
        ("sana-0.6b", 0.59e9, 256),
        ("sana-1.6b", 1.6e9, 256),
        ("dit-s-2", 33e6, 256),
        ("dit-xl-2", 675e6, 256),
    ],
)
def test_configurations_are_those_of_the_real_models(name, parameters, tokens):
    assert name in GPU_MODELS
    case = a_case(name)
    meta = torch.device("meta")
    transformer = build_transformer(case.model, case.size, None, meta, torch.float32)
    # diffusers' DiT holds class and time embedders in every layer, which the published count does not
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == pytest.approx(parameters, rel=0.25 if "dit" in name else 0.02)
    inputs = make_forward_inputs(case.model, transformer, case.size, meta, torch.float32)
    grid = get_family(transformer).token_grid(transformer, inputs["hidden_states"])
    assert torch.Size(grid).numel() == tokens
