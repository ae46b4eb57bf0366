"""``mhla bench tune`` and the table that it writes; the search itself is run by the tests of gpu-check."""

import pytest
import torch

from mhla_diffusers.attention.triton import tilings
from mhla_diffusers.attention.triton.tilings import MixTiling, PairTiling, Place, Tiling, read_table, write_table
from mhla_diffusers.attention.triton.tuning import mix_tiling, pair_tiling, tiling

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
