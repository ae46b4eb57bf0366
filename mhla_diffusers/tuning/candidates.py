"""Candidates, and the choice of the next one: a function of the trials so far, so that a stopped run can resume."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, StrictFloat

from ..config import PROFILES, SparseConfig
from ..errors import check
from ..settings import Positive, check_value

LADDERS: dict[str, tuple[Any, ...]] = {
    "density": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.3),
    "dense_first": (1, 0.1, 0.2, 0.3, 0.4),
    "dense_every": (0, 20, 10, 5),
    "dense_last": (0, 1),
    "dense_layers": (0, 1, 2),
}
"""Setting → the values that are tried, from cheap to faithful."""
DEFAULT_PSNR = 30.0
"""Target in dB where none is given."""


@dataclass(frozen=True)
class Candidate:
    """A configuration to try: a patch, or none."""

    config: SparseConfig | None = None
    """Settings of the patch, each on its ladder; None for no patch."""

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each setting of the patch on its ladder."""
        return tuple(ladder.index(getattr(self.config, name)) for name, ladder in LADDERS.items())

    @property
    def name(self) -> str:
        """Name: the nearest profile, and what differs from it."""
        if self.config is None:
            return "unpatched"
        own = {name: getattr(self.config, name) for name in LADDERS}
        changes = {
            profile: [f"{name} {value}" for name, value in own.items() if value != getattr(usual, name)]
            for profile, usual in reversed(PROFILES.items())
        }
        nearest = min(changes, key=lambda profile: len(changes[profile]))
        return ", ".join([nearest, *changes[nearest]])

    def neighbours(self) -> "Iterator[Candidate]":
        """Yield the patches that differ in one setting by one place on its ladder."""
        assert self.config is not None
        for (name, ladder), own in zip(LADDERS.items(), self.places, strict=True):
            for place in (own - 1, own + 1):
                if 0 <= place < len(ladder):
                    yield Candidate(self.config.replace(**{name: ladder[place]}))


@dataclass
class Trial:
    """What is known of a candidate: a line of ``candidates.jsonl``."""

    candidate: Candidate
    clips: list[dict[str, float]] = field(default_factory=list)
    """For each prompt judged: seconds, psnr, ssim, and lpips where installed; means over frames."""
    failed: str = ""
    """Why it cannot run."""
    speedup: float = 1.0
    """Seconds of the unpatched pipeline for the same prompts, over its own."""

    @property
    def psnr(self) -> float:
        """Mean in dB over the clips judged."""
        return self.mean("psnr")

    def mean(self, name: str) -> float:
        """Mean of a value over the clips; NaN where it was not measured."""
        return fmean(clip.get(name, float("nan")) for clip in self.clips)

    @property
    def worst_clip(self) -> float:
        """Lowest PSNR of a clip in dB."""
        return min(clip["psnr"] for clip in self.clips)


@dataclass(frozen=True)
class Target:
    """The goal: a PSNR in dB, or a speedup over the unpatched pipeline."""

    psnr: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        check(
            self.psnr is None or self.speedup is None,
            f"psnr={self.psnr} and speedup={self.speedup} cannot be combined; give one of them.",
        )
        check_value("psnr", self.psnr, Annotated[StrictFloat, Field(gt=0, le=100)] | None)
        check_value("speedup", self.speedup, Positive | None)
        if self.speedup is None and self.psnr is None:
            object.__setattr__(self, "psnr", DEFAULT_PSNR)

    def is_met(self, trial: Trial) -> bool:
        """Whether a trial reaches it, on average over its clips."""
        return trial.speedup >= self.speedup if self.speedup is not None else trial.psnr >= (self.psnr or 0)

    def rank(self, trial: Trial) -> tuple[bool, float]:
        """Lower is better: of those that reach one goal the best in the other, else the nearest to it."""
        met = self.is_met(trial)
        return not met, -(trial.speedup if (self.speedup is None) == met else trial.psnr)


