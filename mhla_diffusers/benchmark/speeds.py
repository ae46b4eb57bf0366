"""How fast the parts of a forward are: as ``mhla bench`` measured them, or at most, at rates that are stated."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from ..families import Model
from .conditions import Rates
from .parts import ATTENTION, PARTS
from .results import Row, Run
from .shapes import Cost

Reached = Mapping[str, float]
"""Part → how fast it is, as a fraction of what the device's rates allow; a part that is not there reaches them."""
_NEAR = 4
"""Times as many tokens, or as few, up to which nobody is told to measure nearer."""
_BACKENDS = ("eager", "triton")
"""What attentions by themselves are named after that a patched model runs without being compiled."""


@dataclass(frozen=True)
class Speeds:
    """Rates of a device, and how near the parts of a forward come to them."""

    rates: Rates
    unpatched: Reached
    patched: Reached
    source: str
    """Where they come from, as a line for people."""
    fixed_unpatched: Mapping[str, float] = field(default_factory=dict)
    fixed_patched: Mapping[str, float] = field(default_factory=dict)
    """Part → seconds that it takes in every layer whatever the size; told by two measured sizes, else none."""

    @property
    def is_measured(self) -> bool:
        """Whether there is a measurement behind them; if not, times are the least that the rates allow."""
        return bool(self.unpatched)

    def unpatched_seconds(self, costs: Mapping[str, Cost], layers: int) -> dict[str, float]:
        """Part → time of its cost in a forward of so many layers, without the patch."""
        return self._seconds(costs, layers, self.unpatched, self.fixed_unpatched)

    def patched_seconds(self, costs: Mapping[str, Cost], layers: int) -> dict[str, float]:
        """The same with the patch."""
        return self._seconds(costs, layers, self.patched, self.fixed_patched)

    def _seconds(
        self, costs: Mapping[str, Cost], layers: int, reached: Reached, fixed: Mapping[str, float]
    ) -> dict[str, float]:
        return {
            part: layers * fixed.get(part, 0.0) + least_seconds(cost, self.rates) / reached.get(part, 1.0)
            for part, cost in costs.items()
        }


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


def measured_speeds(run: Run, model: Model, tokens: int, kind: str) -> Speeds:
    """Speeds at the measured size that is nearest in tokens; at one of the same model, where there is one.

    Where results hold another size of that model, the two tell what a part takes whatever the size. Self-attention is
    as fast as that of the variant, all other parts as those of both variants together.

    Args:
        run: of ``mhla bench transformer``, or of ``mhla bench op``, which holds self-attention alone.
        model: that is asked about.
        tokens: N that is asked about.
        kind: of the patch, one of :data:`mhla_diffusers.benchmark.candidates.PATCHES`.

    Raises:
        ValueError: another command's results, or results without what is needed.
    """
    if run.command not in _PAIRS:
        raise ValueError(
            f"A forecast needs results of {' or '.join(f'mhla bench {name}' for name in _PAIRS)}; "
            f"these are of mhla bench {run.command}."
        )
    cases = {case: list(rows) for case, rows in groupby(run.rows, key=lambda row: row.case)}
    pairs = {case: pair for case, rows in cases.items() if (pair := _PAIRS[run.command](rows, kind)) is not None}
    if not pairs:
        there = ", ".join(dict.fromkeys(row.variant for row in run.rows if row.median is not None))
        raise ValueError(
            f"These results hold no case with FLOPs of the parts of both {kind!r} and of what it replaces; measured "
            f"are {there or 'none'}. Measure anew: mhla bench transformer --model {model.name}."
        )

    def distance(case: str) -> tuple[bool, float]:
        measured = next(row.tokens for row in cases[case] if row.tokens)
        return not case.startswith((f"{model.name} ", f"{model.name}-")), abs(math.log(tokens / measured))

    case, *others = sorted(pairs, key=distance)
    near, layers = next(row.tokens for row in cases[case] if row.tokens), _layers(cases[case])
    alike = [one for one in others if distance(one)[0] == distance(case)[0] and _layers(cases[one]) == layers]
    other = next(iter(alike), None)
    unpatched, patched = (
        _paces(*(pairs[one][index] for one in (case, other) if one is not None), rates=run.rates) for index in (0, 1)
    )
    both = [_together(*pairs[one]) for one in (case, other) if one is not None]
    common = {part: pace for part, pace in _paces(*both, rates=run.rates).items() if part != ATTENTION}
    alone = "" if common else " of self-attention alone; all else is at the rates of the same file, a bound"
    beside = f" and {other}" if other is not None else ""
    source = (
        f"as measured at {case}{beside}, {near:,} tokens{_compared(near, tokens)}, on {run.conditions.device}{alone}."
    )
    # what is common is of two forwards
    fixed = {part: pace.fixed / (2 * layers) for part, pace in common.items()}
    return Speeds(
        run.rates,
        {part: pace.reached for part, pace in common.items()} | {ATTENTION: unpatched[ATTENTION].reached},
        {part: pace.reached for part, pace in common.items()} | {ATTENTION: patched[ATTENTION].reached},
        source,
        fixed | {ATTENTION: unpatched[ATTENTION].fixed / layers},
        fixed | {ATTENTION: patched[ATTENTION].fixed / layers},
    )


