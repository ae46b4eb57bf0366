"""Candidates, and which to try next: a function of the trials so far, so a stopped run can resume."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from ..config import PROFILES, SparseConfig
from ..errors import check
from ..patching import apply_mhla, find_transformers, remove_mhla
from ..settings import Number, Positive, check_value

LADDERS: dict[str, tuple[Any, ...]] = {
    "density": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.3),
    "dense_first": (1, 0.1, 0.2, 0.3, 0.4),
    "dense_every": (0, 20, 10, 5),
    "dense_last": (0, 1),
    "dense_layers": (0, 1, 2),
}
"""Setting → the values that are tried, from cheap to faithful."""
THRESHOLDS = (0.2, 0.1, 0.05)
"""Thresholds of diffusers' First Block Cache to try, from cheap to faithful."""
DEFAULT_PSNR = 30.0
"""Target in dB where none is given."""


@dataclass(frozen=True)
class Candidate:
    """What a pipeline is called with: a patch, First Block Cache, both, or neither."""

    patch: tuple[Any, ...] | None = None
    """Values of the settings of ``LADDERS`` in their order; None for no patch."""
    cache: float | None = None
    """Threshold of First Block Cache; None for none."""

    @property
    def config(self) -> SparseConfig | None:
        """Settings of the patch."""
        return None if self.patch is None else SparseConfig(**dict(zip(LADDERS, self.patch, strict=True)))

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each value on its ladder."""
        return tuple(ladder.index(value) for ladder, value in zip(LADDERS.values(), self.patch or (), strict=True))

    @property
    def name(self) -> str:
        """The profile that it is nearest to and what differs, and the cache."""
        parts = []
        if self.patch is not None:
            changes = {
                name: [f"{key} {own}" for key, own, usual in zip(LADDERS, self.patch, of.patch or (), strict=True)
                       if own != usual]
                for name, of in profiles().items()
            }  # fmt: skip
            nearest = min(changes, key=lambda name: len(changes[name]))
            parts = [nearest, *changes[nearest]]
        if self.cache is not None:
            parts.append(f"First Block Cache {self.cache}")
        return ", ".join(parts) or "unpatched"

    def neighbours(self) -> "Iterator[Candidate]":
        """Yield the patches that differ in one setting by one place on its ladder."""
        for axis, ladder in enumerate(LADDERS.values()):
            for place in (self.places[axis] - 1, self.places[axis] + 1):
                if 0 <= place < len(ladder):
                    places = (*self.places[:axis], place, *self.places[axis + 1 :])
                    yield Candidate(tuple(values[at] for values, at in zip(LADDERS.values(), places, strict=True)))

    def cost(self, steps: int, depth: int) -> float:
        """Estimate the share of attention's pairs that a call computes: of its steps, in ``depth`` self-attentions."""
        if (config := self.config) is None:
            return 1.0
        dense_steps = len(config.dense_steps(steps)) / steps
        dense_layers = min(1.0, config.dense_layers / depth)
        return 1 - (1 - dense_steps) * (1 - dense_layers) * (1 - config.density)

    @contextmanager
    def applied(self, pipe: Any) -> Iterator[None]:
        """Context in which a pipeline runs this candidate; restores it afterwards."""
        transformers = find_transformers(pipe).values()
        if self.config is not None:
            apply_mhla(pipe, self.config)
        try:
            if self.cache is not None:
                from diffusers import FirstBlockCacheConfig

                for transformer in transformers:
                    transformer.enable_cache(FirstBlockCacheConfig(threshold=self.cache))  # type: ignore[operator]
            yield
        finally:
            for transformer in transformers:
                if getattr(transformer, "is_cache_enabled", False):
                    transformer.disable_cache()  # type: ignore[operator]
            if self.config is not None:
                remove_mhla(pipe)


@dataclass
class Trial:
    """What is known of a candidate: a line of ``candidates.jsonl``."""

    candidate: Candidate
    clips: list[dict[str, float]] = field(default_factory=list)
    """For each prompt judged: seconds, psnr, worst_psnr of a frame, ssim, and lpips where installed; means over frames.
    """
    peak_bytes: int | None = None
    """Most bytes that the CUDA allocator held; None on other devices."""
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

    @property
    def worst_frame(self) -> float:
        """Lowest PSNR of a frame in dB."""
        return min(clip["worst_psnr"] for clip in self.clips)


