"""``mhla bench op``."""

import pytest

from mhla_diffusers.benchmark import correctness
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError

from .commands import bench, measure, medians


def test_every_variant_has_a_row(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny")
    for stage in ("forward", "forward+backward"):
        measured = set(medians(run, stage))
        assert {"MHLA eager", "MHLA, near field eager", "plain linear eager", "softmax flash"} <= measured
    absent = {row.variant: row.reason for row in run.rows if row.status == "absent"}
    assert "GPUs only" in absent["softmax cudnn"]
    assert "--compile" in absent["MHLA torch.compile"]
    assert "run on CUDA and ROCm" in absent["MHLA triton"]
    fastest = min(row.median for row in run.rows if row.baseline and row.median and row.stage == "forward")
    row = run.rows[0]
    assert run.times_baseline(row) == pytest.approx(fastest / row.median)
    assert row.matmul_fraction == pytest.approx(row.flops / row.median / run.rates.matmul)


def test_one_stage_alone(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--stage", "forward")
    assert {row.stage for row in run.rows} == {"forward"}


@pytest.mark.slow
def test_torch_compile_is_timed_when_asked_for(tmp_path):
    assert "MHLA torch.compile" in medians(measure(tmp_path, "op", "--shape", "tiny", "--compile"))


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_wrong_attention_is_not_timed(monkeypatch, tmp_path, wrong):
    right = correctness.mhla_attention

    def attend(query, *args, **options):
        twice = 2 * query - query.detach()  # the right value and a doubled gradient
        return right(twice, *args, **options) if wrong == "gradient" else 1.1 * right(query, *args, **options)

    monkeypatch.setattr(correctness, "mhla_attention", attend)
    with pytest.raises(IncorrectAttentionError, match=f"{wrong} .*relative error .* Nothing was timed"):
        measure(tmp_path, "op", "--shape", "tiny")
    assert not list(tmp_path.rglob("*.json"))


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'wan'.*allowed: tiny, dit-xl-2-512px"):
        bench("op", "--shape", "wan", "--output", tmp_path)
    with pytest.raises(ValueError, match="'float8'.*bfloat16"):
        bench("op", "--dtype", "float8", "--output", tmp_path)
    with pytest.raises(ValueError, match=r"'backward'.*allowed: forward, forward\+backward"):
        bench("op", "--stage", "backward", "--output", tmp_path)
    with pytest.raises(ValueError, match="device='gpu' is unknown; torch sees here: cpu"):
        bench("op", "--device", "gpu", "--output", tmp_path)
