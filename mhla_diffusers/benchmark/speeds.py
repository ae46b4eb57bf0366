"""Speeds of the parts of a forward: measured by ``mhla bench``, or an upper bound from given rates.

Times of some cards ship with this package: folders of results, found by a part of their name.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..families import Model
from .models import models
from .parts import ATTENTION, PARTS, REST
from .results import CONTENT, EARLIER, Rates, Row, Run, read_run
from .shapes import Cost

_COMMANDS = ("transformer", "op")
"""Commands whose results give speeds: whole forwards with their parts, and self-attention alone."""
_HELD = "held.csv"
"""Forecasts of whole forwards beside what was measured; ``python -m tests.benchmark.compare_forecast`` prints them."""


@dataclass(frozen=True)
class Pace:
    """How fast a part of a forward is."""

    reached: float = 1.0
    """What of the device's rates it reaches."""
    fixed: float = 0.0
    """Seconds per layer independent of size, from two measured sizes; else 0."""


@dataclass(frozen=True)
class Speeds:
    """Rates of a device, and the fraction of them that the parts of a forward reach."""

    rates: Rates
    unpatched: Mapping[str, Pace]
    """A missing part is assumed to reach the rates."""
    patched: Mapping[str, Pace]
    source: str
    """Where they come from, as a line for people."""
    around: tuple[float, float] = (0.0, 0.0)
    """Norms and RoPE around self-attention, unpatched and patched: seconds that belong to self-attention for every
    second that the rates allow the rest, with which they grow. 0 where self-attention was timed with them."""
    of_earlier_branch: bool = False
    """Whether the patch was timed with the sparse branch before this one."""

    @property
    def is_measured(self) -> bool:
        """Whether they are measured; if not, times are lower bounds from the rates."""
        return bool(self.unpatched)

    def seconds(self, costs: Mapping[str, Cost], layers: int, *, patched: bool) -> dict[str, float]:
        """Part → time of its cost in a forward of so many layers."""
        paces, found = self.patched if patched else self.unpatched, {}
        for part, cost in costs.items():
            pace = paces.get(part, Pace())
            found[part] = layers * pace.fixed + least_seconds(cost, self.rates) / pace.reached
        found[ATTENTION] += self.around[patched] * least_seconds(costs[REST], self.rates)
        return found


def least_seconds(cost: Cost, rates: Rates) -> float:
    """What the rates of matrix products and of copying allow: the roofline."""
    return max(cost.flops / rates.matmul, cost.bytes / rates.copy)


def stated_speeds(matmul: float, copy: float) -> Speeds:
    """Every part at given rates, in FLOP/s and bytes/s.

    Raises:
        ValueError: a rate that is not positive.
    """
    for name, rate in (("matmul-rate", matmul), ("copy-rate", copy)):
        if not 0 < rate < math.inf:
            raise ValueError(f"--{name} {rate:g} must be positive, for example the peak of a data sheet such as 1e14.")
    source = (
        f"at the rates stated, {matmul:.3g} FLOP/s and {copy:.3g} bytes/s.\n"
        "This is a bound and no measurement: no part reaches these rates throughout, and softmax and the patch come to "
        "them\nto different degrees, so the speed-up will be another."
    )
    return Speeds(Rates(matmul, "stated", copy), {}, {}, source)


# ---- as measured ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Time:
    """Of a part that was measured."""

    cost: Cost
    seconds: float

    def __add__(self, other: "_Time") -> "_Time":
        return _Time(self.cost + other.cost, self.seconds + other.seconds)


@dataclass(frozen=True)
class _Case:
    """A model at a size, measured without and with the patch."""

    name: str
    model: Model
    tokens: int
    layers: int
    """That were timed; an attention by itself counts as one."""
    variants: tuple[str, str]
    """The fastest one to be faster than, and the one that stands for the patch."""
    times: dict[str, dict[str, _Time]]
    """Variant → part → time."""

    @property
    def sides(self) -> tuple[dict[str, _Time], dict[str, _Time]]:
        """Parts without and with the patch."""
        return self.times[self.variants[0]], self.times[self.variants[1]]