@dataclass(frozen=True)
class Target:
    """What is asked of the settings: a PSNR in dB, or a speedup over the unpatched pipeline."""

    psnr: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        check(
            self.psnr is None or self.speedup is None,
            f"psnr={self.psnr} and speedup={self.speedup} cannot be combined; give one of them.",
        )
        check_value("psnr", self.psnr, Annotated[Number, Field(gt=0, le=100)] | None)
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
    """What a run has found so far."""

    target: Target
    prompts: Sequence[str]
    trials: list[Trial]
    """The unpatched pipeline first; then candidates in the order of their trial."""
    remarks: Sequence[str]
    """What was left out, and why."""
    file: Path
    """``best.yaml``, for ``--patch`` and ``apply_mhla``; absent where no patch is best."""

    @property
    def best(self) -> Trial:
        """The best candidate that all prompts have judged, or one has; ValueError if none could run."""
        able = [trial for trial in self.trials[1:] if trial.clips]
        if not able:
            reasons = "; ".join(f"{trial.candidate.name}: {trial.failed}" for trial in self.trials[1:])
            raise ValueError(f"No candidate could be judged ({reasons or 'the time was over'}); give more minutes.")
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
        one = self.best.candidate
        what = [] if one.config is None else [str(self.file)]
        what += [] if one.cache is None else [f"First Block Cache {one.cache}"]
        text = f"{self.measured}: {' with '.join(what)}"
        if self.is_met:
            return text
        goal = f"{self.target.speedup:g}x" if self.target.speedup else f"{self.target.psnr:g} dB"
        return f"No candidate reaches {goal}; the best: {text}"


def profiles() -> dict[str, Candidate]:
    """Return the profiles, from cheap to faithful."""
    configs = {name: SparseConfig(**settings) for name, settings in reversed(PROFILES.items())}
    return {name: Candidate(tuple(getattr(one, key) for key in LADDERS)) for name, one in configs.items()}


def search_rank(trial: Trial, target: Target, steps: int, depth: int) -> tuple[bool, float]:
    """Rank a trial as :meth:`Target.rank`, for a PSNR by the estimated cost, so that noise decides nothing."""
    if target.psnr is None or trial.candidate.cache is not None:
        return target.rank(trial)
    return target.rank(replace(trial, speedup=1 / trial.candidate.cost(steps, depth)))


def next_candidate(
    trials: Sequence[Trial], target: Target, steps: int, depth: int, cache: bool = False
) -> Candidate | None:
    """Choose what to try next: the profiles, neighbours of the best on the ladders, then First Block Cache.

    If the best meets a target PSNR, its cheaper neighbours are tried, and what lies between it and the nearest miss;
    else its more faithful neighbours. For a speedup it is the other way round. With a target PSNR the choice does not
    depend on measured times. ``steps`` are of a call, ``depth`` counts the self-attentions of the transformer.
    ``cache`` tries First Block Cache alone and beside the best patch. None if nothing is left to try.
    """

    def effect(one: Candidate) -> object:  # with few steps several settings do the same
        config = one.config
        return one.cache, config and (config.density, config.dense_steps(steps), config.dense_layers)

    def cost(one: Candidate) -> float:
        return one.cost(steps, depth)

    def is_new(one: Candidate) -> bool:
        is_dense_throughout = one.config is not None and len(one.config.dense_steps(steps)) == steps
        return effect(one) not in tried and not is_dense_throughout

    tried = {effect(trial.candidate) for trial in trials}
    for profile in filter(is_new, profiles().values()):
        return profile
    patched = [trial for trial in trials if trial.clips and trial.candidate.config and trial.candidate.cache is None]

    def rank(trial: Trial) -> tuple[bool, float]:
        return search_rank(trial, target, steps, depth)

    best = min(patched, key=rank) if patched else None
    if best is not None:
        met = target.is_met(best)
        missed = [trial for trial in patched if not target.is_met(trial)] if met else []
        towards = 1 if met == (target.psnr is None) else -1  # faithful, or cheap
        own, found = cost(best.candidate), []
        for one in best.candidate.neighbours():
            is_hopeless = any(
                all(towards * a >= towards * b for a, b in zip(one.places, trial.candidate.places, strict=True))
                for trial in missed
            )
            if towards * cost(one) > towards * own and not is_hopeless:
                found.append(one)
        if missed:  # between the nearest miss and the best
            nearest = min(missed, key=rank).candidate
            between = sorted((cost(nearest), own))
            found += [one for one in nearest.neighbours() if between[0] < cost(one) < between[1]]
        if found := list(filter(is_new, found)):
            return min(found, key=cost)
    beside = [None, *([best.candidate.patch] if best else [])]
    cached = [Candidate(patch, threshold) for patch in beside for threshold in THRESHOLDS]
    return next((one for one in cached if cache and is_new(one)), None)
