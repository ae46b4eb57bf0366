"""How fast the parts of a forward are: as ``mhla bench`` measured them, or at most, at rates that are stated."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..families import Model
from .candidates import CONTENT, EARLIER
from .conditions import Rates
from .models import models
from .parts import ATTENTION, PARTS, REST
from .results import Row, Run
from .shapes import Cost

_NEAR = 4
"""Times as many tokens, or as few, up to which nobody is told to measure nearer."""
_COMMANDS = ("transformer", "op")
"""Whose results tell speeds: of whole forwards with their parts, and of self-attention alone."""


@dataclass(frozen=True)
class Pace:
    """How fast a part of a forward is."""

    reached: float = 1.0
    """What of the device's rates it reaches."""
    fixed: float = 0.0
    """Seconds of every layer whatever the size; told by two measured sizes, else none."""


@dataclass(frozen=True)
class Speeds:
    """Rates of a device, and how near the parts of a forward come to them."""

    rates: Rates
    unpatched: Mapping[str, Pace]
    """A part that is not there reaches the rates."""
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
        """Whether there is a measurement behind them; if not, times are the least that the rates allow."""
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
    """Every part at rates that somebody states.

    Args:
        matmul: FLOP/s.
        copy: bytes/s.

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


def measured_speeds(runs: Sequence[Run], model: Model, tokens: int, kind: str) -> Speeds:
    """Speeds of a model on a device, from measurements of that model or of its class with heads of the same length.

    Every part is as fast as at the measured size that is nearest in tokens; a second size tells what it takes whatever
    the size. Self-attention has a speed of its own with and without the patch, all other parts share theirs. Where
    self-attention was measured alone as well, that tells its speed, and whole forwards tell the norms and RoPE around
    it. Where the sparse branch was not measured, the one before it stands for it.

    Args:
        runs: of one device, by ``mhla bench transformer`` or ``mhla bench op``, which holds self-attention alone.
        model: that is asked about.
        tokens: N that is asked about.
        kind: of the patch, one of :data:`mhla_diffusers.benchmark.candidates.PATCHES`.

    Raises:
        ValueError: another command's results, or results without what is needed.
    """
    wrong = [run.command for run in runs if run.command not in _COMMANDS]
    if wrong:
        raise ValueError(
            f"A forecast needs results of {' or '.join(f'mhla bench {name}' for name in _COMMANDS)}; "
            f"these are of mhla bench {wrong[0]}."
        )
    whole, alone = (
        _nearest([case for run in runs if run.command == name for case in _cases(run, kind)], model, tokens)
        for name in _COMMANDS
    )
    if not whole and not alone:
        raise ValueError(_what_is_missing(runs, model, kind))
    rates, around = runs[0].rates, _around(whole, alone, runs[0].rates)
    attention = alone if around is not None or not whole else whole
    common = _paces([case.common for case in whole], rates, 2 * whole[0].layers) if whole else {}  # of two forwards
    unpatched, patched = (
        common | _paces([{ATTENTION: case.sides[side][ATTENTION]} for case in attention], rates, attention[0].layers)
        for side in (0, 1)
    )
    source = _source(whole, alone, attention, runs[0], tokens)
    return Speeds(rates, unpatched, patched, source, around or (0.0, 0.0), attention[0].patch in EARLIER)


def _what_is_missing(runs: Sequence[Run], model: Model, kind: str) -> str:
    rows = [row for run in runs for row in run.rows if row.median is not None]
    related = dict.fromkeys(row.variant for row in rows if _is_related(_model_of(row), model))
    others = dict.fromkeys(other.name if (other := _model_of(row)) else row.case for row in rows)
    there = ", ".join(related) or f"other models: {', '.join(others) or 'none'}"
    return (
        f"These results hold no case with FLOPs of the parts of both {kind!r} and of what it replaces "
        f"for {model.name}, "
        f"or for another {model.transformer} with heads of {model.head_dim}; measured are {there}. "
        f"Measure anew: mhla bench transformer --model {model.name}."
    )


def _model_of(row: Row) -> Model | None:
    """Of a whole model by its name; an attention by itself is named after a model and a size."""
    return models().get(row.model or row.case.rpartition("-")[0])


def _is_related(one: Model | None, other: Model) -> bool:
    """Whether all that differs is how many layers and heads there are."""
    return one is not None and (one.transformer, one.head_dim) == (other.transformer, other.head_dim)


def _around(whole: "Sequence[_Case]", alone: "Sequence[_Case]", rates: Rates) -> tuple[float, float] | None:
    """:attr:`Speeds.around`; None where whole forwards and attentions alone were not measured at the same size."""
    for case in alone if whole else ():
        names = (whole[0].baseline, whole[0].patch)
        if case.tokens == whole[0].tokens and case.model == whole[0].model and set(names) <= case.times.keys():
            one, other = (
                (parts[ATTENTION].seconds - whole[0].layers * case.times[name][ATTENTION].seconds)
                / least_seconds(parts[REST].cost, rates)
                for name, parts in zip(names, whole[0].sides, strict=True)
            )
            return max(0.0, one), max(0.0, other)
    return None


def _source(
    whole: "Sequence[_Case]", alone: "Sequence[_Case]", attention: "Sequence[_Case]", run: Run, tokens: int
) -> str:
    cases, conditions = whole or alone, run.conditions
    near = cases[0].tokens
    text = f"as measured at {_names(cases)}, {near:,} tokens{_compared(near, tokens)}, on {conditions.device}"
    if not whole:
        return f"{text} of self-attention alone; all else is at the rates of the same file, a bound."
    if attention is alone:
        text += f" ({conditions.date});\nself-attention ({alone[0].baseline} and {alone[0].patch}) as alone at "
        text += f"{_names(alone)}, with the norms and RoPE that whole forwards take around it"
    return f"{text}."


def _names(cases: "Sequence[_Case]") -> str:
    return " and ".join(case.name for case in cases)


def _compared(measured: int, asked: int) -> str:
    if measured == asked:
        return ""
    times = max(measured, asked) / min(measured, asked)
    far = " (far: measure nearer)" if times > _NEAR else ""
    return f", {times:.3g} times {'fewer' if measured < asked else 'more'} than asked for{far}"


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
    times: dict[str, dict[str, _Time]]
    """Variant → part → time."""
    baseline: str
    """The fastest variant to be faster than."""
    patch: str
    """The variant that stands for the patch."""

    @property
    def sides(self) -> tuple[dict[str, _Time], dict[str, _Time]]:
        """Parts without and with the patch."""
        return self.times[self.baseline], self.times[self.patch]

    @property
    def common(self) -> dict[str, _Time]:
        """Parts but self-attention, of both forwards together."""
        one, other = self.sides
        return {part: one[part] + other[part] for part in PARTS if part != ATTENTION and part in one and part in other}


def _cases(run: Run, kind: str) -> Iterator[_Case]:
    """Those that hold both the patch and what it replaces."""
    for name, group in groupby(run.rows, key=lambda row: row.case):
        rows = list(group)
        model = _model_of(rows[0])
        times: dict[str, dict[str, _Time]] = {}
        fastest: dict[str, float] = {}
        own: list[str] = []
        for row in rows:
            parts = _parts(row, rows) if run.command == "transformer" else _alone(row)
            variant = _variant(row)
            seconds = sum(time.seconds for time in parts.values())
            if ATTENTION not in parts or seconds > fastest.get(variant, math.inf):
                continue
            times[variant], fastest[variant] = parts, seconds
            if row.baseline:
                own.append(variant)
        names = (CONTENT, *EARLIER) if kind == CONTENT else (kind,)
        patch = next((one for one in names if one in times), None)
        if model is not None and own and patch is not None:
            tokens = next(row.tokens for row in rows if row.tokens)
            layers = max((row.layers or 1 for row in rows), default=1)
            yield _Case(name, model, tokens, layers, times, min(own, key=fastest.__getitem__), patch)


def _variant(row: Row) -> str:
    """Name without the backend of a patch, and of softmax the same name in whole forwards and alone."""
    return row.variant.removesuffix(" eager").removesuffix(" triton").replace("_native_", "")


def _nearest(cases: Sequence[_Case], model: Model, tokens: int) -> list[_Case]:
    """The nearest in tokens and another of the same model and layers, of this model rather than of a relative."""
    related = [case for case in cases if _is_related(case.model, model)]
    ordered = sorted(related, key=lambda case: (case.model != model, abs(math.log(tokens / case.tokens))))
    first = ordered[:1]
    alike = [case for case in ordered[1:] if (case.model, case.layers) == (first[0].model, first[0].layers)]
    return first + alike[:1]


def _paces(cases: Sequence[Mapping[str, _Time]], rates: Rates, layers: int) -> dict[str, Pace]:
    near, *others = cases
    return {part: _pace(time, others[0].get(part) if others else None, rates, layers) for part, time in near.items()}


def _pace(near: _Time, other: _Time | None, rates: Rates, layers: int) -> Pace:
    """A line through two times where they lie on one that means something, else through nothing and the nearer."""
    least = least_seconds(near.cost, rates)
    if other is not None and (more := least_seconds(other.cost, rates) - least):
        slope = (other.seconds - near.seconds) / more
        fixed = near.seconds - slope * least
        if slope >= 1 and fixed > 0:
            return Pace(1 / slope, fixed / layers)
    return Pace(least / near.seconds)


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
    """None of what was not counted, or does nothing."""
    cost = Cost(row.flops or 0, row.bytes or 0)
    return _Time(cost, share * row.median) if row.median and row.median > 0 and cost != Cost(0, 0) else None
