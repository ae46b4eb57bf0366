"""``mhla info --model``: counts, times, break-even, and what it says of them."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

from mhla_diffusers import apply_mhla
from mhla_diffusers.benchmark.candidates import CONTENT, PLAIN
from mhla_diffusers.benchmark.conditions import Rates, gather_conditions
from mhla_diffusers.benchmark.forecast import Question, count_forwards, forward_seconds, make_forecast
from mhla_diffusers.benchmark.forecast_text import Options, forecast_text
from mhla_diffusers.benchmark.models import Size, build_transformer, family_of_model, make_forward_inputs, models
from mhla_diffusers.benchmark.parts import ATTENTION, PARTS, count_parts
from mhla_diffusers.benchmark.results import PART, Run, make_row, write_run
from mhla_diffusers.benchmark.speeds import Pace, Speeds, least_seconds, measured_speeds, stated_speeds
from mhla_diffusers.benchmark.timing import Outcome, Timing
from mhla_diffusers.cli import app
from mhla_diffusers.config import MHLAConfig

from .commands import measure
from .compare_forecast import asked, compare, counted

RATES = Rates(1e11, "float32", 1e10)
REACHED = {"softmax native": 0.6, PLAIN: 0.3, "MHLA": 0.2, CONTENT: 0.4}
"""Variant → part of the rates that its self-attention reaches in made-up results; all other parts reach a half."""
TINY = {"wan": Size(128, 192, 9), "dit": Size(128, 128, None), "sana": Size(512, 512, None)}


def question(family="wan", size=None, *, kind=CONTENT, **more):
    return replace(asked(models()[f"tiny-{family}"], size or TINY[family], kind), **more)


def outcome(seconds):
    return Outcome("measured", Timing(seconds, seconds, seconds, 3))


@cache
def made_up(*sizes):
    """Results of a machine on which every part is as fast at every size."""
    rows = []
    for size in sizes:
        for variant, reached in REACHED.items():
            kind = CONTENT if variant == "softmax native" else variant
            counts = counted("tiny-wan", size, kind, "float32", 3)
            costs = counts.unpatched if variant == "softmax native" else counts.patched
            what = {
                "case": f"tiny-wan {size}",
                "model": "tiny-wan",
                "variant": variant,
                "dtype": "float32",
                "tokens": question(size=size).tokens,
                "layers": 3,
                "height": size.height,
                "width": size.width,
                "frames": size.frames,
            }
            seconds = {
                part: least_seconds(cost, RATES) / (reached if part == ATTENTION else 0.5)
                for part, cost in costs.items()
            }
            whole = outcome(sum(seconds.values()))
            rows.append(make_row(whole, RATES, stage="forward", baseline=variant == "softmax native", **what))
            for part, time in seconds.items():
                work = {"flops": costs[part].flops, "bytes": costs[part].bytes}
                rows.append(make_row(outcome(time), RATES, stage=PART + part, baseline=False, **work, **what))
    return Run("transformer", gather_conditions(torch.device("cpu")), RATES, rows)


@pytest.mark.slow
def test_forecasts_of_results_with_the_same_speeds_are_exact():
    held = list(compare(made_up(Size(64, 96, 9), Size(256, 192, 17))))
    assert {one.attention for one in held} > {PLAIN, "MHLA", CONTENT} and len(held) == 2 * 3 * 2
    assert [one.ratio for one in held] == pytest.approx([1] * len(held), rel=1e-3)  # lists are rounded to whole pairs


def test_speeds_are_those_of_the_nearest_size_of_the_model():
    run = made_up(Size(64, 96, 9), Size(256, 384, 9))
    assert "tiny-wan 256x384x9 and tiny-wan 64x96x9, 1,152 tokens" in (
        measured_speeds([run], models()["tiny-wan"], 900, CONTENT).source
    )
    assert (
        "tiny-wan 64x96x9 and tiny-wan 256x384x9, 72"
        in measured_speeds([run], models()["tiny-wan"], 80, CONTENT).source
    )
    assert "1,152 tokens, 6.56 times fewer than asked for (far: measure nearer)" in (
        measured_speeds([run], models()["tiny-wan"], 7560, CONTENT).source
    )
    others = [
        replace(row, case=row.case.replace("tiny-wan", "tiny-dit"), model="tiny-dit")
        for row in made_up(Size(128, 192, 9)).rows
    ]
    both = replace(run, rows=run.rows + others)
    assert "tiny-dit" in measured_speeds([both], models()["tiny-dit"], 900, CONTENT).source


def test_two_sizes_tell_what_a_forward_takes_whatever_its_size():
    """A millisecond more in every layer's self-attention, and two in the rest."""
    sizes = (Size(64, 96, 9), Size(128, 192, 9), Size(256, 192, 17))
    more = {PART + ATTENTION: 0.003, PART + "rest": 0.006}
    run = made_up(*sizes)
    slow = [
        replace(row, median=row.median + (sum(more.values()) if row.part is None else more.get(row.stage, 0.0)))
        for row in run.rows
    ]
    asked_about = f"tiny-wan {sizes[1]}"
    held = [one for one in compare(replace(run, rows=slow)) if one.asked == asked_about]
    assert [one.ratio for one in held] == pytest.approx([1] * len(held), rel=1e-3)
    known = [row for row in slow if row.case != asked_about]
    speeds = measured_speeds([replace(run, rows=known)], models()["tiny-wan"], 144, CONTENT)
    assert speeds.patched[ATTENTION].fixed == pytest.approx(0.001, rel=1e-2)
    assert speeds.unpatched["rest"].fixed == pytest.approx(0.002, rel=1e-2)
    assert "as measured at tiny-wan 64x96x9 and tiny-wan 256x192x17, 72 tokens" in speeds.source
    one_size = [row for row in slow if row.case == f"tiny-wan {sizes[0]}"]
    alone = measured_speeds([replace(run, rows=one_size)], models()["tiny-wan"], 144, CONTENT)
    assert not any(pace.fixed for pace in alone.patched.values())


