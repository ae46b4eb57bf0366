"""FID of a set of images or videos against a reference."""

import math
import zipfile
import zlib
from pathlib import Path

import numpy
import torch

from ..reporting import progress
from .extractors import Extractor
from .images import batches_of, files_of
from .metrics import Moments, frechet_distance, moments


def measure_images(samples: Path, reference: Path, extractor: Extractor, *, batch_size: int = 50) -> dict[str, float]:
    """Return the number of ``samples`` in a folder, and their ``fid`` to a reference.

    The reference is a folder too, or an npz with the ``mu`` and ``sigma`` of the same extractor. ValueError for damaged
    files, or features and statistics that are not finite or not of one extractor.
    """
    is_npz = reference.suffix == ".npz" and reference.is_file()
    expected = read_statistics(reference) if is_npz else moments(extract_features(reference, extractor, batch_size))
    found = extract_features(samples, extractor, batch_size)
    score = frechet_distance(found, expected)
    if not math.isfinite(score):
        raise ValueError(f"fid is {score}; check the statistics in {reference}.")
    return {"samples": len(found), "fid": score}


def extract_features(folder: Path, extractor: Extractor, batch_size: int = 50) -> torch.Tensor:
    """Run the extractor over a folder: float32 (n, D) on the CPU; ValueError unless a row per image is finite."""
    files, kept = files_of(folder), []
    with progress(total=len(files), desc="features", leave=False) as bar:
        for batch in batches_of(files, batch_size):
            features = extractor(batch)
            if features.ndim != 2 or len(features) != len(batch) or not features.isfinite().all():
                raise ValueError(
                    f"The extractor's features of {len(batch)} samples must be finite and ({len(batch)}, D), got "
                    f"{tuple(features.shape)}."
                )
            kept.append(features.detach().float().cpu())
            bar.update(len(batch))
    return torch.cat(kept)


def read_statistics(file: Path) -> Moments:
    """Read ``mu`` (D,) and ``sigma`` (D, D) of an npz, as clean-fid and ADM publish them."""
    try:
        with numpy.load(file) as content:
            return torch.from_numpy(content["mu"]), torch.from_numpy(content["sigma"])
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # of other kinds than a user's
        raise ValueError(f"{file} cannot be read as statistics, mu and sigma: {error}. Download it again.") from error
