"""``mhla info --model`` and ``mhla bench ceilings``: counts, times, break-even, cards that ship, and what is said."""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mhla_diffusers import apply_mhla
from mhla_diffusers.benchmark import speeds as speeds_module
from mhla_diffusers.benchmark.forecast import (
    Options,
    Question,
    ceiling_cells,
    ceilings,
    count_forwards,
    forecast_text,
    forward_seconds,
    make_forecast,
    total,
)
from mhla_diffusers.benchmark.models import (
    Size,
    build_transformer,
    family_of_model,
    find_models,
    make_forward_inputs,
    models,
)
from mhla_diffusers.benchmark.parts import ATTENTION, PARTS, count_parts
from mhla_diffusers.benchmark.results import CONTENT, PART, PLAIN, Rates, Run, gather_conditions, make_row, write_run
from mhla_diffusers.benchmark.speeds import (
    Pace,
    Speeds,
    find_card,
    held_against,
    known_cards,
    least_seconds,
    measured_speeds,
    read_card,
    stated_speeds,
)
from mhla_diffusers.benchmark.timing import Outcome, Timing
from mhla_diffusers.cli import app
from mhla_diffusers.config import MHLAConfig
from mhla_diffusers.reporting import scaled

from .commands import measure
from .compare_forecast import HEADER, asked, cells, compare, compare_card, counted

ROOT = Path(__file__).parents[2]
META = torch.device("meta")
RATES = Rates(1e11, "float32", 1e10)
REACHED = {"softmax native": 0.6, PLAIN: 0.3, "MHLA": 0.2, CONTENT: 0.4}
"""Variant → part of the rates that its self-attention reaches in made-up results; all other parts reach a half."""
TINY = {"wan": Size(128, 192, 9), "dit": Size(128, 128, None), "sana": Size(512, 512, None)}
SMALL, LARGE = Size(64, 96, 9), Size(256, 192, 17)


def question(family="wan", size=None, *, kind=CONTENT, **more):
    return replace(asked(models()[f"tiny-{family}"], size or TINY[family], kind), **more)


def wan_speeds(run, tokens, kind=CONTENT, name="tiny-wan"):
    return measured_speeds([run], models()[name], tokens, kind)


def seconds(whole, speeds, dtype=torch.float32):
    return forward_seconds(count_forwards(whole, dtype), whole.model.layers, speeds)


def info(*options):
    result = CliRunner().invoke(app, ["info", *options])
    if result.exception is not None:
        raise result.exception
    return result.output


@cache
def made_up(*sizes):
    """Results of a machine on which every part is as fast at every size."""
    rows = []
    for size in sizes:
        for variant, reached in REACHED.items():
            is_own = variant == "softmax native"
            costs = counted("tiny-wan", size, CONTENT if is_own else variant, "float32", 3)[not is_own]
            what = {"case": f"tiny-wan {size}", "model": "tiny-wan", "variant": variant, "dtype": "float32"}
            what |= {"tokens": question(size=size).tokens, "layers": 3}
            what |= {name: getattr(size, name) for name in ("height", "width", "frames")}
            times = {
                part: least_seconds(cost, RATES) / (reached if part == ATTENTION else 0.5)
                for part, cost in costs.items()
            }
            for stage, time in {
                "forward": sum(times.values()),
                **{PART + part: x for part, x in times.items()},
            }.items():
                cost = costs.get(stage.removeprefix(PART))
                work = {} if cost is None else {"flops": cost.flops, "bytes": cost.bytes}
                outcome = Outcome("measured", Timing(time, time, time, 3))
                rows.append(make_row(outcome, RATES, stage=stage, baseline=is_own and cost is None, **work, **what))
    return Run("transformer", gather_conditions(torch.device("cpu")), RATES, rows)


# ---- counts


@pytest.mark.parametrize("family", TINY)
def test_layers_are_extrapolated_exactly(family):
    whole = question(family, kind="MHLA")
    transformer = build_transformer(whole.model, whole.size, None, META, torch.float32)
    inputs = make_forward_inputs(whole.model, transformer, whole.size, META, torch.float32)
    unpatched, patched = count_forwards(whole, torch.float32)
    with FlopCounterMode(display=False) as counter:
        transformer(**inputs)
    assert sum(cost.flops for cost in unpatched.values()) == counter.get_total_flops()
    assert count_parts(transformer, inputs) == unpatched
    assert count_parts(apply_mhla(transformer, whole.config), inputs) == patched


