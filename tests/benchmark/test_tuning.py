"""``mhla bench tune`` and the table that it writes; the search itself is run by the tests of gpu-check."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mhla_diffusers.attention.triton import tilings
from mhla_diffusers.attention.triton.tilings import MixTiling, PairTiling, Place, Tiling, read_table, write_table
from mhla_diffusers.attention.triton.tuning import mix_tiling, pair_tiling, tiling
from mhla_diffusers.benchmark import tuning
from mhla_diffusers.benchmark.shapes import TINY

from .commands import bench

PLACE = Place("sm_90", "summary", 128, torch.bfloat16, 300)
ROWS = {
    PLACE: Tiling(16, 32, 2, 3),
    PLACE._replace(kernel="exact"): PairTiling(16, 32, 2, 3),
    Place("sm_90", "mix", 0, torch.bfloat16, 105): MixTiling(16, 32, 64, 2, 3),
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    file = tmp_path / "tuned.json"
    monkeypatch.setattr(tilings, "TABLE", file)
    tilings._shipped.cache_clear()
    yield file
    tilings._shipped.cache_clear()


def test_kernels_are_cut_as_the_table_says(table):
    write_table(ROWS, table)
    assert read_table(table) == ROWS
    for place, tiles in ROWS.items():
        function = {Tiling: tiling, PairTiling: pair_tiling, MixTiling: mix_tiling}[type(tiles)]
        assert function(place) == tiles
        for other in (place._replace(length=64), place._replace(architecture="sm_80")):
            assert function(other) != tiles


def test_a_table_is_written_in_one_order(table):
    write_table(ROWS, table)
    first = table.read_bytes()
    write_table(dict(reversed(ROWS.items())), table)
    assert table.read_bytes() == first


def test_the_shipped_table_can_be_read():
    assert all(isinstance(tiles, Tiling | PairTiling | MixTiling) for tiles in read_table(tilings.TABLE).values())


def test_a_cpu_has_nothing_to_time(tmp_path):
    with pytest.raises(ValueError, match="on a GPU; on a CPU there is nothing to time"):
        bench("tune", "--device", "cpu", "--output", tmp_path / "tuned.json")
    assert not list(tmp_path.iterdir())


def test_a_table_gains_what_is_faster_and_keeps_what_it_has(table, monkeypatch):
    """Searched again, where nothing is faster than the table; what the search finds is given, for want of a GPU."""
    launch, fastest = SimpleNamespace(place=PLACE, tiles=Tiling(32, 64, 8, 1)), Tiling(64, 64, 8, 2)
    monkeypatch.setattr(tuning, "Clock", lambda device: None)
    monkeypatch.setattr(tuning, "draw_problem", lambda *_: SimpleNamespace(attend=lambda backend: None))
    monkeypatch.setattr(tuning, "recorded_launches", lambda: nullcontext({"summary": launch}))
    for speedup, wrong, rows in (
        (1.5, "query 1e-1 of 3e-2", {}),
        (1.02, "", {}),
        (1.5, "", {PLACE: fastest}),
        (1.0, "", {PLACE: fastest}),
    ):
        found = tuning.Search([{}], 0, fastest._asdict(), speedup, {}, wrong)
        monkeypatch.setattr(tuning, "search", lambda *_, found=found: found)
        tuning.tune([replace(TINY, tiles=None)], torch.bfloat16, 1.0, torch.device("cuda"), table)
        assert read_table(table) == rows
