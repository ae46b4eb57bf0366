"""``mhla bench transformer`` and ``mhla bench train`` on tiny configurations of the real classes."""

import pytest
import torch

from mhla_diffusers.benchmark.cases import LINEAR_KINDS, PATCHES, REST
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError
from mhla_diffusers.benchmark.parts import PARTS
from mhla_diffusers.benchmark.results import CONTENT, HYBRID, PLAIN, read_runs
from mhla_diffusers.benchmark.transformer import TRAINING_STEP
from mhla_diffusers.patching import layer

from .commands import measure, medians


@pytest.mark.parametrize(
    ("name", "own", "absent"),
    [("wan", "softmax native", "_flash_3"), ("sana", "own linear", "cudnn"), ("dit", "softmax native", "cudnn")],
)
def test_every_attention_has_a_row(tmp_path, name, own, absent):
    run = measure(tmp_path, "transformer", "--model", f"tiny-{name}")
    measured = medians(run)
    assert {own, "softmax native", *LINEAR_KINDS} <= set(measured)
    assert (CONTENT in measured) == (name != "sana")
    rows = {row.variant: row for row in run.rows if row.stage == "forward"}
    assert rows[own].baseline and not rows["MHLA"].baseline
    assert rows[f"softmax {absent}"].status == "absent" and rows[f"softmax {absent}"].reason
    assert rows["MHLA"].whole_seconds == rows["MHLA"].median
    assert 0 < rows[PLAIN].flops < rows["softmax native"].flops
    if CONTENT in rows:
        assert name != "wan" or rows["MHLA"].flops < rows[CONTENT].flops
        assert "chosen at every call" in rows[CONTENT].reason
    parts = {row.stage for row in run.rows if row.variant == "MHLA"} - {"forward"}
    assert parts == {f"part: {part}" for part in PARTS}


def test_fewer_layers_are_extrapolated(tmp_path):
    run = measure(tmp_path, "transformer", "--model", "tiny-dit", "--layers", 2)
    rows = {row.variant: row for row in run.rows if row.stage == "forward"}
    assert rows[REST.name].layers == 0 and rows[REST.name].whole_seconds is None
    mhla = rows["MHLA"]
    assert (mhla.layers, mhla.all_layers) == (2, 3)
    rest = rows[REST.name].median
    assert mhla.whole_seconds == pytest.approx(rest + (mhla.median - rest) * 3 / 2)
    assert "2 of 3 layers" in mhla.reason
    fastest = min(row.whole_seconds for row in rows.values() if row.baseline and row.whole_seconds)
    assert run.times_baseline(mhla) == pytest.approx(fastest / mhla.whole_seconds)
    assert run.times_baseline(rows[REST.name]) is None
    assert "multiple of 3" in rows[HYBRID].reason


def test_a_wrong_attention_is_not_timed(tmp_path, monkeypatch):
    right = layer.mhla_attention
    monkeypatch.setattr(layer, "mhla_attention", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(IncorrectAttentionError, match="MHLA layers.*Nothing was timed"):
        measure(tmp_path, "transformer", "--model", "tiny-dit")
    assert not list(tmp_path.rglob("*.json"))


def test_what_does_not_fit_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("mhla_diffusers.benchmark.transformer.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="Nothing was measured: .* is out of memory .*--layers"):
        measure(tmp_path, "transformer", "--model", "tiny-dit")
    ((row,),) = [run.rows for run in read_runs([tmp_path])]
    assert row.status == "out of memory" and "--layers" in row.reason


@pytest.mark.parametrize("options", [("tiny-dit",), ("tiny-dit", "--checkpointing", "--layers", 2)])
def test_a_step_of_every_attention(tmp_path, options):
    run = measure(tmp_path, "train", "--model", *options)
    measured = medians(run, TRAINING_STEP)
    assert {"softmax native", PLAIN, "MHLA", CONTENT} <= set(measured)
    assert (HYBRID in measured) == ("--layers" not in options)
    row = next(row for row in run.rows if row.variant == "MHLA")
    assert (row.whole_seconds == row.median) == ("--layers" not in options)


def test_weights_stay_as_they_are(tmp_path, monkeypatch):
    """Every repetition must do the same work, so a step moves nothing, but each weight has its gradient."""
    seen = []
    step = torch.optim.AdamW.step

    def watched(optimizer, *args):
        before = [weight.detach().clone() for group in optimizer.param_groups for weight in group["params"]]
        step(optimizer, *args)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        seen.append(sum(weight.grad is not None for weight in weights))
        assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    measure(tmp_path, "train", "--model", "tiny-dit", "--layers", 1)
    assert max(seen) > 10


def test_a_family_of_the_users_own_is_measured(tmp_path, auraflow):
    run = measure(tmp_path, "transformer", "--model", "tiny-auraflow", "--size", "64x96")
    assert {"softmax native", *PATCHES} <= set(medians(run))
    assert run.rows[0].tokens == 24
    run = measure(tmp_path / "op", "op", "--shape", "tiny-auraflow-64px", "--stage", "forward")
    assert {"MHLA eager", f"{CONTENT} eager"} <= set(medians(run))
