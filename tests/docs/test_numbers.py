"""Numbers of the pages: measured ones stand in the shipped results, counted ones are counted anew."""

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from mhla_diffusers.benchmark.forecast import Question, count_forwards, forward_seconds
from mhla_diffusers.benchmark.models import choose_sizes, family_of_model, find_models
from mhla_diffusers.benchmark.results import COMPILED, HYBRID, PLAIN, read_run
from mhla_diffusers.benchmark.speeds import find_card, measured_speeds, read_card
from mhla_diffusers.cli import app

from .snippets import PAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
FLASH = "softmax FlashAttention-3"
EXACT, CONTENT = "MHLA, exact tiles", "MHLA, exact tiles by content"
"""The sparse branch of the version that was measured, as its results name it."""
ALONE = {
    "softmax, FlashAttention-3 (fa3-fwd 0.0.3)": FLASH,
    "softmax, cuDNN": "softmax cudnn",
    "softmax, FlashAttention-2 (PyTorch)": "softmax flash",
    "softmax in 8 bits, SageAttention 1.0.6 (Triton)": "softmax SageAttention",
    "block-sparse and linear: SLA, whole module, 5 %": "SLA whole module, 5 %",
    "plain linear attention": f"{PLAIN} triton",
    "MHLA, without RoPE": "MHLA triton",
    "MHLA, exact, lists given": f"{EXACT} triton",
    "MHLA, exact, tiles chosen by content": f"{CONTENT} triton",
}
CUDNN = "softmax _native_cudnn"
WHOLE = {
    "Wan2.1-1.3B, 480x800x81": "wan2.1-1.3b 480x800x81",
    "Wan2.1-1.3B, 720x1280x81": "wan2.1-1.3b 720x1280x81",
    "Wan2.1-14B, 480x800x81": "wan2.1-14b 480x800x81",
    "Flux.1-dev, 2048x2048": "flux-dev 2048x2048",
    "SANA 1.6B, 4096x4096": "sana-1.6b 4096x4096",
}


def milliseconds(command):
    """(case, stage, variant) → time of a whole attention or forward."""
    rows = read_run(find_card("h100") / f"{command}.json").rows
    return {(row.case, row.stage, row.variant): 1000 * row.median for row in rows}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_table_of_attentions():
    times, lines = (
        milliseconds("op"),
        {cells(line)[0]: cells(line)[1:] for line in README.splitlines() if line[:1] == "|"},
    )
    for name, variant in ALONE.items():
        expected = [times[f"wan2.1-1.3b-{size}", "forward", variant] for size in ("480p", "720p")]
        assert [float(cell) for cell in lines[name]] == pytest.approx(expected), name
    content, flash = (times["wan2.1-1.3b-480p", "forward", one] for one in (f"{CONTENT} triton", FLASH))
    # the sentence below the table; whoever changes the times changes it too
    assert f"{content / flash:.1f} times as long as FlashAttention-3 at 480x800" in README


@pytest.mark.parametrize(
    ("page", "variants"),
    [
        (README, [CUDNN, PLAIN, HYBRID, "MHLA", EXACT]),
        (RESULTS, ["softmax _native_flash", CUDNN, PLAIN, "MHLA", HYBRID, EXACT]),
    ],
    ids=["README", "results"],
)
def test_table_of_whole_transformers(page, variants):
    times, case, checked = milliseconds("transformer") | milliseconds("train"), None, 0
    (table,) = re.findall(
        r"^\| (?:one forward of a whole transformer)? ?\| softmax, .*\n(?:\|.*\n)+", page, re.MULTILINE
    )
    for name, *numbers in map(cells, table.splitlines()[2:]):
        case = next((WHOLE[one] for one in WHOLE if name.startswith(one)), case)
        stage = "training step" if "training step" in name else "forward"
        for number, variant in zip(numbers, variants, strict=True):
            key = (case, stage, variant + COMPILED * name.startswith("the same"))
            # what was measured stands there, and nothing else
            assert (float(number) if number else None) == pytest.approx(times.get(key)), (name, variant)
            checked += bool(number)
    assert checked >= 18


