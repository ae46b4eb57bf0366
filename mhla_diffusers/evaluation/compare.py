"""Compare sample sets of variants of one model: scores, and differences over the same samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from ..files import check_unique
from ..generation.record import Record, Sample
from ..generation.similarity import Similarity
from ..reporting import progress
from .images import read_sample, require_samples

SampleScore = Callable[[Sequence[torch.Tensor], Sequence[str]], torch.Tensor]
"""Maps uint8 images (3, H, W) or videos (F, 3, H, W) and their texts to a score for each: (B,)."""
_FRAMES = 8
"""Frames per similarity computation."""
_RESAMPLES = 2000
"""Resampled means of a bootstrap."""


class Mean(NamedTuple):
    """A mean over samples, and the ends of its 95 % interval; None for one sample."""

    value: float
    low: float | None
    high: float | None


def mean_of(values: torch.Tensor) -> Mean:
    """Return the mean of values (n,) with the percentile bootstrap's interval, which stays within their range."""
    if len(values) < 2:
        return Mean(float(values.mean()), None, None)
    generator = torch.Generator().manual_seed(0)
    means = [values[torch.randint(len(values), (len(values),), generator=generator)].mean() for _ in range(_RESAMPLES)]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return Mean(float(values.mean()), low, high)


@dataclass(frozen=True)
class Variant:
    """One sample set and its measurements."""

    folder: Path
    record: Record
    scores: dict[str, Mean] = field(default_factory=dict)
    """Score, or similarity to the first variant's samples from the same noise."""
    differences: dict[str, Mean] = field(default_factory=dict)
    """Score → difference from the first variant, over the same samples."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name


def read_variants(folders: Sequence[Path]) -> list[Variant]:
    """Read sample sets; ValueError unless they hold the same samples, made with the same settings and seeds."""
    variants = [Variant(folder, require_samples(folder)) for folder in folders]
    check_unique([variant.name for variant in variants], "Rows are named after folders, and the name")
    for first, second in pairwise(variants):
        for name in ("family", "model", "model_content", "dtype", "settings"):
            one, other = first.record.choices.get(name), second.record.choices.get(name)
            if one != other:
                raise ValueError(
                    f"{first.folder} and {second.folder} differ in {name} ({one!r} and {other!r}); only sets that "
                    "differ only in the attention can be compared."
                )
        if first.record.samples != second.record.samples:
            raise ValueError(
                f"{first.folder} and {second.folder} hold different samples; generate the same set with both."
            )
    return variants


def compare_sets(
    folders: Sequence[Path],
    *,
    sample_scores: Mapping[str, SampleScore] | None = None,
    similarities: Mapping[str, Similarity] | None = None,
) -> tuple[list[Variant], list[str]]:
    """Measure every variant, and its differences from the first one over the same samples; also return remarks.

    ``similarities`` are measures between every sample and the first variant's from the same noise, averaged over the
    frames of a video; see :func:`load_similarities`. ValueError for sets that cannot be compared, nothing to compare
    by, damaged files, or a score that is not one number per sample.
    """
    base, *others = variants = read_variants(folders)
    if not (sample_scores or (similarities and others)):
        raise ValueError("Give --clip-model, --score NAME=package.module:callable or a second set to compare with.")
    for name, function in (sample_scores or {}).items():
        expected = score_samples(base.folder, base.record.samples, name, function)
        base.scores[name] = mean_of(expected)
        for variant in others:
            found = score_samples(variant.folder, variant.record.samples, name, function)
            variant.scores[name], variant.differences[name] = mean_of(found), mean_of(found - expected)
    remarks: list[str] = []
    for variant in others if similarities else ():
        for name, frames in _similar_frames(base, variant, similarities or {}).items():
            variant.scores[name] = mean_of(torch.stack([values.mean() for values in frames]))
            if name == "psnr":
                value, frame, file = min(
                    (float(values.min()), int(values.argmin()), sample.file)
                    for values, sample in zip(frames, base.record.samples, strict=True)
                )
                remarks.append(f"The lowest PSNR in {variant.name} is {value:.1f} dB, of frame {frame} of {file}.")
    return variants, remarks


def score_samples(
    folder: Path, samples: Sequence[Sample], name: str, sample_score: SampleScore, batch_size: int = 50
) -> torch.Tensor:
    """Score every sample of a folder: float64 (n,); ValueError for a score that is not one finite number per sample."""
    parts: list[torch.Tensor] = []
    for start in progress(range(0, len(samples), batch_size), desc=name, leave=False):
        batch = samples[start : start + batch_size]
        values = sample_score([read_sample(folder / x.file) for x in batch], [x.text for x in batch])
        if values.numel() != len(batch) or not values.isfinite().all():
            raise ValueError(
                f"The score {name} must be a finite number for each of {len(batch)} samples, got {values}."
            )
        parts.append(values.double().cpu().view(len(batch)))
    return torch.cat(parts)


@torch.no_grad()
def _similar_frames(
    base: Variant, variant: Variant, similarities: Mapping[str, Similarity]
) -> dict[str, list[torch.Tensor]]:
    """Return measure → float64 (F,) per sample, of a variant's frames to the first variant's; an image is one frame."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in similarities}
    for sample in progress(base.record.samples, desc=variant.name, leave=False):
        pair = [read_sample(one.folder / sample.file) for one in (variant, base)]
        frames, reference = (x if x.ndim == 4 else x[None] for x in pair)
        if frames.shape != reference.shape:
            shapes = [(len(x), *x.shape[2:]) for x in (reference, frames)]
            raise ValueError(
                f"{sample.file} has (frames, height, width) {shapes[0]} in {base.folder} and {shapes[1]} in "
                f"{variant.folder}; generate both sets with the same settings."
            )
        for name, similarity in similarities.items():
            pairs = zip(frames.split(_FRAMES), reference.split(_FRAMES), strict=True)
            found[name].append(torch.cat([similarity(*pair).double() for pair in pairs]))
    return found


def score_table(variants: Sequence[Variant]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: every score of every variant, its interval, and the difference from the first."""

    def text(mean: Mean | None, sign: str = "") -> str:
        if mean is None:
            return ""
        ends = "" if mean.low is None else f" ({mean.low:{sign}.4g} to {mean.high:{sign}.4g})"
        return f"{mean.value:{sign}.4g}{ends}"

    rows = [
        [variant.name, name, text(score), text(variant.differences.get(name), "+")]
        for variant in variants
        for name, score in variant.scores.items()
    ]
    return ["variant", "score", "mean (95 % interval)", f"from {variants[0].name}"], rows
