"""Compare sample sets of variants of one model: scores, and differences over the same samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import read_json
from ..generation.record import RECORD_NAME, Sample
from ..generation.similarity import Similarity
from ..reporting import show_progress
from .extractors import Extractor
from .fid import check_one_each, extract_features, read_reference, score, too_few
from .images import Images, read_sample
from .samples import require_samples

SampleScore = Callable[[Sequence[torch.Tensor], Sequence[str]], torch.Tensor]
"""Maps uint8 images (3, H, W) or videos (F, 3, H, W) and their texts to a score for each: (B,)."""
_BATCH = 50
_FRAMES = 8
"""Frames per similarity computation."""


class Interval(NamedTuple):
    """A mean with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def bootstrap(values: torch.Tensor, resamples: int = 1000, seed: int = 0) -> Interval:
    """Return the mean of values (n,) with its percentile interval, which stays within their range."""
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    means = [values[torch.randint(count, (count,), generator=generator)].mean() for _ in range(resamples)]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.stack(means).double().quantile(ends).tolist()
    return Interval(float(values.mean()), low, high)


@dataclass(frozen=True)
class Variant:
    """One sample set and its measurements."""

    name: str
    folder: Path
    samples: list[Sample]
    choices: dict[str, Any]
    """How it was made."""
    scores: dict[str, float] = field(default_factory=dict)
    differences: dict[str, Interval] = field(default_factory=dict)
    """Score → difference from the first variant, over the same samples."""
    similarities: dict[str, Interval] = field(default_factory=dict)
    """Measure → mean similarity of this variant's samples to the first variant's from the same noise."""


def read_variants(folders: Sequence[Path]) -> list[Variant]:
    """Read sample sets; ValueError unless they hold the same samples, made with the same settings and seeds."""
    if len(folders) < 2:
        raise ValueError(f"A comparison needs at least two sample sets, got {len(folders)}.")
    variants = [
        Variant(folder.resolve().name, folder, require_samples(folder), read_json(folder / RECORD_NAME))
        for folder in folders
    ]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"The sets need different folder names, because rows are named after them; got {names}.")
    for first, second in pairwise(variants):
        for name in ("family", "model", "model_content", "dtype", "seed", "settings"):
            one, other = first.choices.get(name), second.choices.get(name)
            if one != other:
                raise ValueError(
                    f"{first.folder} and {second.folder} differ in {name} ({one!r} and {other!r}); only sets that "
                    "differ only in the attention can be compared."
                )
        if first.samples != second.samples:
            raise ValueError(
                f"{first.folder} and {second.folder} hold different samples; generate the same set with both."
            )
    return variants


def compare_sets(
    folders: Sequence[Path],
    *,
    reference: tuple[Path, Extractor] | None = None,
    sample_scores: Mapping[str, SampleScore] | None = None,
    similarities: Mapping[str, Similarity] | None = None,
) -> tuple[list[Variant], list[str]]:
    """Measure every variant, and its differences from the first one over the same samples.

    Args:
        folders: sample sets, the one to compare with first.
        reference: images or statistics to measure distances from, see :func:`read_reference`, and the extractor.
        sample_scores: name → function that scores every sample.
        similarities: name → measure between every sample and the first variant's from the same noise, averaged over the
            frames of a video; see :func:`load_similarities`.

    Returns:
        The measured variants, and remarks on the scores.

    Raises:
        ValueError: sets that cannot be compared, nothing to compare by, damaged files, or a score that is not one
            number per sample.
    """
    variants, remarks = read_variants(folders), list[str]()
    if not (reference or sample_scores or similarities):
        raise ValueError(
            "There is nothing to compare by. Give --reference, --clip-model, --score NAME=package.module:callable or "
            "--similarity."
        )
    for name, sample_score in (sample_scores or {}).items():
        base = torch.empty(0)
        for variant in variants:
            found = score_samples(variant.folder, variant.samples, name, sample_score)
            variant.scores[name] = float(found.mean())
            if variant is variants[0]:
                base = found
            else:
                variant.differences[name] = bootstrap(found - base)
    if reference is not None:
        path, extractor = reference
        expected = read_reference(path, extractor, _BATCH)
        for variant in variants:
            features = extract_features(Images(variant.folder), extractor, _BATCH)
            variant.scores.update(score(features, expected, extractor))
        remarks += too_few({folders[0]: len(variants[0].samples)}, expected)
    return variants, remarks + _add_similarities(variants, similarities or {})


def score_samples(
    folder: Path, samples: Sequence[Sample], name: str, sample_score: SampleScore, batch_size: int = _BATCH
) -> torch.Tensor:
    """Score every sample of a folder: float64 (n,); ValueError for a score that is not one finite number per sample."""
    parts: list[torch.Tensor] = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        values = sample_score([read_sample(folder / x.file) for x in batch], [x.text for x in batch])
        check_one_each(f"The score {name}", values, len(batch))
        parts.append(values.double().cpu().view(len(batch)))
        for sample, value in zip(batch, parts[-1].tolist(), strict=True):
            if not math.isfinite(value):
                raise ValueError(f"The score {name} of {folder / sample.file} is {value}; it must be finite.")
        show_progress(start + len(batch), len(samples))
    return torch.cat(parts)


@torch.no_grad()
def _add_similarities(variants: Sequence[Variant], similarities: Mapping[str, Similarity]) -> list[str]:
    """Add similarities of every variant but the first; return remarks."""
    base, *others = variants
    values: dict[tuple[int, str], list[torch.Tensor]] = {}
    worst: dict[str, tuple[float, str]] = {}
    for done, sample in enumerate(base.samples if similarities else (), start=1):
        reference = _frames(base.folder / sample.file)
        for place, variant in enumerate(others):
            frames = _frames(variant.folder / sample.file)
            if frames.shape != reference.shape:
                shapes = [(len(x), *x.shape[2:]) for x in (reference, frames)]
                raise ValueError(
                    f"{sample.file} has (frames, height, width) {shapes[0]} in {base.folder} and {shapes[1]} in "
                    f"{variant.folder}; generate both sets with the same settings."
                )
            for name, similarity in similarities.items():
                pairs = zip(frames.split(_FRAMES), reference.split(_FRAMES), strict=True)
                found = torch.cat([similarity(*pair).double() for pair in pairs])
                if not found.isnan().any():
                    values.setdefault((place, name), []).append(found.mean())
                if name == "psnr":
                    low = float(found.min()), f"frame {int(found.argmin())} of {sample.file}"
                    worst[variant.name] = min(worst.get(variant.name, low), low)
        show_progress(done, len(base.samples))
    small = {}
    for (place, name), means in values.items():
        similar = torch.stack(means)
        others[place].scores[name] = float(similar.mean())
        others[place].similarities[name] = bootstrap(similar)
        if len(similar) < len(base.samples):
            small[name] = (
                f"{name} is of {len(similar)} of {len(base.samples)} samples: the others are too small for it."
            )
    lowest = [f"The lowest PSNR in {name} is {value:.1f} dB, of {place}." for name, (value, place) in worst.items()]
    return [*small.values(), *lowest]


def _frames(file: Path) -> torch.Tensor:
    """Read a sample as uint8 (F, 3, H, W); an image is one frame."""
    sample = read_sample(file)
    return sample if sample.ndim == 4 else sample[None]