def test_hours_of_an_adaptation():
    times, page = milliseconds("train"), (ROOT / "docs/adapt.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load((ROOT / "finetune/configs/wan2.1-t2v-1.3b.yaml").read_text())
    teacher = milliseconds("transformer")["wan2.1-1.3b 480x800x81", "forward", CUDNN]
    steps = [times["wan2.1-1.3b 480x800x81", "training step", variant] for variant in ("MHLA", EXACT)]
    samples = [stage["steps"] * recipe["gradient_accumulation"] * recipe["batch_size"] for stage in recipe["stages"]]
    for count in (*samples, sum(samples)):
        hours = " | ".join(f"{count * (step + teacher) / 3.6e6:.1f}" + " h" * (count != sum(samples)) for step in steps)
        assert f"| {count:,} | {hours} |" in page


def test_forecast_of_the_page_of_measuring():
    """Its block is what the command above it prints."""
    page = (ROOT / "docs/measure.md").read_text(encoding="utf-8")
    block = re.search(r"^The first prints.*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    section = page.partition("## Before you patch")[2]
    command = re.search(r"^mhla (info --model .* --density .*)$", section, re.MULTILINE)[1]
    assert block in CliRunner().invoke(app, command.split()).output


def test_table_of_known_cards():
    """What a forecast was held against."""
    table = (find_card("h100") / "held.md").read_text()
    assert table in (ROOT / "docs/measure.md").read_text(encoding="utf-8")


FASTEST = {
    "softmax, cuDNN": CUDNN,
    "softmax, cuDNN, compiled": CUDNN + COMPILED,
    "softmax, FlashAttention-3": None,
    "hybrid 2/3": HYBRID,
    "hybrid 2/3, compiled": HYBRID + COMPILED,
    "MHLA": "MHLA",
    "MHLA, compiled": "MHLA" + COMPILED,
    "sparse at 5 %, the version before": None,
    "the same, lists given": EXACT,
    "the same, lists given, compiled": EXACT + COMPILED,
    "sparse at 5 %, today's kernels": None,
}
"""Line of the page → variant of the H100's results; None for what was not measured as a whole forward."""


def forecasts(case):
    """Line of the page → milliseconds of one forward on the H100, as ``mhla info --device h100`` forecasts it."""
    runs, (name, size) = read_card(find_card("h100")), case.split()
    (model,) = find_models([name], "cpu")
    (chosen,) = choose_sizes(model, [size.rpartition("x")[0]], [81], "cpu")
    default = family_of_model(model).default_config.replace(blocks=model.blocks, layers="all")
    found = {}
    for line, config in {"MHLA": default.replace(sparse="none"), "sparse at 5 %, the version before": default}.items():
        question = Question(model, chosen, config, 1, 1)
        speeds = measured_speeds(runs, model, question.tokens, question.kind)
        counts = count_forwards(question, torch.bfloat16)
        unpatched, found[line] = (1000 * sum(x.values()) for x in forward_seconds(counts, model.layers, speeds))
        found.setdefault("softmax, FlashAttention-3", unpatched)
    part = Question(model, chosen, default.replace(layers="2/3"), 1, 1).patched
    return found | {"hybrid 2/3": part * found["MHLA"] + (1 - part) * found["softmax, FlashAttention-3"]}


def test_fastest_setting():
    """Plain numbers were measured, those in italics are forecasts; every number below the table stands in it."""
    page = (ROOT / "docs/fastest.md").read_text(encoding="utf-8")
    times = milliseconds("transformer")
    lines = {
        cells(line)[0]: cells(line)[1:]
        for line in page.partition("## In this order")[0].splitlines()
        if line[:1] == "|"
    }
    cases = [
        f"wan2.1-{model.lower()} {size}x81" for model, size in (cell.split(", ") for cell in lines["one forward, ms"])
    ]
    for column, case in enumerate(cases):
        expected = forecasts(case)
        for name, variant in FASTEST.items():
            text, measured = lines[name][column], times.get((case, "forward", variant))
            if text.startswith("*"):
                assert measured is None, "what was measured is no forecast"
                assert float(text.strip("*")) == pytest.approx(expected[name], rel=1e-3), (name, case)
            else:
                assert (float(text) if text else None) == pytest.approx(measured), (name, case)
    assert len(lines) == len(FASTEST) + 2
    stated = {text.strip("*") for texts in lines.values() for text in texts if text}
    alone = {f"{1000 * row.median:g}" for row in read_run(find_card("h100") / "op.json").rows}
    order, _, rest = page.partition("## In this order")[2].partition("## By model and size")
    advice = rest.partition("**Another card.**")[0]
    for number in re.findall(r"(?<![\d.x])(\d{3,5}|\d+\.\d)(?= ms|\*| →|,| as|;| →| and| with|\.)", advice + order):
        assert number in stated | alone | {"100", "2.8", "28.6"}, number


def test_step_caches_and_few_steps():
    """The table is of the shipped run, and what the text says of four steps holds in it."""
    page = (ROOT / "docs/fastest.md").read_text(encoding="utf-8").partition("## Step caches and few steps")[2]
    run = read_run(ROOT / "assets/benchmarks/amd-epyc-2-threads/pipeline.json")
    rows = {row.variant: row for row in run.rows if row.part is None}
    distilled = {name: row for name, row in rows.items() if name.startswith("tiny-wan-4-steps")}
    for name in [name for name in distilled if name.endswith(" + 4 steps")]:
        del rows[name]  # which are its steps anyway
    lines = [cells(line) for line in page.splitlines() if line.startswith("| `")]
    assert [name.strip("`") for name, *_ in lines] == list(rows)
    for name, *texts in lines:
        row = rows[name.strip("`")]
        computed = re.match(r"\d+ of \d+", row.reason)
        shown = [
            computed[0] if computed else "",
            f"{run.times_baseline(row):.1f}",
            f"{row.psnr:.1f}",
            f"{row.ssim:.3f}",
        ]
        assert texts == shown, name
    assert distilled["tiny-wan-4-steps"].ssim > 3 * distilled["tiny-wan-4-steps + taylorseer=3"].ssim
    few = {name: row.reason for name, row in rows.items() if name.endswith(" + 4 steps") and row.reason}
    assert {reason.split(" forwards")[0] for name, reason in few.items() if "taylorseer" in name} == {"6 of 8"}
    assert {reason.split(" forwards")[0] for name, reason in few.items() if "taylorseer" not in name} == {"8 of 8"}


def test_table_of_the_sparse_branch():
    shown = CliRunner().invoke(app, ["info", "--patch", "wan2.1-t2v-1.3b-exact"]).output
    page = (ROOT / "docs/sparse.md").read_text(encoding="utf-8")
    rows = [cells(line) for line in page.splitlines() if line.startswith("| Wan2.1-")]
    assert len(rows) == 4
    for name, tokens, *numbers in rows:
        model, pixels = name.split(",")[0].lower(), name.split()[-1]
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{model}-") and f" {pixels} " in line]
        assert line.split()[-4:] == [number.replace(" ", ",") for number in numbers]
        assert tokens.replace(" ", "") in ("31500", "75600")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_size_is_told_in_pixels(page):
    """480p is 480x800 in the paper and 480x832 as a model's default, so that it alone tells neither."""
    unclear = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<![-_\w])480p(?![-_\w])", line) and not re.search(r"480 ?x ?8\d\d", line)
    ]
    assert unclear == []


def test_number_of_files():
    page = (ROOT / "docs/inside.md").read_text(encoding="utf-8")
    stated = int(re.search(r"some (\d+) files", page)[1])
    files = list(Path(ROOT / "mhla_diffusers").rglob("*.py"))
    assert abs(len(files) - stated) <= 15


def test_table_of_few_steps():
    page = (ROOT / "docs/few-steps.md").read_text(encoding="utf-8")
    assert (ROOT / "studies/few_steps/few-steps.md").read_text(encoding="utf-8") in page
    rows = csv.DictReader((ROOT / "studies/few_steps/few-steps-tried.csv").open(encoding="utf-8"))
    tried = {
        row["what"]: [row["clips"], f"{100 * float(row['digits']):.1f} % and {float(row['distance']):.1f}"]
        for row in rows
    }
    lines = page.partition("What was tried")[2].splitlines()
    shown = [cells(line) for line in lines if line.startswith("| ")][1:]
    assert len(shown) > 5
    for what, *numbers in shown:
        assert numbers == tried[what], what
