"""``mhla bench pipeline`` on the tiny pipelines."""

import pytest

from mhla_diffusers.benchmark.pipeline import PARTS, WHOLE
from mhla_diffusers.benchmark.results import CONTENT, read_runs
from mhla_diffusers.tiny import TINY, pipeline_folder

from .commands import bench, medians

VARIANTS = ("unpatched", "plain linear", "MHLA", "MHLA hybrid 2/3")


@pytest.mark.parametrize("family", TINY)
def test_a_call_and_its_parts(tmp_path, family):
    options = ("--steps", 2, "--repetitions", 1, "--device", "cpu", "--output", tmp_path)
    bench("pipeline", "--model", f"tiny-{family}", *options)
    (run,) = read_runs([tmp_path])
    whole = medians(run, WHOLE)
    assert tuple(whole) == (*VARIANTS, *(() if family == "sana" else (CONTENT,)))
    for variant in whole:
        parts = {row.stage: row.median for row in run.rows if row.variant == variant and row.stage != WHOLE}
        assert list(parts) == [f"part: {part}" for part in PARTS]
        assert sum(parts.values()) == pytest.approx(whole[variant])
        assert parts["part: denoising"] > 0 and parts["part: VAE"] > 0
        assert (parts["part: text encoding"] > 0) == bool(TINY[family].text_marks)
    assert "num_inference_steps=2" in run.rows[0].case


def test_unknown_pipelines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'flux' has no tiny pipeline"):
        bench("pipeline", "--model", "tiny-flux", "--device", "cpu", "--output", tmp_path)
    with pytest.raises(ValueError, match="repetitions=0 must be positive"):
        bench("pipeline", "--repetitions", 0, "--device", "cpu", "--output", tmp_path)
    with pytest.raises(ValueError, match="'height' is no setting of a call of DiTPipeline"):
        bench("pipeline", "--size", 64, "--device", "cpu", "--output", tmp_path)
    with pytest.raises(OSError, match=r"no diffusers pipeline: model_index\.json is missing"):
        bench("pipeline", "--model", tmp_path, "--device", "cpu", "--output", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_call_that_fails_is_no_result(tmp_path):
    """Of sizes that no machine has the memory for, torch raises a RuntimeError before any attention."""
    with pytest.raises(ValueError, match="tiny-sana fails with every attention: .*memory"):
        bench("pipeline", "--model", "tiny-sana", "--size", 2**24, "--device", "cpu", "--output", tmp_path)


def test_a_folder_is_measured_like_the_pipeline_in_it(tmp_path):
    options = ("--steps", 1, "--repetitions", 1, "--device", "cpu", "--output", tmp_path)
    bench("pipeline", "--model", pipeline_folder("dit"), *options)
    (run,) = read_runs([tmp_path])
    assert tuple(medians(run, WHOLE)) == (*VARIANTS, CONTENT)
    assert run.rows[0].model == str(pipeline_folder("dit"))


def test_patches_are_disabled_in_the_first_steps(tmp_path):
    """The case says so, and with all steps disabled MHLA takes no part in the time."""
    options = ("--steps", 2, "--softmax-steps", "50%", "--repetitions", 1, "--device", "cpu", "--output", tmp_path)
    bench("pipeline", "--model", "tiny-wan", *options)
    (run,) = read_runs([tmp_path])
    assert {row.case for row in run.rows} == {"tiny-wan, num_inference_steps=2, softmax_steps=0.5"}
    assert set(medians(run, WHOLE)) == {*VARIANTS, CONTENT}
    for value, message in (("many", "write a number such as 3"), ("120%", "softmax_steps=1.2 must be")):
        with pytest.raises(ValueError, match=message):
            bench("pipeline", "--model", "tiny-wan", "--softmax-steps", value, "--device", "cpu", "--output", tmp_path)
