"""Sample sets of several variants of one model, side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..files import read_json
from ..generation.record import RECORD_NAME, Sample
from .description import Description, Progress, check_one_each, describe_images, describe_reference
from .extractors import FeatureExtractor
from .fid import score_description, too_few
from .images import FolderImages, read_sample
from .metrics import FeatureStatistics, frechet_distance
from .published import SCORE_FILES, PaperRows, known_scores, paper_rows
from .sets import require_samples
from .similarity import Similarity

SampleScore = Callable[[Sequence[torch.Tensor], Sequence[str]], torch.Tensor]
"""Takes uint8 images (3, H, W) or videos (F, 3, H, W) and what they should show, gives a score for each: (B,)."""

_RESAMPLES = 1000
_FRECHET_RESAMPLES = 200
_FRECHET_CHANNELS = 256
"""Channels up to which the Fréchet distance is bootstrapped; of Inception's 2048 the resamples would take an hour."""
_BATCH = 50
_FRAMES = 8
"""Frames whose similarity is computed at a time."""
_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is settled."""
        return self.low > 0 or self.high < 0


def bootstrap(statistic: Callable[[torch.Tensor], float], count: int, resamples: int, seed: int = 0) -> Interval:
    """A statistic of paired samples, and its percentile interval over sets drawn anew from them.

    Args:
        statistic: of the samples at some indices (count,), int64, which may occur several times.
        count: of the samples.
        resamples: how many sets are drawn.
        seed: of the drawing.

    Raises:
        ValueError: fewer than two samples or resamples.
    """
    if count < 2 or resamples < 2:
        raise ValueError(f"A bootstrap needs at least 2 samples and resamples, got {count} and {resamples}.")
    generator = torch.Generator().manual_seed(seed)
    drawn = [statistic(torch.randint(count, (count,), generator=generator)) for _ in range(resamples)]
    ends = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(ends).tolist()
    return Interval(statistic(torch.arange(count)), low, high)


@dataclass(frozen=True)
class Variant:
    """One sample set."""

    name: str
    folder: Path
    samples: list[Sample]
    choices: dict[str, Any]
    """How it was made."""


@dataclass
class Row:
    """What was measured of one variant."""

    variant: Variant
    scores: dict[str, float] = field(default_factory=dict)
    differences: dict[str, Interval] = field(default_factory=dict)
    """Score → difference from the first variant, over the same samples."""
    similarities: dict[str, Interval] = field(default_factory=dict)
    """Measure → mean similarity of this variant's samples to the first one's of the same noise."""


@dataclass(frozen=True)
class Comparison:
    """Everything that a report shows."""

    rows: list[Row]
    paper: PaperRows
    reference: Path | None
    remarks: Sequence[str] = ()
    """What a reader has to know of the scores."""


def read_variants(folders: Sequence[Path]) -> list[Variant]:
    """Sample sets that can be compared sample by sample.

    Raises:
        FileNotFoundError: a set that is not whole.
        ValueError: fewer than two sets, two of one name, or sets with other samples, seeds or settings.
    """
    if len(folders) < 2:
        raise ValueError(f"A comparison needs at least two sample sets, got {len(folders)}.")
    variants = [
        Variant(folder.resolve().name, folder, require_samples(folder), read_json(folder / RECORD_NAME))
        for folder in folders
    ]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"The sets need different folder names, which their rows are named after; got {names}.")
    for before, after in pairwise(variants):
        _check_paired(before, after)
    return variants


def _check_paired(first: Variant, second: Variant) -> None:
    for name in ("family", "model", "seed", "settings"):
        values = [variant.choices.get(name) for variant in (first, second)]
        if values[0] != values[1]:
            raise ValueError(
                f"{first.folder} and {second.folder} differ in {name} ({values[0]!r} and {values[1]!r}); only sets "
                "that differ in the attention alone are compared."
            )
    if first.samples != second.samples:
        raise ValueError(f"{first.folder} and {second.folder} hold different samples; generate the same set of both.")


def compare_sets(
    folders: Sequence[Path],
    *,
    reference: Path | None = None,
    extractor: FeatureExtractor | None = None,
    extractor_name: str = "",
    sample_scores: Mapping[str, SampleScore] | None = None,
    similarities: Mapping[str, Similarity] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure every variant, and its differences from the first one over the same samples.

    Scores that lie in a set's folder (``published.SCORE_FILES``) are taken in as well.

    Args:
        folders: of the sets, the baseline first.
        reference: what Fréchet distances are measured from; None for none.
        extractor: makes features of images; needed with ``reference``.
        extractor_name: see :func:`mhla_diffusers.evaluation.fid.measure_images`.
        sample_scores: name → a score of every sample.
        similarities: name → a measure of every sample beside the first variant's of the same noise, averaged over the
            frames of a video; see :func:`mhla_diffusers.evaluation.similarity.load_similarities`.
        progress: called with the number of images done and their total, for every set.

    Raises:
        FileNotFoundError: a set or reference that is not there.
        ValueError: sets that cannot be compared, nothing to compare them by, damaged files, or a score that is not one
            number for each sample.
    """
    if (reference is None) != (extractor is None):
        raise ValueError("A reference and an extractor belong together; give both or neither.")
    variants = read_variants(folders)
    rows = [Row(variant) for variant in variants]
    _add_known_scores(rows)
    if reference is None and not (sample_scores or similarities) and not any(row.scores for row in rows):
        raise ValueError(
            f"There is nothing to compare {', '.join(variant.name for variant in variants)} by. Give --reference for "
            "distances, --clip-model for the CLIP score, --score NAME=package.module:callable for one of your own or "
            f"--similarity for PSNR and SSIM, or put scores into the folders of the sets, as {', '.join(SCORE_FILES)}."
        )
    remarks: list[str] = []
    if reference is not None and extractor is not None:
        expected = describe_reference(reference, extractor, extractor_name, batch_size=_BATCH, progress=progress)
        remarks += filter(None, [too_few(f"The reference {reference.name}", expected)])
        remarks += _add_distances(rows, expected, extractor, progress)
    for name, score in (sample_scores or {}).items():
        _add_sample_scores(rows, name, score)
    if similarities:
        remarks += _add_similarities(rows, similarities, progress)
    return Comparison(rows, paper_rows(variants[0].choices.get("model")), reference, remarks)


