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
from .fid import check_one_each, extract_features, reference_statistics, score, too_few
from .images import Images, check_batch_size, read_sample
from .metrics import frechet_distance
from .samples import require_samples

SampleScore = Callable[[Sequence[torch.Tensor], Sequence[str]], torch.Tensor]
"""Maps uint8 images (3, H, W) or videos (F, 3, H, W) and their texts to a score for each: (B,)."""
SCORE_FILES = ("scores.json", "vbench.json", "geneval.json")
"""Files in a set's folder whose scores a comparison includes: name → number, or list of numbers.

A list has the same items in the same order in every set, for example the loss of every held-out sample. Its mean is the
score, and differences between sets are paired.
"""
_NO_SCORES = ("extractor", "model", "remarks")
"""What mhla eval writes beside scores."""
_FRECHET_RESAMPLES = 200
_FRECHET_CHANNELS = 256
"""Maximum channels for bootstrapping the Fréchet distance; with Inception's 2048 it would take an hour."""
_SAMPLES_PER_CHANNEL = 1.5
"""Minimum samples per channel for it; with fewer than one the interval misses the truth in every second case."""
_BATCH = 50
_FRAMES = 8
"""Frames per similarity computation."""


class Interval(NamedTuple):
    """A value with its 95 % bootstrap interval, which may lie beside the value of a biased statistic."""

    value: float
    low: float
    high: float


