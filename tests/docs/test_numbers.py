"""Numbers of the pages: measured ones stand in the shipped results, counted ones are counted anew."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mhla_diffusers.benchmark.results import COMPILED, HYBRID, PLAIN, read_run
from mhla_diffusers.benchmark.speeds import find_card
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
