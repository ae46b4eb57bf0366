"""``mhla bench pipeline`` on the tiny pipelines."""

import pytest
import torch

from mhla_diffusers import is_patched
from mhla_diffusers.benchmark.pipeline import UNPATCHED, frames_of, patched
from mhla_diffusers.config import NOTHING_DENSE, PROFILES
from mhla_diffusers.tiny import load_tiny, pipeline_folder

from .commands import bench, measure, medians, read_rows

SHORT = ("--model", "tiny-wan", "--set", "num_inference_steps=1", "--set", "num_frames=2", "--repetitions", 1)


@pytest.mark.parametrize(
    ("family", "model", "patches", "more"),
    [
        ("dit", str(pipeline_folder("dit")), (), ()),  # a folder is measured like the pipeline in it
        ("sana", "tiny-sana", ("tiny-sana-mhla",), ()),
        # patches are disabled in the first step
        ("wan", "tiny-wan", ("fast", "tiny-wan-sparse"), ("--change", "dense_first=0.5", "--change", "dense_last=0")),
    ],
)
def test_a_call_unpatched_and_patched(tmp_path, family, model, patches, more):
    asked = [word for name in patches for word in ("--patch", name)]
    short = ("--set", "num_inference_steps=2", "--repetitions", 1)
    rows = measure(tmp_path, "pipeline", "--model", model, *short, *asked, *more)
    assert tuple(medians(rows, "whole call")) == (UNPATCHED, *(patches or PROFILES))
    described = "num_inference_steps=2" + (", dense_first=0.5, dense_last=0" if more else "")
    assert {row.case for row in rows} == {f"{model}, {described}"}
    assert {row.variant for row in rows if row.baseline} == {UNPATCHED}
    similar = {row.variant: (row.psnr, row.ssim) for row in rows}
    if family != "dit":  # whose sampler draws noise of its own
        assert similar.pop(UNPATCHED) == (100, pytest.approx(1))
        assert all(0 < psnr < 100 and ssim < 1 for psnr, ssim in similar.values()), similar


def test_a_patch_is_put_on_and_leaves_no_trace():
    pipe = load_tiny("wan")
    weights = [weight.clone() for weight in pipe.transformer.parameters()]
    for name in ("fast", "tiny-wan-sparse", "wan2.1-t2v-1.3b"):
        with patched(pipe, name, {}):
            assert is_patched(pipe)
        assert not is_patched(pipe)
        assert all(map(torch.equal, pipe.transformer.parameters(), weights))


def test_a_profile_and_another_density(tmp_path):
    options = (*SHORT, "--patch", "fast", "--change", "dense_first=0", "--change")
    usual, listed = (measure(tmp_path / x, "pipeline", *options, f"density={x}") for x in ("0.025", "1"))
    assert {row.case for row in listed} == {"tiny-wan, num_inference_steps=1, num_frames=2, dense_first=0, density=1"}
    found = [next(row.psnr for row in rows if row.variant == "fast" and row.psnr) for rows in (usual, listed)]
    assert found[0] < 60 < found[1]  # at density 1 all is softmax attention, summed in another order


def test_prompts_and_a_patch_by_file_and_a_second_run_beside_the_first(tmp_path):
    prompts, patch = tmp_path / "prompts.txt", tmp_path / "own.yaml"
    prompts.write_text("a seven moving left\na three moving up\n")
    settings = {"density": 0.2, **NOTHING_DENSE}
    patch.write_text(f"family: wan\nbase_model: tiny-wan\ndescription: own\npatch: {settings}\n")
    options = (*SHORT, "--patch", patch, "--device", "cpu", "--output", tmp_path)
    bench("pipeline", *options, "--prompts", prompts)
    (first,) = tmp_path.glob("*/pipeline-*.csv")
    before = first.read_text()
    bench("pipeline", *options)
    assert first.read_text() == before
    rows, others = map(read_rows, sorted(tmp_path.glob("*/pipeline-*.csv")))
    call = "tiny-wan, num_inference_steps=1, num_frames=2"
    assert ({row.case for row in rows}, {row.case for row in others}) == ({f"{call}, 2 prompts"}, {call})
    assert [row.repetitions for row in rows if row.psnr] == [2, 2]


def test_a_frame_by_hand():
    """From [0, 1] to 8 bits."""
    found = frames_of(torch.full((2, 12, 10, 3), 100 / 255).numpy())
    assert found.shape == (2, 3, 12, 10) and found.unique().tolist() == [100]
