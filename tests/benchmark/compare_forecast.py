"""Forecast every size in results of ``mhla bench transformer`` from the others, and print forecast / measured.

mhla bench transformer --model dit-s-2 --size 256 --size 512 --output outputs/held
python -m tests.benchmark.compare_forecast outputs/held/*/transformer.json
python -m tests.benchmark.compare_forecast h100     # a card that ships, from its parts
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mhla_diffusers.benchmark.cases import PATCHES, patch_settings
from mhla_diffusers.benchmark.forecast import Costs, Question, count_forwards, forward_seconds
from mhla_diffusers.benchmark.models import Size, family_of_model, models
from mhla_diffusers.benchmark.results import COMPILED, HYBRID, PLAIN, Row, Run, read_run
from mhla_diffusers.benchmark.speeds import find_card, measured_speeds
from mhla_diffusers.devices import FLOAT_TYPES
from mhla_diffusers.families import Model
from mhla_diffusers.reporting import text_table


@dataclass(frozen=True)
class Held:
    """A forecast and what it is held against, in seconds of a forward of the layers that were timed."""

    known: str
    asked: str
    attention: str
    forecast: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.forecast / self.measured


def compare(run: Run) -> Iterator[Held]:
    """Of every size from all others of its model, unpatched and with every patch that was measured."""
    cases: dict[str, list[Row]] = {}
    for row in run.rows:
        cases.setdefault(row.case, []).append(row)
    for case, rows in cases.items():
        others = [row for row in run.rows if row.case != case and row.model == rows[0].model]
        if others:
            names = dict.fromkeys(row.case.removeprefix(f"{row.model} ") for row in others)
            yield from _of_pair(replace(run, rows=others), ", ".join(names), rows)


def _of_pair(known: Run, name: str, rows: list[Row]) -> Iterator[Held]:
    whole = {row.variant: row for row in rows if row.part is None and row.median is not None}
    own = min((row for row in whole.values() if row.baseline), key=lambda row: row.median or math.inf, default=None)
    if own is None:
        return
    model = models()[str(own.model)]
    size = Size(int(own.height or 0), int(own.width or 0), own.frames, own.batch)
    both = whole.keys() & {row.variant for row in known.rows if row.part is not None}
    for kind in (kind for kind in PATCHES if kind in both and kind != HYBRID):
        question = asked(model, size, kind)
        speeds = measured_speeds([known], model, question.tokens, kind)
        counts = counted(model.name, size, kind, own.dtype, own.layers)
        for row, seconds in zip(
            (own, whole[kind]), forward_seconds(counts, own.layers or model.layers, speeds), strict=True
        ):
            attention = kind if row is not own else f"{row.variant}, beside {kind}"
            yield Held(name, rows[0].case, attention, sum(seconds.values()), float(row.median or 0))


def compare_card(folder: Path) -> list[Held]:
    """Of every size of a card of which whole forwards were timed and no parts, softmax by cuDNN beside each patch."""
    whole, alone = (read_run(folder / f"{command}.json") for command in ("transformer", "op"))
    # with which no whole forward was timed
    alone = replace(alone, rows=[row for row in alone.rows if row.variant != "softmax FlashAttention-3"])
    with_parts = {row.case for row in whole.rows if row.part is not None}
    return [held for row in whole.rows if row.case not in with_parts for held in _of_row(row, [whole, alone])]


def _of_row(row: Row, runs: list[Run]) -> Iterator[Held]:
    if row.variant.endswith(COMPILED) or row.variant not in ("softmax _native_cudnn", "MHLA", HYBRID):
        return
    model = models()[str(row.model)]
    size = Size(int(row.height or 0), int(row.width or 0), row.frames)
    try:
        speeds = measured_speeds(runs, model, int(row.tokens or 0), "MHLA")
    except ValueError:  # a model of which no parts were timed, nor of a relative
        return
    one, other = forward_seconds(counted(model.name, size, "MHLA", row.dtype, None), model.layers, speeds)
    unpatched, patched = sum(one.values()), sum(other.values())
    forecast = {"softmax _native_cudnn": unpatched, HYBRID: (2 * patched + unpatched) / 3}.get(row.variant, patched)
    yield Held("parts", row.case, row.variant, forecast, float(row.median or 0))


@cache
def counted(model: str, size: Size, kind: str, dtype: str, layers: int | None) -> tuple[Costs, Costs]:
    """A forward, unpatched and patched; one size is forecast from several others, and counted once."""
    return count_forwards(asked(models()[model], size, kind), FLOAT_TYPES[dtype], layers)


def asked(model: Model, size: Size, kind: str) -> Question:
    """One forward, with the patch that ``mhla bench transformer`` measures under this name."""
    own = family_of_model(model).default_config
    plain = Question(model, size, own.replace(**patch_settings(PLAIN, model.blocks)), steps=1, passes=1)
    return replace(plain, config=own.replace(**patch_settings(kind, model.blocks)))


HEADER = ("size", "attention", "forecast, ms", "measured, ms", "ratio")


def cells(one: Held) -> tuple[str, ...]:
    """Of a row of ``held.csv``."""
    return one.asked, one.attention, f"{1000 * one.forecast:.0f}", f"{1000 * one.measured:.0f}", f"{one.ratio:.2f}"


def main(files: list[str]) -> None:
    """Print a table of all files, and the ratio that is farthest from 1."""
    if not Path(files[0]).is_file():
        card = find_card(Path(files[0]))
        sys.stdout.write(text_table(HEADER, [cells(one) for one in compare_card(card)]) + "\n")
        return
    held = list(dict.fromkeys(one for file in files for one in compare(read_run(Path(file)))))
    rows = [
        (one.asked, one.known, one.attention, f"{one.forecast:.3g}", f"{one.measured:.3g}", f"{one.ratio:.2f}")
        for one in held
    ]
    header = ["size", "forecast from", "attention", "forecast s", "measured s", "ratio"]
    worst = max((max(one.ratio, 1 / one.ratio) for one in held), default=1.0)
    sys.stdout.write(f"{text_table(header, rows)}\nfarthest from 1: by a factor of {worst:.2f}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