def test_counts_of_wan_are_those_told_from_sizes():
    """31 500 tokens of 12 heads of 128 in 30 layers; 493 uniform blocks, of which 25 are listed, and 105 blocks."""
    config = MHLAConfig(blocks=(7, 3, 5), sparse="content")
    unpatched, patched = count_forwards(Question(models()["wan2.1-1.3b"], Size(480, 800, 81), config), torch.bfloat16)
    tokens, width, layers = 31_500, 1536, 30
    softmax = layers * 4 * tokens**2 * width
    assert unpatched[ATTENTION].flops == softmax
    far = layers * (4 * tokens + 2 * 105**2) * 129 * width
    assert patched[ATTENTION].flops == pytest.approx(softmax * 25 / 493 + layers * 4 * tokens * 493 * width + far)
    assert unpatched["projections"].flops == patched["projections"].flops == layers * 8 * tokens * width**2
    assert unpatched["feed-forward"].flops == layers * 4 * tokens * width * 8960
    assert unpatched[ATTENTION].bytes == layers * 4 * tokens * width * 2
    weights = layers * 2 * (width**2 + width)
    assert unpatched["projections"].bytes == 4 * (layers * 2 * 2 * tokens * width + weights)


# ---- speeds


@pytest.mark.slow
def test_forecasts_of_results_with_the_same_speeds_are_exact():
    held = list(compare(made_up(SMALL, LARGE)))
    assert {one.attention for one in held} > {PLAIN, "MHLA", CONTENT} and len(held) == 2 * 3 * 2
    assert [one.ratio for one in held] == pytest.approx([1] * len(held), rel=1e-3)  # lists are rounded to whole pairs


def test_speeds_are_those_of_the_nearest_size_of_the_model():
    run = made_up(SMALL, Size(256, 384, 9))
    for tokens, text in (
        (900, "tiny-wan 256x384x9 and tiny-wan 64x96x9, 1,152 tokens"),
        (80, "tiny-wan 64x96x9 and tiny-wan 256x384x9, 72"),
        (7560, "1,152 tokens, 6.56 times fewer than asked for (far: measure nearer)"),
    ):
        assert text in wan_speeds(run, tokens).source
    others = [replace(row, case=row.case.replace("tiny-wan", "tiny-dit"), model="tiny-dit") for row in run.rows]
    assert "tiny-dit" in wan_speeds(replace(run, rows=run.rows + others), 900, name="tiny-dit").source


def test_two_sizes_tell_what_a_forward_takes_whatever_its_size():
    """A millisecond more in every layer's self-attention, and two in the rest."""
    sizes = (SMALL, Size(128, 192, 9), LARGE)
    more = {PART + ATTENTION: 0.003, PART + "rest": 0.006}
    run = made_up(*sizes)
    slow = [
        replace(row, median=row.median + (sum(more.values()) if row.part is None else more.get(row.stage, 0.0)))
        for row in run.rows
    ]
    between = f"tiny-wan {sizes[1]}"
    held = [one for one in compare(replace(run, rows=slow)) if one.asked == between]
    assert [one.ratio for one in held] == pytest.approx([1] * len(held), rel=1e-3)
    speeds = wan_speeds(replace(run, rows=[row for row in slow if row.case != between]), 144)
    assert speeds.patched[ATTENTION].fixed == pytest.approx(0.001, rel=1e-2)
    assert speeds.unpatched["rest"].fixed == pytest.approx(0.002, rel=1e-2)
    assert "as measured at tiny-wan 64x96x9 and tiny-wan 256x192x17, 72 tokens" in speeds.source
    alone = wan_speeds(replace(run, rows=[row for row in slow if row.case == f"tiny-wan {sizes[0]}"]), 144)
    assert not any(pace.fixed for pace in alone.patched.values())


def test_parts_share_out_the_time_of_the_whole_forward():
    """Which is timed in turns with the others, and more often."""
    run = made_up(SMALL)
    slow = [replace(row, median=3 * row.median) if row.part is None else row for row in run.rows]
    before, after = (wan_speeds(one, 72, "MHLA").patched for one in (run, replace(run, rows=slow)))
    assert {part: 3 * pace.reached for part, pace in after.items()} == pytest.approx(
        {part: pace.reached for part, pace in before.items()}
    )