def _add_known_scores(rows: Sequence[Row]) -> None:
    known = [known_scores(row.variant.folder) for row in rows]
    for row, scores in zip(rows, known, strict=True):
        row.scores |= {name: float(values.mean()) for name, values in scores.items()}
    for row, scores in zip(rows[1:], known[1:], strict=True):
        for name in scores.keys() & known[0].keys():
            own, base = scores[name], known[0][name]
            if len(own) != len(base):
                raise ValueError(
                    f"{rows[0].variant.folder} has {len(base)} values of {name}, {row.variant.folder} {len(own)}; they "
                    "must be of the same things."
                )
            if len(own) > 1:
                row.differences[name] = _mean(own - base)


def _add_distances(
    rows: Sequence[Row], expected: Description, extractor: FeatureExtractor, progress: Progress | None
) -> list[str]:
    """Also differences of the distances; returns what there is to remark."""
    features: list[torch.Tensor] = []
    remarks: list[str] = []
    with TemporaryDirectory(prefix="mhla-features-") as folder:
        for number, row in enumerate(rows):
            images, store = FolderImages(row.variant.folder), Path(folder) / str(number)
            found = describe_images(images, extractor, _BATCH, store, progress)
            measured = score_description(found, expected).measured()
            row.scores |= {name: value for name, value in measured.items() if name not in ("samples", "reference")}
            if not number:  # the others hold the same samples
                remarks += filter(None, [too_few("Every set", found)])
            assert found.features is not None
            features.append(found.features)
        channels = features[0].shape[1]
        if channels > _FRECHET_CHANNELS:
            return [
                *remarks,
                f"The Fréchet distance of {channels} channels has no interval: it is bootstrapped up to "
                f"{_FRECHET_CHANNELS} channels, above which the resamples would take an hour.",
            ]
        for row, own in zip(rows[1:], features[1:], strict=True):
            statistic = _distance_difference(own, features[0], expected)
            row.differences["fid"] = bootstrap(statistic, len(own), _FRECHET_RESAMPLES)
    return remarks