@dataclass
class Tuned:
    """The results of a run so far."""

    target: Target
    prompts: Sequence[str]
    trials: list[Trial]
    """The unpatched pipeline first; then candidates in the order of their trial."""
    remarks: Sequence[str]
    """What was left out, and why."""
    file: Path
    """``best.yaml``, for ``--patch`` and ``apply_mhla``."""

    @property
    def best(self) -> Trial:
        """The best candidate that all prompts have judged, or one has; ValueError if none could run."""
        able = [trial for trial in self.trials[1:] if trial.clips]
        if not able:
            reasons = "; ".join(f"{trial.candidate.name}: {trial.failed}" for trial in self.trials[1:])
            reasons = reasons or "time ran out, or every step is dense"
            raise ValueError(f"No candidate was measured ({reasons}); give more minutes or steps.")
        judged = [trial for trial in able if len(trial.clips) == len(self.prompts)]
        return min(judged or able, key=self.target.rank)

    @property
    def is_met(self) -> bool:
        """Whether the best candidate reaches the target."""
        return self.target.is_met(self.best)

    @property
    def measured(self) -> str:
        """What was measured of the best candidate, such as "30.4 dB (worst clip 27.9) at 1.9x"."""
        best, count = self.best, len(self.prompts)
        judged = "" if len(best.clips) == count else f" by {len(best.clips)} of {count} prompts"
        return f"{best.psnr:.1f} dB (worst clip {best.worst_clip:.1f}) at {best.speedup:.1f}x{judged}"

    def __str__(self) -> str:
        text = f"{self.measured}: {self.file}"
        if self.is_met:
            return text
        goal = f"{self.target.speedup:g}x" if self.target.speedup else f"{self.target.psnr:g} dB"
        return f"No candidate reaches {goal}; the best: {text}"


@dataclass(frozen=True)
class Search:
    """Chooses what to try next: the profiles, then neighbours of the best on the ladders.

    With a target PSNR the choice does not depend on measured times.
    """

    target: Target
    steps: int
    """Denoising steps of a call."""
    depth: int
    """Self-attentions of the transformer."""

    def cost(self, one: Candidate) -> float:
        """Estimate the share of attention's pairs that a call with a patch computes."""
        assert one.config is not None
        dense_steps = len(one.config.dense_steps(self.steps)) / self.steps
        dense_layers = min(1.0, one.config.dense_layers / self.depth)
        return 1 - (1 - dense_steps) * (1 - dense_layers) * (1 - one.config.density)

    def rank(self, trial: Trial) -> tuple[bool, float]:
        """Rank as :meth:`Target.rank`, for a PSNR by the estimated cost, so that noise decides nothing."""
        if self.target.psnr is None:
            return self.target.rank(trial)
        return self.target.rank(replace(trial, speedup=1 / self.cost(trial.candidate)))

    def next_candidate(self, trials: Sequence[Trial]) -> Candidate | None:
        """Return what to try after these trials; None if nothing is left.

        If the best meets a target PSNR, its cheaper neighbours are tried, and what lies between it and the nearest
        miss; else its more faithful neighbours. For a speedup it is the other way round.
        """
        tried = {self._effect(trial.candidate) for trial in trials}

        def is_new(one: Candidate) -> bool:
            effect = self._effect(one)
            return effect not in tried and len(effect[1]) < self.steps

        for profile in filter(is_new, map(Candidate, reversed(PROFILES.values()))):  # from cheap to faithful
            return profile
        able = [one for one in trials if one.clips]
        best = min(able, key=self.rank, default=None)
        found = filter(is_new, self._near(best, able)) if best else ()
        return min(found, key=self.cost, default=None)

    def _effect(self, one: Candidate) -> tuple[float, tuple[int, ...], int]:
        assert one.config is not None  # with few steps several settings do the same
        return one.config.density, one.config.dense_steps(self.steps), one.config.dense_layers

    def _near(self, best: Trial, able: Sequence[Trial]) -> Iterator[Candidate]:
        """Yield what may be better than the best trial."""
        met = self.target.is_met(best)
        missed = [trial for trial in able if met and not self.target.is_met(trial)]
        towards = 1 if met == (self.target.psnr is None) else -1  # faithful, or cheap
        own = self.cost(best.candidate)
        for one in best.candidate.neighbours():
            is_hopeless = any(
                all(towards * a >= towards * b for a, b in zip(one.places, trial.candidate.places, strict=True))
                for trial in missed
            )
            if towards * self.cost(one) > towards * own and not is_hopeless:
                yield one
        if missed:  # between the nearest miss and the best
            nearest = min(missed, key=self.rank).candidate
            low, high = sorted((self.cost(nearest), own))
            yield from (one for one in nearest.neighbours() if low < self.cost(one) < high)
