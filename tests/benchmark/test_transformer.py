"""``mhla bench transformer`` and ``mhla bench train`` on tiny configurations of the real classes."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from mhla_diffusers import MHLAConfig, is_patched
from mhla_diffusers.benchmark import shapes
from mhla_diffusers.benchmark.cases import LINEAR_KINDS, PATCHES, REST, Case, Choice, attention_choices, content_note
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError
from mhla_diffusers.benchmark.forecast import count_forwards
from mhla_diffusers.benchmark.models import (
    Size,
    build_transformer,
    choose_sizes,
    find_models,
    make_forward_inputs,
    models,
    small_size,
)
from mhla_diffusers.benchmark.parts import PARTS
from mhla_diffusers.benchmark.results import CONTENT, HYBRID, PLAIN, read_runs
from mhla_diffusers.benchmark.timing import Absent
from mhla_diffusers.benchmark.transformer import TRAINING_STEP
from mhla_diffusers.families import get_family
from mhla_diffusers.patching import layer
from mhla_diffusers.tiny import pipeline_folder

from .commands import bench, measure, medians
from .compare_forecast import asked

CPU, META = torch.device("cpu"), torch.device("meta")
MHLA = Choice("MHLA", "MHLA")


def a_case(name, layers=None):
    model = models()[name]
    return Case(model, choose_sizes(model, None, None, "cpu")[0], layers, CPU, torch.float32)


def on_meta(name, size=None, batch=1, dtype=torch.float32):
    """Model, transformer and inputs of its forward, at its smallest size."""
    (model,) = find_models([name], "cpu")
    chosen = choose_sizes(model, size, None, "cpu", batch)[0]
    transformer = build_transformer(model, chosen, None, META, dtype)
    return model, transformer, make_forward_inputs(model, transformer, chosen, META, dtype)


def choices_of(case, transformer):
    grid = get_family(transformer).token_grid(transformer, case.inputs(transformer)["hidden_states"])
    return attention_choices(get_family(transformer), case.model, case.all_layers, grid, 1, CPU)


def output(case, candidate):
    torch.manual_seed(0)
    return candidate.run(case.inputs(candidate.model))()[0]


# ---- models and sizes


def test_a_gpu_gets_every_real_model_and_a_cpu_the_smallest():
    real = {model.name for model in find_models(None, "cuda")}
    assert real == {"wan2.1-1.3b", "wan2.1-14b", "sana-0.6b", "sana-1.6b", "dit-s-2", "dit-xl-2"}
    assert models().keys() > real | {"tiny-wan", "tiny-sana", "tiny-dit", "flux-dev"}
    assert [model.name for model in find_models(None, "cpu")] == ["dit-s-2"]


def test_inputs_are_of_the_types_and_sizes_that_the_model_takes():
    """PixArt-α's text has a mask of integers, and at 1024 px it is told the size of the picture."""
    _, _, inputs = on_meta("tiny-pixart", ["1024"], batch=3, dtype=torch.bfloat16)
    text, mask = inputs["encoder_hidden_states"], inputs["encoder_attention_mask"]
    assert (text.shape, text.dtype) == ((3, 120, 32), torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((3, 120), torch.int64)
    assert inputs["added_cond_kwargs"]["resolution"].shape == (3, 2)


def test_tiny_wan_is_the_transformer_of_the_pipeline_of_this_name():
    """But for the length of its RoPE, which has no weights."""
    ships = json.loads((pipeline_folder("wan") / "transformer" / "config.json").read_text())
    model = models()["tiny-wan"]
    built = build_transformer(model, small_size(model), None, META, torch.float32).config
    built = {name: list(value) if isinstance(value, tuple) else value for name, value in built.items()}
    differ = {name for name, value in ships.items() if name[0] != "_" and built.get(name) != value}
    assert differ == {"rope_max_seq_len"} and (model.layers, model.heads, model.head_dim) == (4, 3, 32)


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana", "tiny-dit"])
def test_the_small_size_has_two_tokens_per_block_and_axis(name):
    model, transformer, _ = on_meta(name)
    latents = make_forward_inputs(model, transformer, small_size(model), META, torch.float32)["hidden_states"]
    assert get_family(transformer).token_grid(transformer, latents) == tuple(2 * count for count in model.blocks)


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
    model, transformer, inputs = on_meta(name)
    # diffusers' DiT holds class and time embedders in every layer, which the published count does not
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == pytest.approx(parameters, rel=0.25 if "dit" in name else 0.02)
    grid = get_family(transformer).token_grid(transformer, inputs["hidden_states"])
    assert torch.Size(grid).numel() == tokens
    attn = next(iter(get_family(transformer).self_attentions(transformer).values()))
    assert (attn.heads, attn.inner_dim // attn.heads) == (model.heads, model.head_dim)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("wan",), "Unknown model 'wan'; the nearest names are wan2.1-1.3b"),
        (("tiny-wan", "--size", "480x850"), "width=850 is not divisible by 16 .*848 and 864"),
        (("sana-0.6b", "--size", "500"), "height=500 is not divisible by 32 .*480 and 512"),
        (("tiny-dit", "--size", "64x80"), "square images only; got 64x80"),
        (("tiny-wan", "--frames", "80"), "frames=80 .*77 and 81"),
        (("tiny-dit", "--size", "big"), "size='big' is unknown; write HEIGHTxWIDTH"),
        (("tiny-dit", "--layers", "9"), "layers=9 must be from 1 to 3"),
        (("tiny-dit", "--layers", "0"), "layers=0 must be from 1 to 3"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_measured(tmp_path, capsys, options, message):
    with pytest.raises(ValueError, match=message):
        bench("transformer", "--device", "cpu", "--model", *options, "--output", tmp_path)
    assert capsys.readouterr().out == ""


# ---- the self-attentions that a transformer is measured with


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana", "tiny-dit"])
def test_candidates_share_weights_and_compute_what_they_say(name):
    case = a_case(name)
    transformer = case.build()
    expected = output(case, case.candidate(transformer, Choice("softmax native", "softmax")))
    choices = choices_of(case, transformer)
    for choice in choices:
        candidate = case.candidate(transformer, choice)
        if choice.absent is not None:
            assert candidate.model is None and candidate.run({}) == Absent(choice.absent)
            continue
        own = zip(candidate.model.parameters(), transformer.parameters(), strict=False)
        assert is_patched(candidate.model) or all(one is other for one, other in own)
        change = float((output(case, candidate) - expected).norm() / expected.norm())
        if choice.kind == "softmax":
            assert change < 1e-4, choice
        if choice.kind in PATCHES:
            is_softmax = "100.0% of the pairs" in choice.note  # of a grid of one block
            assert is_patched(candidate.model) and (change > 1e-5) != is_softmax, choice
    sparse = [choice for choice in choices if choice.kind == CONTENT]
    assert len(sparse) == (name != "tiny-sana") and all("chosen at every call" in choice.note for choice in sparse)
    assert not is_patched(transformer)
    assert _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE


def test_plain_linear_attention_is_what_sana_has():
    case = a_case("tiny-sana")
    transformer = case.build()
    choices = [Choice(kind, kind) for kind in ("own", "plain linear", "softmax")]
    own, plain, softmax = (output(case, case.candidate(transformer, choice)) for choice in choices)
    assert (plain - own).norm() < 1e-3 * (softmax - own).norm() + 1e-5 * own.norm()


def test_samples_of_a_batch_do_not_attend_to_each_other(monkeypatch):
    """So what weights of softmax need grows with their number, and not with its square."""
    monkeypatch.setattr(shapes, "free_bytes", lambda device: 10 * 2 * 4 * 2 * 64**2)
    case = replace(a_case("tiny-pooled-vit", layers=1), size=Size(32, 32, None, batch=10))
    (choice,) = case.count(["softmax math"]).choices
    assert choice.absent is None


def test_the_note_tells_the_density_that_there_is():
    config = MHLAConfig((2, 2), sparse="content")
    assert content_note(config, (64, 64)).startswith("4.7% of the pairs of 64 blocks of 64 tokens")
    assert content_note(config, (8, 16)).startswith("50.0% of the pairs of 2 ")


@pytest.mark.slow
def test_compiled_layers_compute_the_same():
    case = a_case("tiny-dit", layers=1)
    transformer = case.build()
    expected = output(case, case.candidate(transformer, MHLA))
    compiled = case.candidate(transformer, MHLA, compiled=True)
    assert compiled.name == "MHLA + torch.compile"
    torch.testing.assert_close(output(case, compiled), expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()
    flash = case.candidate(transformer, Choice("softmax flash", "softmax", backend="flash"), compiled=True)
    assert flash.run({}) == Absent("torch.compile chooses PyTorch's backend itself")


# ---- measured


@cache
def two_layers(folder, name):
    return measure(folder, "transformer", "--model", f"tiny-{name}", "--layers", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("measured")


@pytest.mark.parametrize(
    ("name", "own", "absent", "all_layers"),
    [
        ("wan", "softmax native", "_flash_3", 4),
        ("sana", "own linear", "cudnn", 3),
        ("dit", "softmax native", "cudnn", 3),
    ],
)
def test_every_attention_has_a_row(folder, name, own, absent, all_layers):
    """Of two layers, whose times tell those of all."""
    run = two_layers(folder / name, name)
    measured = medians(run)
    assert {own, "softmax native", PLAIN, "MHLA"} <= set(measured) and (CONTENT in measured) == (name != "sana")
    rows = {row.variant: row for row in run.rows if row.stage == "forward"}
    mhla, rest = rows["MHLA"], rows[REST.name]
    assert rows[own].baseline and not mhla.baseline
    assert rows[f"softmax {absent}"].status == "absent" and rows[f"softmax {absent}"].reason
    assert "multiple of 3" in rows[HYBRID].reason
    assert 0 < rows[PLAIN].flops < rows["softmax native"].flops
    if CONTENT in rows:
        assert name != "wan" or mhla.flops < rows[CONTENT].flops
        assert "chosen at every call" in rows[CONTENT].reason
    parts = {row.stage for row in run.rows if row.variant == "MHLA"} - {"forward"}
    assert parts == {f"part: {part}" for part in PARTS}
    assert rest.layers == 0 and rest.whole_seconds is None and run.times_baseline(rest) is None
    assert (mhla.layers, mhla.all_layers) == (2, all_layers) and f"2 of {all_layers} layers" in mhla.reason
    assert mhla.whole_seconds == pytest.approx(rest.median + (mhla.median - rest.median) * all_layers / 2)
    fastest = min(row.whole_seconds for row in rows.values() if row.baseline and row.whole_seconds)
    assert run.times_baseline(mhla) == pytest.approx(fastest / mhla.whole_seconds)


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_rows_count_what_a_forecast_counts(folder, name):
    run = two_layers(folder / name, name)
    size = Size(*(getattr(run.rows[0], side) for side in ("height", "width", "frames")))
    own = next(row.variant for row in run.rows if row.baseline and row.median)
    for kind in ["MHLA", *([CONTENT] if name != "sana" else [])]:
        counts = count_forwards(asked(models()[f"tiny-{name}"], size, kind), torch.float32, layers=2)
        for variant, costs in zip((own, kind), counts, strict=True):
            rows = {row.part: row for row in run.rows if row.variant == variant}
            for part in PARTS:
                assert (rows[part].flops or 0, rows[part].bytes or 0) == (costs[part].flops, costs[part].bytes)
            assert rows[None].flops == sum(cost.flops for cost in costs.values())


@pytest.mark.parametrize("command", ["transformer", "train"])
def test_a_wrong_attention_is_not_timed(tmp_path, monkeypatch, command):
    right = layer.attend
    monkeypatch.setattr(layer, "attend", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(IncorrectAttentionError, match="MHLA layers.*Nothing was timed"):
        measure(tmp_path, command, "--model", "tiny-dit")
    assert not list(tmp_path.rglob("*.json"))


def test_what_does_not_fit_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("mhla_diffusers.benchmark.transformer.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="Nothing was measured: .* is out of memory .*--layers"):
        measure(tmp_path, "transformer", "--model", "tiny-dit")
    ((row,),) = [run.rows for run in read_runs([tmp_path])]
    assert row.status == "out of memory" and "--layers" in row.reason


@pytest.mark.parametrize("options", [("tiny-dit",), ("tiny-dit", "--checkpointing", "--layers", 2)])
def test_a_step_of_every_attention(tmp_path, monkeypatch, options):
    """Every repetition must do the same work, so a step moves nothing, but each weight has its gradient."""
    seen, step = [], torch.optim.AdamW.step

    def watched(optimizer, *args):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        step(optimizer, *args)
        seen.append(sum(weight.grad is not None for weight in weights))
        assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    run = measure(tmp_path, "train", "--model", *options)
    assert max(seen) > 10
    measured = medians(run, TRAINING_STEP)
    assert {"softmax native", PLAIN, "MHLA", CONTENT} <= set(measured)
    assert (HYBRID in measured) == ("--layers" not in options)
    row = next(row for row in run.rows if row.variant == "MHLA")
    assert (row.whole_seconds == row.median) == ("--layers" not in options)


def test_a_family_of_the_users_own_is_measured(tmp_path, cogview3plus):
    """It tells its models and what conditions them."""
    _, _, inputs = on_meta("tiny-cogview3plus", ["256"], batch=3, dtype=torch.bfloat16)
    text = inputs["encoder_hidden_states"]
    assert (text.shape, text.dtype) == ((3, 224, 32), torch.bfloat16)
    run = measure(tmp_path, "transformer", "--model", "tiny-cogview3plus", "--size", "64x96")
    assert {"softmax native", *LINEAR_KINDS, CONTENT} <= set(medians(run))
    assert run.rows[0].tokens == 24
    run = measure(tmp_path / "op", "op", "--shape", "tiny-cogview3plus-64px", "--stage", "forward")
    assert {"MHLA eager", f"{CONTENT} eager"} <= set(medians(run))