def _distance_difference(
    features: torch.Tensor, base: torch.Tensor, expected: Description
) -> Callable[[torch.Tensor], float]:
    def distance(some: torch.Tensor) -> float:
        return frechet_distance(FeatureStatistics.of(some).normal(), expected.pooled)

    return lambda chosen: distance(features[chosen]) - distance(base[chosen])


def _add_sample_scores(rows: Sequence[Row], name: str, score: SampleScore) -> None:
    values = [_score_samples(row.variant, name, score) for row in rows]
    for row, own in zip(rows, values, strict=True):
        row.scores[name] = float(own.mean())
        if own is not values[0]:
            row.differences[name] = _mean(own - values[0])


def _mean(change: torch.Tensor) -> Interval:
    return bootstrap(lambda chosen: float(change[chosen].mean()), len(change), _RESAMPLES)


@torch.no_grad()
def _add_similarities(
    rows: Sequence[Row], similarities: Mapping[str, Similarity], progress: Progress | None
) -> list[str]:
    """Of every variant but the first; returns what there is to remark."""
    base, others = rows[0].variant, rows[1:]
    values: list[dict[str, list[float]]] = [{name: [] for name in similarities} for _ in others]
    for done, sample in enumerate(base.samples, start=1):
        reference = _frames(base.folder / sample.file)
        for row, of_row in zip(others, values, strict=True):
            frames = _frames(row.variant.folder / sample.file)
            if frames.shape != reference.shape:
                shapes = [(len(x), *x.shape[2:]) for x in (reference, frames)]
                raise ValueError(
                    f"{sample.file} has (frames, height, width) {shapes[0]} in {base.folder} and {shapes[1]} in "
                    f"{row.variant.folder}; generate both sets with the same settings."
                )
            for name, similarity in similarities.items():
                if min(frames.shape[2:]) >= similarity.smallest:
                    pairs = zip(frames.split(_FRAMES), reference.split(_FRAMES), strict=True)
                    mean = torch.cat([similarity.of(*pair).double() for pair in pairs]).mean()
                    of_row[name].append(float(mean))
        if progress is not None:
            progress(done, len(base.samples))
    for row, of_row in zip(others, values, strict=True):
        for name, found in of_row.items():
            if found:
                row.scores[name] = sum(found) / len(found)
            if len(found) > 1:
                row.similarities[name] = _mean(torch.tensor(found, dtype=torch.float64))
    return [
        f"{name} is of {len(found)} of {len(base.samples)} samples: the others have fewer than "
        f"{similarities[name].smallest} pixels in height or width."
        for name, found in values[0].items()
        if len(found) < len(base.samples)
    ]


def _frames(file: Path) -> torch.Tensor:
    """uint8 (F, 3, H, W); an image is one frame."""
    sample = read_sample(file)
    return sample if sample.ndim == 4 else sample[None]


def _score_samples(variant: Variant, name: str, score: SampleScore) -> torch.Tensor:
    """float64 (n,)."""
    parts = []
    for start in range(0, len(variant.samples), _BATCH):
        batch = variant.samples[start : start + _BATCH]
        images = [read_sample(variant.folder / sample.file) for sample in batch]
        values = score(images, [sample.text for sample in batch])
        check_one_each(f"The score {name}", values, len(batch))
        parts.append(values.double().cpu().view(len(batch)))
    return torch.cat(parts)