def test_results_of_attentions_alone_bound_the_rest(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--stage", "forward")
    run = replace(run, rows=[replace(row, case="tiny-wan-small") for row in run.rows])  # which is named after a model
    speeds = wan_speeds(run, 144)
    assert set(speeds.unpatched) == set(speeds.patched) == {ATTENTION}
    assert "of self-attention alone; all else is at the rates of the same file, a bound" in speeds.source


def test_stated_rates_are_a_roofline():
    """Of a model whose projections are bound by arithmetic at one pair of rates and by memory at another."""
    whole = question(kind="MHLA")
    unpatched, _ = count_forwards(whole, torch.float32)
    for matmul, copy, bound in ((1.0, 1e30, "flops"), (1e30, 1.0, "bytes")):
        one, _ = seconds(whole, stated_speeds(matmul, copy))
        assert one == pytest.approx({part: getattr(cost, bound) for part, cost in unpatched.items()})


def test_results_without_what_is_needed_are_refused():
    """Results of relatives that differ in layers and heads alone are taken, and named."""
    run = made_up(SMALL)
    uncounted = replace(run, rows=[replace(row, flops=None, bytes=None) for row in run.rows])
    unpatched = replace(run, rows=[row for row in run.rows if row.variant != "MHLA"])
    for known, name, kind, message in (
        (
            replace(run, command="pipeline"),
            "tiny-wan",
            CONTENT,
            "mhla bench transformer or .* these are of .* pipeline",
        ),
        (uncounted, "tiny-wan", CONTENT, "no case with FLOPs .*Measure anew: mhla bench transformer --model tiny-wan"),
        (unpatched, "tiny-wan", "MHLA", "of both 'MHLA' and of what it replaces.*; measured are softmax native, plain"),
        (run, "wan2.1-1.3b", CONTENT, "for another Wan.*measured are other models: tiny-wan. .* --model wan2.1-1.3b"),
        (run, "tiny-dit", CONTENT, "for another DiT.*measured are other models: tiny-wan. .* --model tiny-dit"),
    ):
        with pytest.raises(ValueError, match=message):
            wan_speeds(known, 72, kind, name)
    relative = replace(models()["tiny-wan"], name="tiny-wan-wide", heads=4, layers=7)
    assert "as measured at tiny-wan 64x96x9" in measured_speeds([run], relative, 72, CONTENT).source


# ---- forecasts


def test_a_call_mixes_steps_and_layers():
    """A quarter of the layers and 3 of 10 steps are unpatched."""
    speeds = Speeds(RATES, {ATTENTION: Pace(0.5)}, {ATTENTION: Pace(0.1)}, "")
    whole = question(steps=10, passes=2)
    config = whole.config.replace(layers=(0, 1, 3), softmax_steps=0.25)
    found = make_forecast(replace(whole, config=config), torch.float32, speeds)
    one, other = seconds(whole, speeds)
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
        one, other = seconds(replace(whole, size=size), speeds)
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
    assert "21x45x80 = 75,600 tokens" in shown
    assert "softmax over 10.0% of all pairs in blocks of 64 chosen by content, in 30 of 30 layers" in shown
    assert "time" not in shown.replace("No times", "") and "mhla bench transformer --model wan2.1-1.3b" in shown
    (attention,) = [line for line in shown.splitlines() if line.startswith("self-attention")]
    assert attention.split()[1:3] == ["105", "P"]  # 100 forwards of 30 times 35.1 TFLOP


def test_measured_speeds_give_times(tmp_path):
    file = write_run(made_up(SMALL), tmp_path)
    shown = forecast_text("tiny-wan", None, Options(128, 192, 9, steps=4, passes=1, device=file))
    assert "4 steps, 1 forward each" in shown and "time unpatched" in shown
    assert "as measured at tiny-wan 64x96x9, 72 tokens, 4 times fewer than asked for, on" in shown
    assert "from about" in shown


TINY_WAN, TINY_DIT = ["--model", "tiny-wan"], ["--model", "tiny-dit"]
REFUSED = {
    "half a size": ([*TINY_WAN, "--height", "64"], "--height 64 and --width None"),
    "one rate": ([*TINY_WAN, "--copy-rate", "1e9"], "--matmul-rate and --copy-rate belong together"),
    "no rate": ([*TINY_WAN, "--copy-rate", "0", "--matmul-rate", "1"], "--copy-rate 0 must be positive"),
    "both": ([*TINY_WAN, "--copy-rate", "1", "--matmul-rate", "1", "--device", "a.json"], "give one of both"),
    "an unknown card": ([*TINY_WAN, "--device", "a100"], "a100 .* those are nvidia-h100"),
    "a model that the card was not measured with": (
        ["--model", "flux-dev", "--device", "h100"],
        "flux-dev, or for another Flux.*mhla bench transformer --model flux-dev",
    ),
    "no file": ([*TINY_WAN, "--device", "cuda"], "--device cuda .* give the JSON"),
    "frames of an image": ([*TINY_DIT, "--frames", "9"], "--frames 9 .* tiny-dit makes images"),
    "a size": ([*TINY_WAN, "--height", "65", "--width", "96"], "height=65.* near it are 64 and 80"),
    "frames": ([*TINY_WAN, "--frames", "8"], "frames=8.* near it are 5 and 9"),
    "no model": (["--density", "0.1", "--steps", "3"], "--density, --steps .* give --model"),
    "a report": (["--report", *TINY_WAN], "--report and --model"),
    "an unknown model": (["--model", "wan"], "'wan'; the nearest names are wan2.1-1.3b, wan2.1-14b, .*n.$"),
    "a misspelt model": (["--model", "flux-def"], "the nearest names are flux-dev"),
    "a preset": (["--model", "wan2.1-t2v-1.3b"], "'wan2.1-t2v-1.3b' is a preset.* are wan2.1-1.3b"),
    "no sparse branch": (["--model", "tiny-sana", "--density", "0.1"], "0.1 .* tiny-sana is linear.* leave it out"),
    "a density and a patch": ([*TINY_DIT, "--density", "0.1", "--patch", "dit-xl-2-256"], "--density 0.1 and --patch"),
    "another family": ([*TINY_DIT, "--patch", "sana-0.6b"], "'sana' family, but tiny-dit"),
    "too small for the patch": ([*TINY_WAN, "--patch", "wan2.1-t2v-1.3b"], "3 tokens, too few for 7 blocks"),
    "no steps": ([*TINY_DIT, "--steps", "0"], "steps=0 must be at least 1"),
    "no denoising": (["--model", "deit-t-16"], "deit-t-16 has no denoising.*mhla bench ceilings --model deit-t-16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_go_together_are_refused(case):
    options, message = REFUSED[case]
    with pytest.raises((ValueError, OSError), match=message):
        info(*options)


def test_a_ready_patch_by_its_name():
    shown = info("--model", "wan2.1-1.3b", "--patch", "wan2.1-t2v-1.3b-hybrid", "--softmax-steps", "20%")
    assert "MHLA of 7x3x5 blocks, in 20 of 30 layers" in shown
    assert "50 steps, the first 10 of them unpatched, 2 forwards each" in shown
    # layers that are chosen by measuring are counted as many
    config = MHLAConfig(blocks=(1, 2, 2), layers="auto:2/3")
    assert "in 2 of 4 layers" in forecast_text("tiny-wan", ("wan", config), Options())


def test_every_real_model_has_a_forecast():
    for name, model in models().items():
        family = family_of_model(model)
        if not model.is_tiny and family.is_diffusion:
            assert f"unpatched: {family.own_attention} attention" in forecast_text(name, None, Options())


def test_a_model_that_embeds_its_guidance_runs_once_a_step():
    """And its layers are of two kinds, of which the first alone are not all."""
    text = forecast_text("flux-dev", None, Options())
    assert "50 steps, 1 forward each" in text and "in 100% of all layers" in text
    assert "those of the text among them" in text
    assert "50 steps, 2 forwards each" in forecast_text("flux-dev", None, Options(passes=2))


# ---- cards whose times ship


@pytest.mark.slow
def test_forecasts_of_whole_forwards_are_what_the_card_says_they_are():
    """Whole forwards that no speed knows: another size, a larger model, other attentions.

    Those with the sparse branch before this one cannot be forecast any more; their rows stay.
    """
    card = find_card("h100")
    held = list(compare_card(card))
    with (card / "held.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == list(HEADER)
    assert [row for row in rows if "exact tiles" not in row[1]] == [list(cells(one)) for one in held]
    assert len(held) == 5 and all(0.9 < one.ratio < 1.1 for one in held)


def test_what_a_forecast_says_by_content():
    """That the branch before stands for the present one, with its date and the size of the error that was found."""
    small = info("--model", "wan2.1-1.3b", "--height", "480", "--width", "800", "--device", "h100")
    assert "No gain at this size" in small and "softmax FlashAttention-3 and MHLA, exact tiles by content" in small
    assert "The patched time is that of the sparse branch before this one (exact tiles)" in small
    assert "The patch is faster from" not in small
    assert "on NVIDIA H100 80GB HBM3 (2026-11-23)" in small and held_against(find_card("h100")) in small
    rest = next(line for line in small.splitlines() if line.startswith("rest")).split()
    assert rest[-4:-2] == rest[-2:], "norms and RoPE around self-attention belong to it, and the rest is the same"
    at_720p = ("--model", "wan2.1-1.3b", "--height", "720", "--width", "1280", "--device", "H100")
    assert "timed at a density of 5%. At other densities" in info(*at_720p, "--density", "0.06")
    alone = info("--model", "wan2.1-1.3b", "--patch", "wan2.1-t2v-1.3b-hybrid", "--device", "h100")
    assert "sparse branch before" not in alone


def test_the_present_branch_is_taken_where_it_was_timed():
    """With made-up times, as a card will have them."""
    runs, model = read_card(find_card("h100")), models()["wan2.1-1.3b"]
    old = measured_speeds(runs, model, 31_500, CONTENT)
    for run in runs:
        for name in ("MHLA, exact tiles by content", "MHLA, exact tiles"):
            run.rows = [replace(row, variant=row.variant.replace(name, CONTENT)) for row in run.rows]
    new = measured_speeds(runs, model, 31_500, CONTENT)
    assert old.of_earlier_branch and not new.of_earlier_branch and CONTENT in new.source


def test_info_says_which_cards_are_known(tmp_path, monkeypatch):
    assert set(known_cards()) == {"nvidia-h100-80gb-hbm3"}
    (line,) = [line for line in info().splitlines() if line.startswith("nvidia-h100-80gb-hbm3")]
    assert "2026-11-23" in line and "wan2.1-1.3b, wan2.1-14b" in line
    found = {name: tmp_path / name for name in ("nvidia-h100-80gb-hbm3", "nvidia-h100-pcie")}
    monkeypatch.setattr(speeds_module, "known_cards", lambda: found)
    assert find_card("h100-pcie") == tmp_path / "nvidia-h100-pcie"
    with pytest.raises(ValueError, match="part of nvidia-h100-80gb-hbm3 and of nvidia-h100-pcie"):
        find_card("h100")


# ---- mhla bench ceilings


def test_forecasts_and_ceilings_count_the_same_patch():
    """Of the size at which they disagreed: the patch that ``apply_mhla(pipe)`` makes."""
    model = models()["wan2.1-1.3b"]
    shown = forecast_text(model.name, None, Options(steps=1, passes=1))
    (line,) = [line for line in shown.splitlines() if line[:9] == "denoising"]
    (found,) = ceilings([replace(model, sizes=model.sizes[:1])])
    expected = [scaled(total(costs).flops, 1000, "") for costs in (found.unpatched, found.patched)]
    assert line.split()[1:5] == " ".join(expected).split()


def test_a_patch_pays_at_large_sizes_and_not_at_small_ones():
    found = ceilings(find_models(["flux-dev"], "cpu"))
    assert [one.question.size.height for one in found] == [1024, 2048, 4096]
    first, second, third = (total(one.unpatched).flops / total(one.patched).flops for one in found)
    assert first < 1.3 < second < 2 < third and ceiling_cells(found[1])[-1] == f"{second:.2f} x"
    assert not ceilings(find_models(["sana-0.6b"], "cpu")), "a linear attention leaves nothing to save"


def test_ceilings_command(tmp_path):
    result = CliRunner().invoke(app, ["bench", "ceilings", "--model", "tiny-dit", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (row,) = csv.DictReader((tmp_path / "ceilings.csv").read_text().splitlines())
    assert row["model"] == "tiny-dit" and row["tokens"] == "16"
    assert "| tiny-dit | 64x64 |" in (tmp_path / "ceilings.md").read_text() and "tiny-dit" in result.output


def test_the_page_of_models_tells_what_is_counted():
    """Its table is the file that the command has written; of one model it is counted anew."""
    table = (ROOT / "assets/models/ceilings.md").read_text().rstrip()
    assert table in (ROOT / "docs/models.md").read_text()
    for found in ceilings(find_models(["sd3.5-large"], "cpu")):
        assert f"| {' | '.join(ceiling_cells(found))} |" in table
    named = {row.split(" | ")[0].strip("| ") for row in table.splitlines()[2:]}
    softmax = {model.name for model in models().values() if family_of_model(model).own_attention == "softmax"}
    assert named == {name for name in softmax if not name.startswith("tiny")}