def test_parts_share_out_the_time_of_the_whole_forward():
    """Which is timed in turns with the others, and more often."""
    run = made_up(Size(64, 96, 9))
    slow = [replace(row, median=3 * row.median) if row.part is None else row for row in run.rows]
    before, after = (
        measured_speeds([one], models()["tiny-wan"], 72, "MHLA").patched for one in (run, replace(run, rows=slow))
    )
    assert {part: 3 * pace.reached for part, pace in after.items()} == pytest.approx(
        {part: pace.reached for part, pace in before.items()}
    )


@pytest.mark.parametrize("family", TINY)
def test_counts_are_those_of_the_rows_that_are_timed(tmp_path, family):
    run = measure(tmp_path, "transformer", "--model", f"tiny-{family}", "--layers", 2)
    size = Size(*(getattr(run.rows[0], name) for name in ("height", "width", "frames")))
    kinds = ["MHLA", *([CONTENT] if family != "sana" else [])]
    for kind in kinds:
        counts = count_forwards(question(family, size, kind=kind), torch.float32, layers=2)
        own = next(row.variant for row in run.rows if row.baseline and row.median)
        for variant, costs in ((own, counts.unpatched), (kind, counts.patched)):
            rows = {row.part: row for row in run.rows if row.variant == variant}
            for part in PARTS:
                assert (rows[part].flops or 0, rows[part].bytes or 0) == (costs[part].flops, costs[part].bytes)
            assert rows[None].flops == sum(cost.flops for cost in costs.values())


@pytest.mark.parametrize("family", TINY)
def test_layers_are_extrapolated_exactly(family):
    whole = question(family, kind="MHLA")
    meta = torch.device("meta")
    transformer = build_transformer(whole.model, whole.size, None, meta, torch.float32)
    inputs = make_forward_inputs(whole.model, transformer, whole.size, meta, torch.float32)
    counts = count_forwards(whole, torch.float32)
    assert count_parts(transformer, inputs) == counts.unpatched
    assert count_parts(apply_mhla(transformer, whole.config), inputs) == counts.patched


