"""FID, sFID, Inception score, precision, recall and KID of a set of images against a reference."""

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from .description import Description, Progress, describe_images, describe_reference
from .extractors import FeatureExtractor
from .images import open_images
from .metrics import frechet_distance, kernel_distance, precision_recall

_STABLE = 5
"""Samples per channel from which on a Fréchet distance is stable: 10 240 for the 2048 channels of Inception."""
_NEIGHBOURS = 3


class FewSamplesWarning(UserWarning):
    """There are too few samples for a stable Fréchet distance."""


@dataclass(frozen=True)
class ImageScores:
    """What was measured; None where the extractor or the reference has no features for it."""

    samples: int | None
    reference: int | None
    """Images of the reference; None for statistics that do not tell."""
    fid: float
    sfid: float | None = None
    inception_score: float | None = None
    precision: float | None = None
    recall: float | None = None
    kid: float | None = None

    def measured(self) -> dict[str, float]:
        """Names and values of what there is."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def measure_images(
    samples: str | Path,
    reference: str | Path,
    extractor: FeatureExtractor,
    *,
    name: str,
    batch_size: int = 50,
    progress: Progress | None = None,
) -> ImageScores:
    """Compare generated images with a reference.

    Memory does not grow with the number of images: pooled features lie in temporary files on disk.

    Args:
        samples: folder of images, or npz with ``arr_0``.
        reference: see :func:`describe_reference`; the statistics of images are kept beside them and read the next time.
        extractor: what makes features of images.
        name: of the extractor, so that its statistics are not taken for another's.
        batch_size: images per call of the extractor.
        progress: see :data:`Progress`.

    Raises:
        FileNotFoundError: no such images.
        ValueError: damaged images, or a reference that was made with another extractor.
        OSError: statistics cannot be kept beside the reference.

    Warns:
        FewSamplesWarning: with how many there are, of samples or reference, and how many each score needs.
    """
    images = open_images(samples)
    with TemporaryDirectory(prefix="mhla-features-") as folder:
        stores = [Path(folder) / part for part in ("reference", "samples")]
        expected = describe_reference(
            Path(reference), extractor, name, batch_size=batch_size, store=stores[0], progress=progress
        )
        found = describe_images(images, extractor, batch_size, stores[1], progress)
        for path, description in ((images.path, found), (Path(reference), expected)):
            remark = too_few(path, description)
            if remark is not None:
                warnings.warn(remark, FewSamplesWarning, stacklevel=2)
        return score_description(found, expected)


def score_description(found: Description, expected: Description) -> ImageScores:
    """The scores of one description against another."""
    precision = recall = kid = sfid = None
    real, generated = expected.features, found.features
    if real is not None and generated is not None and min(len(real), len(generated)) > _NEIGHBOURS:
        precision, recall = precision_recall(real, generated, _NEIGHBOURS)
        kid, _ = kernel_distance(real, generated)
    if found.spatial is not None and expected.spatial is not None:
        sfid = frechet_distance(found.spatial, expected.spatial)
    fid = frechet_distance(found.pooled, expected.pooled)
    return ImageScores(found.count, expected.count, fid, sfid, found.inception_score, precision, recall, kid)


def too_few(name: object, found: Description) -> str | None:
    """What to say of a set that is too small for a stable Fréchet distance; None of one that is large enough."""
    stable = _STABLE * len(found.pooled.mean)
    if found.count is None or found.count >= stable:
        return None
    return (
        f"{name} holds {found.count} images. A Fréchet distance of {len(found.pooled.mean)} channels is stable from "
        f"about {stable} on; ADM's suite takes 10000 images for precision and recall, and 5000 for the Inception "
        "score. Compare these scores only with those of as many images, or look at KID, which is unbiased."
    )
