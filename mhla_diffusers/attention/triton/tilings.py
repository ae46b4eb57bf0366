"""How kernels can be cut, and the table of what was fastest where it was measured."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ...files import read_json, write_json


class Tiling(NamedTuple):
    """How one kernel cuts its work."""

    tokens: int
    """Tokens per tile (BLOCK_T)."""
    channels: int
    """Channels of the summary held at once (BLOCK_C or BLOCK_E), where the kernel has to do with one."""
    warps: int
    stages: int


class PairTiling(NamedTuple):
    """How one kernel of the exact tiles cuts its work."""

    own: int
    """Queries (or keys) that a program holds."""
    others: int
    """Keys (or queries) that it takes at once."""
    warps: int
    stages: int


class MixTiling(NamedTuple):
    """How one kernel of the mixing cuts its work: a product of matrices."""

    rows: int
    columns: int
    depth: int
    """Terms that are added at once."""
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """Of the kernel."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}


AnyTiling = Tiling | PairTiling | MixTiling


class Place(NamedTuple):
    """What the fastest tiles of a kernel depend on."""

    architecture: str
    """"sm_90", "gfx942", "interpreter"."""
    kernel: str
    head_dim: int
    """0 for the kernels of the mixing, which do not know it."""
    dtype: torch.dtype
    length: int
    """Tokens of the longest block or tile; for the kernels of the mixing the number of blocks."""


Table = dict[Place, AnyTiling]

TABLE = Path(__file__).parent / "tuned.json"
"""Shipped; ``mhla bench tune`` renews it."""
_KINDS: Mapping[str, type[AnyTiling]] = {kind.__name__: kind for kind in (Tiling, PairTiling, MixTiling)}


def tiles_at(place: Place) -> AnyTiling | None:
    """What :func:`tiles_of` asks for within its context, or else what the table says; None for the rules."""
    return wished(place.kernel) or _shipped().get(place)


@cache
def _shipped() -> Table:
    return read_table(TABLE)


def read_table(file: Path) -> Table:
    """The rows of a table; none if there is no such file.

    Raises:
        ValueError: the file is damaged.
    """
    rows = read_json(file) if file.is_file() else []
    return {
        Place(**row["place"] | {"dtype": getattr(torch, row["place"]["dtype"])}): _KINDS[row["kind"]](**row["tiles"])
        for row in rows
    }


def write_table(table: Table, file: Path) -> None:
    """Write a table, its rows in order."""
    rows = [
        {
            "place": place._asdict() | {"dtype": str(place.dtype).removeprefix("torch.")},
            "kind": type(tiles).__name__,
            "tiles": tiles._asdict(),
        }
        for place, tiles in sorted(table.items(), key=lambda item: str(item[0]))
    ]
    write_json(rows, file)


_WISHES: dict[str, AnyTiling] = {}


@contextmanager
def tiles_of(kernel: str, tiles: AnyTiling) -> Iterator[None]:
    """Within the context a kernel is cut like this, whatever table and rules say: for measuring what they should."""
    _WISHES[kernel] = tiles
    try:
        yield
    finally:
        del _WISHES[kernel]


def wished(kernel: str) -> AnyTiling | None:
    """What :func:`tiles_of` asks for within its context."""
    return _WISHES.get(kernel)