def test_counts_of_wan_are_those_told_from_sizes():
    """31 500 tokens of 12 heads of 128 in 30 layers; 493 uniform blocks, of which 25 are listed, and 105 blocks."""
    model = models()["wan2.1-1.3b"]
    config = MHLAConfig(blocks=(7, 3, 5), sparse="content")
    counts = count_forwards(Question(model, Size(480, 800, 81), config), torch.bfloat16)
    tokens, width, layers = 31_500, 1536, 30
    softmax = layers * 4 * tokens**2 * width
    assert counts.unpatched[ATTENTION].flops == softmax
    far = layers * (4 * tokens + 2 * 105**2) * 129 * width
    assert counts.patched[ATTENTION].flops == pytest.approx(
        softmax * 25 / 493 + layers * 4 * tokens * 493 * width + far
    )
    assert (
        counts.unpatched["projections"].flops == counts.patched["projections"].flops == layers * 8 * tokens * width**2
    )
    assert counts.unpatched["feed-forward"].flops == layers * 4 * tokens * width * 8960
    assert counts.unpatched[ATTENTION].bytes == layers * 4 * tokens * width * 2
    weights = layers * 2 * (width**2 + width)
    assert counts.unpatched["projections"].bytes == 4 * (layers * 2 * 2 * tokens * width + weights)


def test_a_call_mixes_steps_and_layers():
    """A quarter of the layers and 3 of 10 steps are unpatched."""
    speeds = Speeds(RATES, {ATTENTION: Pace(0.5)}, {ATTENTION: Pace(0.1)}, "")
    whole = question(steps=10, passes=2)
    config = whole.config.replace(layers=(0, 1, 3), softmax_steps=0.25)
    found = make_forecast(replace(whole, config=config), torch.float32, speeds)
    one, other = forward_seconds(count_forwards(whole, torch.float32), speeds)
    for part in PARTS:
        assert found.unpatched_seconds[part] == pytest.approx(20 * one[part])
        expected = 2 * (3 * one[part] + 7 * (other[part] * 3 / 4 + one[part] / 4))
        assert found.patched_seconds[part] == pytest.approx(expected)
    everything = make_forecast(replace(whole, config=config.replace(softmax_steps=1.0)), torch.float32, speeds)
    assert everything.speed_up == 1 and everything.patched == everything.unpatched


@pytest.mark.slow
def test_from_the_break_even_size_on_the_patch_is_faster():
    speeds = Speeds(RATES, {ATTENTION: Pace(1.0)}, {ATTENTION: Pace(0.25)}, "")
    whole = question(size=Size(256, 384, 9), kind="MHLA")
    found = make_forecast(whole, torch.float32, speeds).break_even
    assert found.size.frames == 9 and (found.size.height, found.size.width) == (128, 192)

    def gains(rows):
        size = Size(16 * rows, 16 * round(rows * 24 / 16), 9)
        one, other = forward_seconds(count_forwards(replace(whole, size=size), torch.float32), speeds)
        return other[ATTENTION] < one[ATTENTION]

    rows = found.size.height // 16
    assert rows > 2
    assert [gains(number) for number in range(2, 2 * rows)] == [number >= rows for number in range(2, 2 * rows)]
    assert make_forecast(replace(whole, size=found.size), torch.float32, speeds).speed_up > 1


def test_nothing_is_gained_where_the_own_attention_is_linear():
    shown = forecast_text("tiny-sana", None, Options(matmul_rate=1e12, copy_rate=1e10))
    assert "unpatched: linear attention" in shown and "No gain at this size: self-attention is " in shown
    assert "At no size of this aspect ratio up to a million tokens is the patch faster." in shown
    assert "a bound and no measurement" in shown


