"""Cards whose times ship: ``mhla info --device h100``, what it says, and how near it comes."""

import csv
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mhla_diffusers.benchmark import cards
from mhla_diffusers.benchmark.candidates import CONTENT
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
    """Whole forwards that no speed knows: another size, a larger model, other attentions.

    Those with the sparse branch before this one cannot be forecast any more; their rows stay.
    """
    card = find_card("h100")
    held = compare_card(card)
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
    large = info(
        "--model", "wan2.1-1.3b", "--height", "720", "--width", "1280", "--density", "0.06", "--device", "H100"
    )
    assert "timed at a density of 5%. At other densities" in large
    alone = info("--model", "wan2.1-1.3b", "--patch", "wan2.1-t2v-1.3b-hybrid", "--device", "h100")
    assert "sparse branch before" not in alone


def test_the_present_branch_is_taken_where_it_was_timed(runs):
    """With made-up times, as a card will have them."""
    old = measured_speeds(runs, models()["wan2.1-1.3b"], 31_500, CONTENT)
    for run in runs:
        run.rows = [
            replace(row, variant=row.variant.replace("MHLA, exact tiles by content", CONTENT)) for row in run.rows
        ]
        run.rows = [replace(row, variant=row.variant.replace("MHLA, exact tiles", CONTENT)) for row in run.rows]
    new = measured_speeds(runs, models()["wan2.1-1.3b"], 31_500, CONTENT)
    assert old.of_earlier_branch and not new.of_earlier_branch and CONTENT in new.source


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


def test_help_names_a_card_that_ships():
    result = CliRunner().invoke(app, ["info", "--help"], terminal_width=200)
    assert "h100, whose times ship" in " ".join(result.output.split()) and find_card("h100")
