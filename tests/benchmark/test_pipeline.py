"""``mhla bench pipeline`` on the tiny pipelines."""

import pytest

from mhla_diffusers.benchmark.pipeline import PARTS, VARIANTS, WHOLE
from mhla_diffusers.benchmark.results import read_runs
from mhla_diffusers.demo.building import FAMILIES

from .commands import bench, medians


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_and_its_parts(tmp_path, family):
    options = ("--steps", 2, "--repetitions", 1, "--device", "cpu", "--output", tmp_path)
    bench("pipeline", "--model", f"tiny-{family}", *options)
    (run,) = read_runs([tmp_path])
    whole = medians(run, WHOLE)
    assert tuple(whole) == VARIANTS
    for variant in VARIANTS:
        parts = {row.stage: row.median for row in run.rows if row.variant == variant and row.stage != WHOLE}
        assert list(parts) == [f"part: {part}" for part in PARTS]
        assert sum(parts.values()) == pytest.approx(whole[variant])
        assert parts["part: denoising"] > 0 and parts["part: VAE"] > 0
        assert (parts["part: text encoding"] > 0) == (family != "dit")
    assert "num_inference_steps=2" in run.rows[0].case


def test_unknown_pipelines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'flux' has no tiny pipeline"):
        bench("pipeline", "--model", "tiny-flux", "--device", "cpu", "--output", tmp_path)
    with pytest.raises(ValueError, match="repetitions=0 must be positive"):
        bench("pipeline", "--repetitions", 0, "--device", "cpu", "--output", tmp_path)
    with pytest.raises(ValueError, match="height=64: a DiTPipeline takes no such argument"):
        bench("pipeline", "--size", 64, "--device", "cpu", "--output", tmp_path)