def test_without_speeds_there_are_counts_and_no_time():
    shown = forecast_text("wan2.1-1.3b", None, Options(height=720, width=1280, frames=81, density=0.1))
    assert (
        "21x45x80 = 75,600 tokens" in shown
        and "softmax over 10.0% of all pairs in blocks of 64 chosen by content, in 30 of 30 layers" in shown
    )
    assert "time" not in shown.replace("No times", "") and "mhla bench transformer --model wan2.1-1.3b" in shown
    (attention,) = [line for line in shown.splitlines() if line.startswith("self-attention")]
    assert attention.split()[1:3] == ["105", "P"]  # 100 forwards of 30 times 35.1 TFLOP
    assert "Not in it: text encoder, VAE" in shown


def test_measured_speeds_give_times(tmp_path):
    file = write_run(made_up(Size(64, 96, 9)), tmp_path)
    shown = forecast_text("tiny-wan", None, Options(128, 192, 9, steps=4, passes=1, device=file))
    assert "4 steps, 1 forward each" in shown and "time unpatched" in shown
    assert "as measured at tiny-wan 64x96x9, 72 tokens, 4 times fewer than asked for, on" in shown
    assert "from about" in shown


def test_results_of_attentions_alone_bound_the_rest(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--stage", "forward")
    run = replace(run, rows=[replace(row, case="tiny-wan-small") for row in run.rows])  # which is named after a model
    speeds = measured_speeds([run], models()["tiny-wan"], 144, CONTENT)
    assert set(speeds.unpatched) == set(speeds.patched) == {ATTENTION}
    assert "of self-attention alone; all else is at the rates of the same file, a bound" in speeds.source


def test_results_without_what_is_needed_are_refused():
    run, model = made_up(Size(64, 96, 9)), models()["tiny-wan"]
    with pytest.raises(
        ValueError, match="results of mhla bench transformer or mhla bench op; these are of .* pipeline"
    ):
        measured_speeds([replace(run, command="pipeline")], model, 72, CONTENT)
    uncounted = [replace(row, flops=None, bytes=None) for row in run.rows]
    with pytest.raises(ValueError, match="no case with FLOPs .*Measure anew: mhla bench transformer --model tiny-wan"):
        measured_speeds([replace(run, rows=uncounted)], model, 72, CONTENT)
    patched = [row for row in run.rows if row.variant != "MHLA"]
    with pytest.raises(
        ValueError, match="of both 'MHLA' and of what it replaces.*; measured are softmax native, plain"
    ):
        measured_speeds([replace(run, rows=patched)], model, 72, "MHLA")


def test_measurements_of_another_model_tell_nothing():
    """Relatives that differ in layers and heads alone do, and are named."""
    run = made_up(Size(64, 96, 9))
    for name in ("wan2.1-1.3b", "tiny-dit"):
        message = f"for {name}, or for another .*measured are other models: tiny-wan. .* --model {name}"
        with pytest.raises(ValueError, match=message):
            measured_speeds([run], models()[name], 72, CONTENT)
    relative = replace(models()["tiny-wan"], name="tiny-wan-wide", heads=4, layers=7)
    assert "as measured at tiny-wan 64x96x9" in measured_speeds([run], relative, 72, CONTENT).source


REFUSED = {
    "half a size": (["--model", "tiny-wan", "--height", "64"], "--height 64 and --width None belong together"),
    "one rate": (["--model", "tiny-wan", "--copy-rate", "1e9"], "--matmul-rate and --copy-rate belong together"),
    "no rate": (["--model", "tiny-wan", "--copy-rate", "0", "--matmul-rate", "1"], "--copy-rate 0 must be positive"),
    "both": (
        ["--model", "tiny-wan", "--copy-rate", "1", "--matmul-rate", "1", "--device", "a.json"],
        "give one of both",
    ),
    "an unknown card": (["--model", "tiny-wan", "--device", "a100"], "no card whose times ship; those are nvidia-h100"),
    "a model that the card was not measured with": (
        ["--model", "flux-dev", "--device", "h100"],
        "no case with .* for flux-dev, or for another FluxTransformer2DModel.*mhla bench transformer --model flux-dev",
    ),
    "no file": (["--model", "tiny-wan", "--device", "cuda"], "--device cuda is no file and no card .* give the JSON"),
    "frames of an image": (["--model", "tiny-dit", "--frames", "9"], "tiny-dit makes images; leave it out"),
    "a size": (["--model", "tiny-wan", "--height", "65", "--width", "96"], "height=65.* near it are 64 and 80"),
    "frames": (["--model", "tiny-wan", "--frames", "8"], "frames=8.* near it are 5 and 9"),
    "no model": (
        ["--density", "0.1", "--steps", "3"],
        "--density, --steps belongs to a forecast: give --model as well",
    ),
    "a report": (["--report", "--model", "tiny-wan"], "--report and --model ask for different things"),
    "an unknown model": (
        ["--model", "wan"],
        "Unknown model 'wan'; the nearest names are wan2.1-1.3b, wan2.1-14b, .*n.$",
    ),
    "a misspelt model": (["--model", "flux-def"], "the nearest names are flux-dev"),
    "a preset": (["--model", "wan2.1-t2v-1.3b"], "is a preset, which --patch takes, and no model; .* are wan2.1-1.3b"),
    "no sparse branch": (["--model", "tiny-sana", "--density", "0.1"], "tiny-sana is linear.* leave it out"),
    "a density and a patch": (
        ["--model", "tiny-dit", "--density", "0.1", "--patch", "dit-xl-2-256"],
        "--density 0.1 and --patch both give",
    ),
    "another family": (["--model", "tiny-dit", "--patch", "sana-0.6b"], "for the 'sana' family, but tiny-dit belongs"),
    "too small for the patch": (
        ["--model", "tiny-wan", "--patch", "wan2.1-t2v-1.3b"],
        "frames axis of the token grid has 3 tokens, too few for 7 blocks",
    ),
    "no steps": (["--model", "tiny-dit", "--steps", "0"], "steps=0 must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_go_together_are_refused(case):
    options, message = REFUSED[case]
    result = CliRunner().invoke(app, ["info", *options])
    assert isinstance(result.exception, ValueError | OSError)
    with pytest.raises(type(result.exception), match=message):
        raise result.exception


def test_a_ready_patch_by_its_name():
    result = CliRunner().invoke(
        app, ["info", "--model", "wan2.1-1.3b", "--patch", "wan2.1-t2v-1.3b-hybrid", "--softmax-steps", "20%"]
    )
    assert result.exit_code == 0, result.output
    assert "MHLA of 7x3x5 blocks, in 20 of 30 layers" in result.output
    assert "50 steps, the first 10 of them unpatched, 2 forwards each" in result.output


def test_layers_that_are_chosen_by_measuring_are_counted_as_many():
    config = MHLAConfig(blocks=(1, 2, 2), layers="auto:2/3")
    assert "in 2 of 4 layers" in forecast_text("tiny-wan", ("wan", config), Options())


def test_stated_rates_are_a_roofline():
    """Of a model whose projections are bound by arithmetic at one pair of rates and by memory at another."""
    whole = question(kind="MHLA")
    counts = count_forwards(whole, torch.float32)
    for matmul, copy, bound in ((1.0, 1e30, "flops"), (1e30, 1.0, "bytes")):
        one, _ = forward_seconds(counts, stated_speeds(matmul, copy))
        assert one == pytest.approx({part: getattr(cost, bound) for part, cost in counts.unpatched.items()})


def test_every_real_model_has_a_forecast():
    for name, model in models().items():
        family = family_of_model(model)
        if not model.is_tiny and family.is_diffusion:
            shown = forecast_text(name, None, Options())
            assert f"unpatched: {family.own_attention} attention" in shown


def test_what_does_not_denoise_has_no_forecast():
    with pytest.raises(ValueError, match="deit-t-16 has no denoising.*mhla bench ceilings --model deit-t-16"):
        forecast_text("deit-t-16", None, Options())


def test_a_model_that_embeds_its_guidance_runs_once_a_step():
    """And its layers are of two kinds, of which the first alone are not all."""
    text = forecast_text("flux-dev", None, Options())
    assert "50 steps, 1 forward each" in text and "in 100% of all layers" in text
    assert "those of the text among them" in text
    assert "50 steps, 2 forwards each" in forecast_text("flux-dev", None, Options(passes=2))
