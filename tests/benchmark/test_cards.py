"""Cards whose times ship: ``mhla info --device h100``, what it says, and how near it comes."""

import csv

import pytest
from typer.testing import CliRunner

from mhla_diffusers.benchmark import cards
from mhla_diffusers.benchmark.candidates import CONTENT, EXACT
from mhla_diffusers.benchmark.cards import find_card, held_against, known_cards
from mhla_diffusers.benchmark.models import models
from mhla_diffusers.benchmark.results import read_run
from mhla_diffusers.benchmark.speeds import measured_speeds
from mhla_diffusers.cli import app

from .compare_forecast import HEADER, cells, compare_card


def info(*options):
    result = CliRunner().invoke(app, ["info", *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def runs():
    return [read_run(find_card("h100") / f"{command}.json") for command in ("transformer", "op")]


@pytest.mark.slow
def test_forecasts_of_whole_forwards_are_what_the_card_says_they_are():
    """Whole forwards that no speed knows: another size, a larger model, other attentions."""
    card = find_card("h100")
    held = compare_card(card)
    with (card / "held.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [list(HEADER), *(list(cells(one)) for one in held)]
    assert {one.asked for one in held} == {"wan2.1-1.3b 720x1280x81", "wan2.1-14b 480x800x81"} and len(held) == 7
    assert all(0.9 < one.ratio < 1.1 for one in held)


def test_what_a_forecast_says_by_content():
    """Slower than FlashAttention-3 at 480p, faster at 720p; with its date and the size of the error that was found."""
    small = info("--model", "wan2.1-1.3b", "--height", "480", "--width", "800", "--device", "h100")
    assert "No gain at this size" in small and "softmax FlashAttention-3 and MHLA, exact tiles by content" in small
    assert "on NVIDIA H100 80GB HBM3 (2026-11-23)" in small and held_against(find_card("h100")) in small
    attention = next(line for line in small.splitlines() if line.startswith("self-attention"))
    assert attention.split()[-4:] == ["24.9", "s", "35.1", "s"]  # 100 forwards of 30 layers, 8.30 and 11.7 ms
    large = info("--model", "wan2.1-1.3b", "--height", "720", "--width", "1280", "--share", "0.06", "--device", "H100")
    assert "Speed-up 1." in large and "Exact tiles were timed at 5% of all pairs" in large


def test_lists_and_content_are_not_mixed_up(runs):
    model = models()["wan2.1-1.3b"]
    lists, content = (measured_speeds(runs, model, 31_500, kind) for kind in (EXACT, CONTENT))
    assert "by content" in content.source and "by content" not in lists.source
    alone = runs[1].rows
    without = [row for row in alone if not row.variant.startswith(CONTENT)]
    runs[1].rows = without
    assert "taken for as fast as the lists that were timed" in measured_speeds(runs, model, 31_500, CONTENT).source


def test_info_says_which_cards_are_known():
    assert set(known_cards()) == {"nvidia-h100-80gb-hbm3"}
    shown = info()
    (line,) = [line for line in shown.splitlines() if line.startswith("nvidia-h100-80gb-hbm3")]
    assert "2026-11-23" in line and "wan2.1-1.3b, wan2.1-14b" in line


def test_a_part_of_two_names_is_refused(tmp_path, monkeypatch):
    found = {name: tmp_path / name for name in ("nvidia-h100-80gb-hbm3", "nvidia-h100-pcie")}
    monkeypatch.setattr(cards, "known_cards", lambda: found)
    assert find_card("h100-pcie") == tmp_path / "nvidia-h100-pcie"
    with pytest.raises(ValueError, match="part of nvidia-h100-80gb-hbm3 and of nvidia-h100-pcie"):
        find_card("h100")
