"""``mhla bench pipeline`` on the tiny pipelines."""

import pytest

from mhla_diffusers.benchmark.pipeline import PARTS, WHOLE
from mhla_diffusers.benchmark.results import CONTENT, read_runs
from mhla_diffusers.tiny import TINY, pipeline_folder

from .commands import bench, medians

VARIANTS = ("unpatched", "plain linear", "MHLA", "MHLA hybrid 2/3")


@pytest.mark.parametrize(
    ("family", "model", "more"),
    [
        ("dit", str(pipeline_folder("dit")), ()),  # a folder is measured like the pipeline in it
        ("sana", "tiny-sana", ()),
        ("wan", "tiny-wan", ("--softmax-steps", "50%")),  # patches are disabled in the first step
    ],
)
def test_a_call_and_its_parts(tmp_path, family, model, more):
    options = ("--steps", 2, "--repetitions", 1, "--device", "cpu", "--output", tmp_path)
    bench("pipeline", "--model", model, *options, *more)
    (run,) = read_runs([tmp_path])
    whole = medians(run, WHOLE)
    assert tuple(whole) == (*VARIANTS, *(() if family == "sana" else (CONTENT,)))
    for variant in whole:
        parts = {row.stage: row.median for row in run.rows if row.variant == variant and row.stage != WHOLE}
        assert list(parts) == [f"part: {part}" for part in PARTS]
        assert sum(parts.values()) == pytest.approx(whole[variant])
        assert parts["part: denoising"] > 0 and parts["part: VAE"] > 0
        assert (parts["part: text encoding"] > 0) == (not TINY[family].prompts_are_classes)
    described = "num_inference_steps=2" + (", softmax_steps=0.5" if more else "")
    assert {(row.case, row.model) for row in run.rows} == {(f"{model}, {described}", model)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--model", "tiny-flux"], ValueError, "'flux' has no tiny pipeline"),
        (["--repetitions", 0], ValueError, "repetitions=0 must be positive"),
        (["--size", 64], ValueError, "'height' is no setting of a call of DiTPipeline"),
        (["--model", "."], OSError, r"model_index\.json is missing"),
        (["--softmax-steps", "many"], ValueError, "'many'.* a number such as 3"),
        (["--softmax-steps", "120%"], ValueError, "softmax_steps=1.2 must be"),
        # of sizes that no machine has the memory for, torch raises a RuntimeError before any attention
        (["--model", "tiny-sana", "--size", 2**24], ValueError, "tiny-sana fails with every variant: .*memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        bench("pipeline", *options, "--device", "cpu", "--output", tmp_path)
    assert not list(tmp_path.rglob("*.json"))