def _layers(rows: list[Row]) -> int:
    """That were timed; an attention by itself counts as one."""
    return max((row.layers or 1 for row in rows), default=1)


def _together(unpatched: "Mapping[str, _Time]", patched: "Mapping[str, _Time]") -> "dict[str, _Time]":
    return {part: unpatched[part] + patched[part] for part in PARTS if part in unpatched and part in patched}


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
class _Pace:
    """Of a part: what of the rates it reaches, and seconds that come to it whatever the size."""

    reached: float
    fixed: float


def _paces(near: Mapping[str, _Time], other: Mapping[str, _Time] | None = None, *, rates: Rates) -> dict[str, _Pace]:
    return {part: _pace(time, None if other is None else other.get(part), rates) for part, time in near.items()}


def _pace(near: _Time, other: _Time | None, rates: Rates) -> _Pace:
    """A line through two times where they lie on one that means something, else through nothing and the nearer."""
    least = least_seconds(near.cost, rates)
    if other is not None and (more := least_seconds(other.cost, rates) - least):
        slope = (other.seconds - near.seconds) / more
        fixed = near.seconds - slope * least
        if slope >= 1 and fixed > 0:
            return _Pace(1 / slope, fixed)
    return _Pace(least / near.seconds, 0.0)


_Pair = tuple[dict[str, _Time], dict[str, _Time]]
"""Times of the parts of the fastest baseline, and of a patch."""


def _pair_of_transformer(rows: list[Row], kind: str) -> _Pair | None:
    """None where a case lacks one of the two, or was measured before parts were counted."""
    wholes = {row.variant: row for row in rows if row.part is None}
    parts = {name: _parts(row, rows) for name, row in wholes.items()}
    own = [row for row in wholes.values() if row.baseline and ATTENTION in parts[row.variant]]
    if not own or ATTENTION not in parts.get(kind, {}):
        return None
    return parts[min(own, key=lambda row: row.median or math.inf).variant], parts[kind]


def _parts(whole: Row, rows: list[Row]) -> dict[str, _Time]:
    """Times of a variant's parts, which share out the time of the whole forward; without parts that do nothing."""
    found = [row for row in rows if row.variant == whole.variant and row.part is not None and row.median is not None]
    measured = sum(row.median or 0.0 for row in found)
    if whole.median is None or not measured:
        return {}
    share = whole.median / measured
    times = {row.part: _time(row, share) for row in found if row.part is not None}
    return {part: time for part, time in times.items() if time is not None}


def _pair_of_operation(rows: list[Row], kind: str) -> _Pair | None:
    """The fastest softmax, and the fastest backend of the patch."""
    forward = [row for row in rows if row.stage == "forward" and row.median is not None]
    own = [row for row in forward if row.baseline]
    patched = [row for row in forward if row.variant in [f"{kind} {backend}" for backend in _BACKENDS]]
    fastest = [min(some, key=lambda row: row.median or math.inf, default=None) for some in (own, patched)]
    times = [None if row is None else _time(row) for row in fastest]
    if times[0] is None or times[1] is None:
        return None
    return {ATTENTION: times[0]}, {ATTENTION: times[1]}


def _time(row: Row, share: float = 1.0) -> _Time | None:
    """None of what was not counted, or does nothing."""
    cost = Cost(row.flops or 0, row.bytes or 0)
    return _Time(cost, share * row.median) if row.median and row.median > 0 and cost != Cost(0, 0) else None


_PAIRS: dict[str, Callable[[list[Row], str], _Pair | None]] = {
    "transformer": _pair_of_transformer,
    "op": _pair_of_operation,
}
"""Command → how its rows are read."""
