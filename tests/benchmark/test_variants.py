"""What ``mhla bench pipeline`` measures beside attentions: LoRA, quantised weights, step caches, numbers of steps."""

import re
from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn
from typer.testing import CliRunner

import mhla_diffusers as mhla
from mhla_diffusers import is_patched
from mhla_diffusers.benchmark.caches import CACHES, counted, parse_cache
from mhla_diffusers.benchmark.pipeline import WHOLE, frames_of, similarities
from mhla_diffusers.benchmark.results import CONTENT, read_runs
from mhla_diffusers.benchmark.variants import UNPATCHED, Additions, PipelineVariant, choose_pipeline
from mhla_diffusers.cli import app
from mhla_diffusers.patching import require_patched
from mhla_diffusers.patching.few_step_scheduler import FewSteps
from mhla_diffusers.tiny import load_tiny

from .commands import bench

STEPS = 3


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A folder with LoRA of tiny-wan that changes what it draws."""
    pipe, folder = load_tiny("wan"), tmp_path_factory.mktemp("lora")
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.save_lora_weights(folder, get_peft_model_state_dict(pipe.transformer))
    return str(folder)


def case_of(**more):
    settings = {"num_inference_steps": STEPS}
    return choose_pipeline("tiny-wan", torch.device("cpu"), torch.float32, 1, settings, **more)


@pytest.fixture(scope="module")
def plain():
    """The pipeline, and what it draws."""
    pipe = load_tiny("wan")
    pipe.set_progress_bar_config(disable=True)
    return pipe, frames_of(case_of().run(pipe, PipelineVariant()))


def test_every_attention_with_and_without_each():
    additions = Additions(("style",), (), ("firstblock", "magcache"), (4,))
    names = [variant.name for variant in additions.variants((UNPATCHED, "MHLA"))]
    beside = [
        *("", " + 4 steps", " + firstblock", " + firstblock + 4 steps", " + magcache", " + magcache + 4 steps"),
        *(" + style", " + style + 4 steps", " + style + firstblock", " + style + firstblock + 4 steps"),
        *(" + style + magcache", " + style + magcache + 4 steps"),
    ]
    assert names == [attention + added for attention in ("unpatched", "MHLA") for added in beside]
    assert [variant.is_plain for variant in additions.variants((UNPATCHED, "MHLA"))] == [True] + 23 * [False]


@pytest.mark.parametrize(
    ("variant", "computed", "changes"),
    [
        (PipelineVariant(), 2 * STEPS, False),
        (PipelineVariant(steps=1), 2, True),
        # two forwards per step, with the prompt and without; the first of each is always computed
        (PipelineVariant(cache="firstblock=100"), 2, True),
        (PipelineVariant(cache="firstblock=1e-9"), 2 * STEPS, False),
        # diffusers' TaylorSeer computes three steps before it extrapolates
        (PipelineVariant(cache="taylorseer", steps=5), 2 * 4, True),
        (PipelineVariant("MHLA", cache="taylorseer", steps=4), 2 * 3, True),
        # and MagCache a fifth of them, rounded, of which three are one
        (PipelineVariant(cache="magcache=100"), 2, True),
        (PipelineVariant(CONTENT), 2 * STEPS, True),
    ],
    ids=lambda one: one.name if isinstance(one, PipelineVariant) else None,
)
def test_a_variant_does_what_it_says_and_leaves_no_trace(plain, variant, computed, changes):
    pipe, expected = plain
    case, caches = case_of(), {}
    with case.applied(pipe, variant, caches), counted(pipe) as forwards:
        found = frames_of(case.run(pipe, variant))
        assert is_patched(pipe) == (variant.attention != UNPATCHED)
    assert sum(forwards) == computed
    assert torch.equal(found, expected) != changes
    with case.applied(pipe, variant, caches):
        assert torch.equal(frames_of(case.run(pipe, variant)), found)
    assert not is_patched(pipe) and not pipe.transformer.is_cache_enabled
    assert torch.equal(frames_of(case.run(pipe, PipelineVariant())), expected)


def test_lora_alone_and_under_a_patch(plain, lora):
    pipe, expected = plain
    case = case_of()
    for attention in (UNPATCHED, "tiny-wan-exact"):
        found = []
        for variant in (PipelineVariant(attention), PipelineVariant(attention, lora)):
            with case.applied(pipe, variant, {}):
                found.append(frames_of(case.run(pipe, variant)))
        assert not torch.equal(*found)
    assert torch.equal(frames_of(case.run(pipe, PipelineVariant())), expected)


def test_a_patch_of_few_steps_takes_its_own_number(plain, lora, tmp_path):
    """Also in a run whose plain pipeline takes another; rows of another number say why there are none."""
    pipe, expected = plain
    patched = mhla.apply_mhla(load_tiny("wan"), blocks=(3, 4, 4), sparse="none")
    require_patched(patched)["transformer"].sample_in(FewSteps((1.0, 0.5)), patched)
    folder, scheduler = str(mhla.save_mhla(patched, tmp_path)), pipe.scheduler
    case = case_of(patches=(folder,))
    # without guidance a step is one forward
    for variant in (PipelineVariant(folder), PipelineVariant(folder, lora)):
        with case.applied(pipe, variant, {}), counted(pipe) as forwards:
            case.run(pipe, variant)
        assert len(forwards) == 2
    other = PipelineVariant(folder, steps=STEPS)
    with pytest.raises(ValueError, match=f"num_inference_steps={STEPS}.*distilled to 2"), case.applied(pipe, other, {}):
        case.run(pipe, other)
    assert pipe.scheduler is scheduler
    assert torch.equal(frames_of(case.run(pipe, PipelineVariant())), expected)


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_quantised_weights_are_of_a_copy(plain, lora, name):
    pytest.importorskip("torchao")
    pipe, expected = plain
    case, original = case_of(), pipe.transformer
    for variant in (PipelineVariant(quantized=name), PipelineVariant("tiny-wan-exact", lora, name, "firstblock=100")):
        with case.applied(pipe, variant, {}):
            linears = {path: one for path, one in pipe.transformer.named_modules() if isinstance(one, nn.Linear)}
            found = frames_of(case.run(pipe, variant))
        changed = {path for path, one in linears.items() if type(one.weight) is not nn.Parameter}
        assert all(path.startswith("blocks.") for path in changed)
        assert not any("mhla" in path or "lora" in path for path in changed)
        assert len(changed) == 4 * 10  # four projections of both attentions, two of the feed-forward
        assert 0 < similarities(found, expected)["psnr"] < 100
        assert pipe.transformer is original
    assert torch.equal(frames_of(case.run(pipe, PipelineVariant())), expected)


def test_rows_of_the_command(tmp_path):
    rows = ("--steps", 2, "--steps", 2, "--patch", "MHLA", "--cache", "firstblock=9")
    bench("pipeline", "--model", "tiny-wan", *rows, "--repetitions", 1, "--device", "cpu", "--output", tmp_path)
    (run,) = read_runs([tmp_path])
    rows = {row.variant: row for row in run.rows if row.stage == WHOLE}
    assert list(rows) == ["unpatched", "unpatched + firstblock=9", "MHLA", "MHLA + firstblock=9"]
    assert [row.baseline for row in rows.values()] == [True] + 3 * [False]
    plain = rows.pop("unpatched")
    assert (plain.psnr, plain.ssim, plain.reason) == (100, pytest.approx(1), "")
    assert all(0 < row.psnr < 100 and row.ssim < 1 for row in rows.values())
    assert rows["unpatched + firstblock=9"].reason.startswith("2 of 4")
    assert all(row.psnr is None for row in run.rows if row.part is not None)


def test_a_frame_by_hand():
    """From [0, 1] to 8 bits, and the mean over frames: one equal, one that differs by 16 everywhere."""
    frames = torch.full((2, 12, 12, 3), 100 / 255)
    reference = frames_of(frames.numpy())
    assert reference.shape == (2, 3, 12, 12) and reference.unique().tolist() == [100]
    frames[1] += 16 / 255
    found = similarities(frames_of(frames.numpy()), reference)
    assert found["psnr"] == pytest.approx((100 + 24.0485) / 2, abs=1e-3)  # 20 log10(255 / 16)
    # flat frames differ in luminance alone: (2 · 100 · 116 + c) / (100² + 116² + c) with c = 6.5025
    assert found["ssim"] == pytest.approx((1 + 0.989091) / 2, abs=1e-4)
    assert list(similarities(reference[..., :10], reference[..., :10])) == ["psnr"]


@pytest.mark.parametrize("name", CACHES)
def test_caches_take_one_setting(name):
    assert parse_cache(name) == (name, CACHES[name])
    assert parse_cache(f"{name}=3") == (name, 3)
    for wrong in ("0", "-1", "few"):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            parse_cache(f"{name}={wrong}")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--cache", "teacache"], ValueError, "'teacache'.*firstblock, taylorseer, magcache"),
        (["--cache", "taylorseer=1.5"], ValueError, "1.5 must be a whole number"),
        (["--quantize", "int4"], ValueError, "'int4'.*int8, float8"),
        (["--lora", "somewhere"], ValueError, "'somewhere': DiTPipeline takes no LoRA"),
        (["--patch", "tiny-dit-exakt"], ValueError, "'tiny-dit-exakt'.*tiny-dit-exact"),
        (["--patch", "."], ValueError, r"'\.' holds no saved patch"),
        (["--model", "tiny-sana", "--patch", CONTENT], ValueError, "that of sana is linear"),
    ],
)
def test_what_cannot_be_added_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        bench("pipeline", *options, "--device", "cpu", "--output", tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_no_step_is_refused():
    for options in (["--steps", "0"], ["--steps", "3", "--steps", "0"]):
        found = CliRunner().invoke(app, ["bench", "pipeline", *options])
        assert found.exit_code == 2 and "steps" in found.output
    with pytest.raises(ValueError, match="steps=0"):
        Additions(steps=(0,))


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is there")
def test_quantising_without_torchao_names_the_extra():
    with pytest.raises(ImportError, match=r"torchao.*mhla_diffusers\[quantize\]"):
        Additions(quantized=("int8",))


def test_a_transformer_without_caches_gets_rows_with_the_reason(tmp_path):
    options = ("--steps", 1, "--repetitions", 1, "--patch", "MHLA", "--cache", "firstblock")
    bench("pipeline", "--model", "tiny-dit", *options, "--device", "cpu", "--output", tmp_path)
    (run,) = read_runs([tmp_path])
    reasons = {
        row.variant: (row.status, row.reason) for row in run.rows if row.stage == WHOLE and row.status != "measured"
    }
    assert list(reasons) == ["unpatched + firstblock", "MHLA + firstblock"]
    assert all(status == "absent" and "DiTTransformer2DModel" in reason for status, reason in reasons.values())