def bootstrap(statistic: Callable[[torch.Tensor], float], count: int, resamples: int = 1000, seed: int = 0) -> Interval:
    """Return a function of the indices of ``count`` samples, int64 (count,), with its basic bootstrap interval.

    A resample differs from the samples as these do from the population. So the interval reaches from θ - (q97.5 - θ) to
    θ + (θ - q2.5), with θ of the samples and quantiles q of the resamples. This takes off the bias of few samples,
    which a percentile interval has twice: the fewer the samples, the larger their Fréchet distance.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [statistic(torch.randint(count, (count,), generator=generator)) for _ in range(resamples)]
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(ends).tolist()
    value = statistic(torch.arange(count))
    return Interval(value, 2 * value - high, 2 * value - low)


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
    reference: Path | None = None,
    extractor: Extractor | None = None,
    sample_scores: Mapping[str, SampleScore] | None = None,
    similarities: Mapping[str, Similarity] | None = None,
) -> tuple[list[Variant], list[str]]:
    """Measure every variant, and its differences from the first one over the same samples.

    Scores in a set's folder (:data:`SCORE_FILES`) are included.

    Args:
        folders: sample sets, the one to compare with first.
        reference: images or statistics to measure distances from, see :func:`reference_statistics`.
        extractor: image to features, for the reference.
        sample_scores: name → function that scores every sample.
        similarities: name → measure between every sample and the first variant's from the same noise, averaged over the
            frames of a video; see :func:`load_similarities`.

    Returns:
        The measured variants, and remarks on the scores.

    Raises:
        ValueError: sets that cannot be compared, nothing to compare by, damaged files, or a score that is not one
            number per sample.
    """
    if (reference is None) != (extractor is None):
        raise ValueError("A reference and an extractor belong together; give both or neither.")
    variants = read_variants(folders)
    known = [known_scores(variant.folder) for variant in variants]
    for name in dict.fromkeys(name for scores in known for name in scores):
        _add_scores(variants, name, [scores.get(name) for scores in known])
    if reference is None and not (sample_scores or similarities) and not any(variant.scores for variant in variants):
        raise ValueError(
            f"There is nothing to compare {', '.join(variant.name for variant in variants)} by. Give --reference for "
            "distances, --clip-model for the CLIP score, --score NAME=package.module:callable for one of your own or "
            f"--similarity for PSNR and SSIM, or put scores into the folders of the sets, as {', '.join(SCORE_FILES)}."
        )
    remarks: list[str] = []
    if reference is not None and extractor is not None:
        remarks += _add_distances(variants, reference, extractor)
    for name, sample_score in (sample_scores or {}).items():
        _add_scores(variants, name, [score_samples(one, name, sample_score) for one in variants])
    if similarities:
        remarks += _add_similarities(variants, similarities)
    return variants, remarks


def known_scores(folder: Path) -> dict[str, torch.Tensor]:
    """Read every score of :data:`SCORE_FILES`: name → float64 (n,), with n = 1 for a single number.

    Raises:
        ValueError: a damaged file, a value that is not a score, or a score in two files.
    """
    scores: dict[str, torch.Tensor] = {}
    for file in (folder / name for name in SCORE_FILES if (folder / name).is_file()):
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError(f"{file} must map names to numbers.")
        if file.name == "geneval.json" and "overall" in content:
            content = {"geneval": content["overall"]}
        for name, value in content.items():
            if name in _NO_SCORES:
                continue
            values = value if isinstance(value, list) else [value]
            if not values or not all(type(one) in (int, float) and math.isfinite(one) for one in values):
                raise ValueError(f"{file}: {name} must be a number or a list of numbers, all finite, got {value!r}.")
            if name in scores:
                raise ValueError(f"{file} holds {name}, which another file in {folder} holds too; rename one of them.")
            scores[name] = torch.tensor(values, dtype=torch.float64)
    return scores


def score_samples(variant: Variant, name: str, sample_score: SampleScore, batch_size: int = _BATCH) -> torch.Tensor:
    """Score every sample: float64 (n,).

    Raises:
        ValueError: a batch size below 1, or a score that is not one finite number per sample.
    """
    check_batch_size(batch_size)
    parts: list[torch.Tensor] = []
    for start in range(0, len(variant.samples), batch_size):
        batch = variant.samples[start : start + batch_size]
        images = [read_sample(variant.folder / sample.file) for sample in batch]
        values = sample_score(images, [sample.text for sample in batch])
        check_one_each(f"The score {name}", values, len(batch))
        parts.append(values.double().cpu().view(len(batch)))
        for sample, value in zip(batch, parts[-1].tolist(), strict=True):
            if not math.isfinite(value):
                raise ValueError(f"The score {name} of {variant.folder / sample.file} is {value}; it must be finite.")
        show_progress(start + len(batch), len(variant.samples))
    return torch.cat(parts)


def _add_scores(variants: Sequence[Variant], name: str, values: Sequence[torch.Tensor | None]) -> None:
    """Add means of the values (n,) of every variant that has them, and paired differences from the first variant."""
    for variant, own in zip(variants, values, strict=True):
        if own is None:
            continue
        variant.scores[name] = float(own.mean())
        if variant is variants[0] or values[0] is None:
            continue
        if len(own) != len(values[0]):
            raise ValueError(
                f"{variants[0].folder} has {len(values[0])} values of {name}, {variant.folder} {len(own)}; they must "
                "be of the same things."
            )
        if len(own) > 1:
            variant.differences[name] = _mean(own - values[0])


def _mean(values: torch.Tensor) -> Interval:
    return bootstrap(lambda chosen: float(values[chosen].mean()), len(values))


def _add_distances(variants: Sequence[Variant], reference: Path, extractor: Extractor) -> list[str]:
    """Add distances from the reference, and differences of the Fréchet distances; return remarks."""
    expected = reference_statistics(reference, extractor, _BATCH)
    channels = len(expected["mu"])
    sizes = {f"The reference {reference.name}": int(expected["count"])} if "count" in expected else {}
    remarks = [too_few(*size, channels) for size in (*sizes.items(), ("Every set", len(variants[0].samples)))]
    found = []
    for variant in variants:
        images = Images(variant.folder)
        remarks.append(images.remark())
        found.append(extract_features(images, extractor.features, _BATCH))
        variant.scores.update(score(found[-1], expected))
    if channels > _FRECHET_CHANNELS:
        remarks.append(
            f"The Fréchet distance of {channels} channels has no interval: it is bootstrapped up to "
            f"{_FRECHET_CHANNELS} channels, above which the resamples would take an hour."
        )
        return list(filter(None, remarks))
    needed = math.ceil(_SAMPLES_PER_CHANNEL * channels)
    if len(found[0].pooled) < needed:
        remarks.append(
            f"The Fréchet distance of {channels} channels has no interval: that needs {needed} samples, and every set "
            f"holds {len(found[0].pooled)}."
        )
        return list(filter(None, remarks))
    base, target = found[0].pooled, (expected["mu"], expected["sigma"])
    for variant, own in zip(variants[1:], found[1:], strict=True):

        def difference(chosen: torch.Tensor, own: torch.Tensor = own.pooled) -> float:
            return frechet_distance(own[chosen], target) - frechet_distance(base[chosen], target)

        variant.differences["fid"] = bootstrap(difference, len(base), _FRECHET_RESAMPLES)
    return list(filter(None, remarks))


@torch.no_grad()
def _add_similarities(variants: Sequence[Variant], similarities: Mapping[str, Similarity]) -> list[str]:
    """Add similarities of every variant but the first; return remarks."""
    base, *others = variants
    values = {(variant.name, name): torch.empty(0, dtype=torch.float64) for variant in others for name in similarities}
    worst: dict[str, tuple[float, str]] = {}
    for done, sample in enumerate(base.samples, start=1):
        reference = _frames(base.folder / sample.file)
        for variant in others:
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
                values[variant.name, name] = torch.cat([values[variant.name, name], found.mean()[None]])
                if name == "psnr":
                    low = float(found.min()), f"frame {int(found.argmin())} of {sample.file}"
                    worst[variant.name] = min(worst.get(variant.name, low), low)
        show_progress(done, len(base.samples))
    remarks = {}
    for variant in others:
        for name in similarities:
            found = values[variant.name, name]
            found = found[~found.isnan()]
            if len(found):
                variant.scores[name] = float(found.mean())
            if len(found) > 1:
                variant.similarities[name] = _mean(found)
            if len(found) < len(base.samples):  # as many of every variant, whose samples have the same sizes
                remarks[name] = (
                    f"{name} is of {len(found)} of {len(base.samples)} samples: the others are too small for it."
                )
    lowest = [f"The lowest PSNR in {name} is {value:.1f} dB, of {place}." for name, (value, place) in worst.items()]
    return [*remarks.values(), *lowest]


def _frames(file: Path) -> torch.Tensor:
    """Read a sample as uint8 (F, 3, H, W); an image is one frame."""
    sample = read_sample(file)
    return sample if sample.ndim == 4 else sample[None]
