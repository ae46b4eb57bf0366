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
from mhla_diffusers.benchmark.results import HYBRID, PLAIN, Row, Run, read_run
from mhla_diffusers.benchmark.speeds import find_card, measured_speeds, read_card
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
        known = [row for row in run.rows if row.case != case and row.model == rows[0].model]
        names = dict.fromkeys(row.case.removeprefix(f"{row.model} ") for row in known)
        whole = {row.variant: row for row in rows if row.part is None and row.median is not None}
        own = min((row for row in whole.values() if row.baseline), key=lambda row: row.median or math.inf, default=None)
        both = whole.keys() & {row.variant for row in known if row.part is not None}
        for kind in PATCHES:
            if own is None or kind not in both or kind == HYBRID:
                continue
            model, size = models()[str(own.model)], size_of(own)
            speeds = measured_speeds([replace(run, rows=known)], model, asked(model, size, kind).tokens, kind)
            counts = counted(model.name, size, kind, own.dtype, own.layers)
            times = forward_seconds(counts, own.layers or model.layers, speeds)
            for row, seconds in zip((own, whole[kind]), times, strict=True):
                attention = kind if row is not own else f"{row.variant}, beside {kind}"
                yield Held(", ".join(names), case, attention, sum(seconds.values()), float(row.median or 0))


def size_of(row: Row) -> Size:
    return Size(int(row.height or 0), int(row.width or 0), row.frames, row.batch)


def compare_card(folder: Path) -> Iterator[Held]:
    """Of every size of a card of which whole forwards were timed and no parts, softmax by cuDNN beside each patch."""
    whole, alone = read_card(folder)
    # with which no whole forward was timed
    alone = replace(alone, rows=[row for row in alone.rows if row.variant != "softmax FlashAttention-3"])
    with_parts = {row.case for row in whole.rows if row.part is not None}
    for row in whole.rows:
        if row.case in with_parts or row.variant not in ("softmax _native_cudnn", "MHLA", HYBRID):
            continue
        model = models()[str(row.model)]
        try:
            speeds = measured_speeds([whole, alone], model, int(row.tokens or 0), "MHLA")
        except ValueError:  # a model of which no parts were timed, nor of a relative
            continue
        counts = counted(model.name, size_of(row), "MHLA", row.dtype, None)
        one, other = (sum(seconds.values()) for seconds in forward_seconds(counts, model.layers, speeds))
        forecast = {"softmax _native_cudnn": one, HYBRID: (2 * other + one) / 3}.get(row.variant, other)
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