def measured_speeds(runs: Sequence[Run], model: Model, tokens: int, kind: str) -> Speeds:
    """Speeds of a model on a device, from measurements of that model or of its class with heads of the same length.

    Every part has the speed of the measured size nearest in tokens; a second size gives the time that does not depend
    on size. Self-attention has separate speeds with and without the patch; all other parts share theirs. If
    self-attention was also measured alone, its speed comes from there, and whole forwards give the norms and RoPE
    around it. If the sparse branch was not measured, its predecessor is used.

    Args:
        runs: of one device, by ``mhla bench transformer`` or ``mhla bench op``, which holds self-attention alone.
        model: that is asked about.
        tokens: N that is asked about.
        kind: of the patch, as rows name it.

    Raises:
        ValueError: another command's results, or results without what is needed.
    """
    for run in runs:
        if run.command not in _COMMANDS:
            raise ValueError(
                f"A forecast needs results of {' or '.join(f'mhla bench {name}' for name in _COMMANDS)}; "
                f"these are of mhla bench {run.command}."
            )
    whole, alone = (
        _nearest([case for run in runs if run.command == name for case in _cases(run, kind)], model, tokens)
        for name in _COMMANDS
    )
    if not whole and not alone:
        raise ValueError(_what_is_missing(runs, model, kind))
    rates, conditions = runs[0].rates, runs[0].conditions
    around = _around(whole, alone, rates)
    attention = alone if around is not None or not whole else whole
    common: dict[str, Pace] = {}
    if whole:  # parts but self-attention, of both forwards together
        both = [
            {part: one[part] + other[part] for part in PARTS if part != ATTENTION and part in one and part in other}
            for one, other in (case.sides for case in whole)
        ]
        common = _paces(both, rates, 2 * whole[0].layers)
    unpatched, patched = (
        common | _paces([{ATTENTION: case.sides[side][ATTENTION]} for case in attention], rates, attention[0].layers)
        for side in (0, 1)
    )
    cases, near = whole or alone, (whole or alone)[0].tokens
    source = f"as measured at {' and '.join(case.name for case in cases)}, {near:,} tokens"
    if near != tokens:
        times = max(near, tokens) / min(near, tokens)
        source += f", {times:.3g} times {'fewer' if near < tokens else 'more'} than asked for"
        source += " (far: measure nearer)" if times > 4 else ""
    source += f", on {conditions.device}"
    if not whole:
        source += " of self-attention alone; all else is at the rates of the same file, a bound"
    elif attention is alone:
        source += f" ({conditions.date});\nself-attention ({' and '.join(alone[0].variants)}) as alone at "
        source += (
            f"{' and '.join(case.name for case in alone)}, with the norms and RoPE that whole forwards take around it"
        )
    earlier = attention[0].variants[1] in EARLIER
    return Speeds(rates, unpatched, patched, f"{source}.", around or (0.0, 0.0), earlier)


def _cases(run: Run, kind: str) -> Iterator[_Case]:
    """Those that hold both the patch and what it replaces."""
    for name, group in groupby(run.rows, key=lambda row: row.case):
        rows = list(group)
        times: dict[str, dict[str, _Time]] = {}
        fastest: dict[str, float] = {}
        own: list[str] = []
        for row in rows:
            parts = _parts(row, rows) if run.command == "transformer" else _alone(row)
            # without the backend of a patch, and of softmax the same name in whole forwards and alone
            variant = row.variant.removesuffix(" eager").removesuffix(" triton").replace("_native_", "")
            seconds = sum(time.seconds for time in parts.values())
            if ATTENTION in parts and seconds <= fastest.get(variant, math.inf):
                times[variant], fastest[variant] = parts, seconds
                own += [variant] if row.baseline else []
        model = _model_of(rows[0])
        patch = next((one for one in ((CONTENT, *EARLIER) if kind == CONTENT else (kind,)) if one in times), None)
        if model is not None and own and patch is not None:
            tokens = next(row.tokens for row in rows if row.tokens)
            layers = max(row.layers or 1 for row in rows)
            yield _Case(name, model, tokens, layers, (min(own, key=fastest.__getitem__), patch), times)


def _parts(whole: Row, rows: list[Row]) -> dict[str, _Time]:
    """Times of a variant's parts, which share out the time of the whole forward; without parts that do nothing."""
    found = [row for row in rows if row.variant == whole.variant and row.part is not None and row.median is not None]
    measured = sum(row.median or 0.0 for row in found)
    if whole.part is not None or whole.median is None or not measured:
        return {}
    share = whole.median / measured
    times = {row.part: _time(row, share) for row in found if row.part is not None}
    return {part: time for part, time in times.items() if time is not None}


def _alone(row: Row) -> dict[str, _Time]:
    """Of an attention by itself, forward."""
    time = _time(row) if row.stage == "forward" else None
    return {} if time is None else {ATTENTION: time}


def _time(row: Row, share: float = 1.0) -> _Time | None:
    """None if it was not counted or does nothing."""
    cost = Cost(row.flops or 0, row.bytes or 0)
    return _Time(cost, share * row.median) if row.median and row.median > 0 and cost != Cost(0, 0) else None


def _model_of(row: Row) -> Model | None:
    """Of a whole model by its name; an attention by itself is named after a model and a size."""
    return models().get(row.model or row.case.rpartition("-")[0])


def _is_related(one: Model | None, other: Model) -> bool:
    """Whether all that differs is how many layers and heads there are."""
    return one is not None and (one.transformer, one.head_dim) == (other.transformer, other.head_dim)


def _nearest(cases: Sequence[_Case], model: Model, tokens: int) -> list[_Case]:
    """The nearest in tokens and another of the same model and layers, of this model rather than of a relative."""
    related = [case for case in cases if _is_related(case.model, model)]
    ordered = sorted(related, key=lambda case: (case.model != model, abs(math.log(tokens / case.tokens))))
    first = ordered[:1]
    alike = [case for case in ordered[1:] if (case.model, case.layers) == (first[0].model, first[0].layers)]
    return first + alike[:1]


def _paces(cases: Sequence[Mapping[str, _Time]], rates: Rates, layers: int) -> dict[str, Pace]:
    """Part → a line through two times where that means something, else through nothing and the nearer one."""
    near, *others = cases
    found = {}
    for part, time in near.items():
        least = least_seconds(time.cost, rates)
        found[part] = Pace(least / time.seconds)
        if others and part in others[0]:
            other = others[0][part]
            if more := least_seconds(other.cost, rates) - least:
                slope = (other.seconds - time.seconds) / more
                fixed = time.seconds - slope * least
                if slope >= 1 and fixed > 0:
                    found[part] = Pace(1 / slope, fixed / layers)
    return found


def _around(whole: Sequence[_Case], alone: Sequence[_Case], rates: Rates) -> tuple[float, float] | None:
    """:attr:`Speeds.around`; None where whole forwards and attentions alone were not measured at the same size."""
    for case in alone if whole else ():
        near = whole[0]
        if case.tokens == near.tokens and case.model == near.model and set(near.variants) <= case.times.keys():
            one, other = (
                (parts[ATTENTION].seconds - near.layers * case.times[name][ATTENTION].seconds)
                / least_seconds(parts[REST].cost, rates)
                for name, parts in zip(near.variants, near.sides, strict=True)
            )
            return max(0.0, one), max(0.0, other)
    return None


def _what_is_missing(runs: Sequence[Run], model: Model, kind: str) -> str:
    rows = [row for run in runs for row in run.rows if row.median is not None]
    related = dict.fromkeys(row.variant for row in rows if _is_related(_model_of(row), model))
    others = dict.fromkeys(other.name if (other := _model_of(row)) else row.case for row in rows)
    there = ", ".join(related) or f"other models: {', '.join(others) or 'none'}"
    return (
        f"These results hold no case with FLOPs of the parts of both {kind!r} and of what it replaces "
        f"for {model.name}, or for another {model.transformer} with heads of {model.head_dim}; measured are {there}. "
        f"Measure anew: mhla bench transformer --model {model.name}."
    )


# ---- cards whose times ship -----------------------------------------------------------------------------------------


def known_cards() -> dict[str, Path]:
    """Name → folder, such as nvidia-h100-80gb-hbm3; inside an installed package, or in a checkout's ``assets/``."""
    package = Path(__file__).parents[1]
    installed = package / "cards"
    folder = installed if installed.is_dir() else package.parent / "assets" / "benchmarks"
    return {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{_HELD}"))}


def find_card(device: str | Path) -> Path:
    """Folder of a known card, by a part of its name, such as h100.

    Raises:
        ValueError: a part of the names of several cards.
        FileNotFoundError: of none, and there is no such file either.
    """
    cards = known_cards()
    found = [name for name in cards if str(device).lower() in name]
    if len(found) > 1:
        raise ValueError(f"--device {device} is a part of {' and of '.join(found)}; give more of the name.")
    if not found:
        raise FileNotFoundError(
            f"--device {device} is no file and no card whose times ship; those are {', '.join(cards)} (a part of the "
            "name will do). Else give the JSON that mhla bench transformer has written, such as "
            "outputs/benchmark/DEVICE/transformer.json."
        )
    return cards[found[0]]


def read_card(card: Path) -> list[Run]:
    """What a known card was measured with: whole forwards with their parts, and self-attention alone."""
    return [read_run(card / f"{command}.json") for command in _COMMANDS]


def what_was_measured(card: Path) -> tuple[str, str]:
    """Date of a known card's measurements, and the models that forecasts are made of."""
    names = dict.fromkeys(row["size"].split()[0] for row in _held(card))
    return read_card(card)[0].conditions.date, ", ".join(names)


def held_against(card: Path) -> str:
    """Accuracy of forecasts of whole forwards on a known card, as a line of text."""
    ratios = [float(row["ratio"]) for row in _held(card)]
    return (
        f"Held against {len(ratios)} whole forwards on this card that they do not know (cuDNN's softmax, MHLA, hybrid, "
        f"and the earlier sparse branch at 5 %), forecasts were {min(ratios):.2f} to {max(ratios):.2f} times the "
        "measured. No whole forward with FlashAttention-3 or with blocks chosen by content was measured."
    )


def _held(card: Path) -> list[dict[str, str]]:
    with (card / _HELD).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
