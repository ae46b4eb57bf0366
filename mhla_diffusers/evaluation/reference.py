"""Statistics of reference images, kept beside them, and those that others publish."""

from pathlib import Path

import torch

from .description import Description, Progress, describe_images
from .extractors import FeatureExtractor
from .images import open_images
from .metrics import Normal

_KEPT_FEATURES = 10_000
"""Features of the reference that precision, recall and KID are measured with, as many as the ADM suite takes."""


def statistics_file(images: str | Path, name: str) -> Path:
    """Where the statistics of a reference are kept: beside its folder or npz, never in site-packages.

    Args:
        images: folder or npz.
        name: of the extractor.
    """
    # a link to data that cannot be written may lie where it can
    path = Path(images).absolute()
    plain = "".join(letter if letter.isalnum() else "-" for letter in name)
    return path.with_name(f"{path.name}.statistics-{plain}.safetensors")


def describe_reference(
    reference: Path,
    extractor: FeatureExtractor,
    name: str,
    *,
    batch_size: int = 50,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Description:
    """Describe a reference, or read what was written the last time.

    Args:
        reference: images (folder or npz), a statistics file, or an npz with ``mu`` and ``sigma``; ADM's has ``mu_s``,
            ``sigma_s`` and some images as well.
        extractor: what makes features of images.
        name: of the extractor.
        batch_size: images per call of the extractor.
        store: see :func:`describe_images`.
        progress: see :data:`Progress`.

    Raises:
        FileNotFoundError: no such reference.
        ValueError: damaged images, or statistics of another extractor.
        OSError: the statistics cannot be written beside the images.
    """
    if reference.suffix == ".safetensors":
        return load_statistics(reference, name)[0]
    published = _published_statistics(reference) if reference.suffix == ".npz" and reference.is_file() else None
    if published is not None and not _holds_images(reference):
        return published
    described = _describe_once(reference, extractor, name, batch_size, store, progress)
    if published is None:
        return described
    return Description(None, published.pooled, published.spatial, features=described.features)


def _describe_once(
    reference: Path,
    extractor: FeatureExtractor,
    name: str,
    batch_size: int,
    store: Path | None,
    progress: Progress | None,
) -> Description:
    images, file = open_images(reference), statistics_file(reference, name)
    if file.is_file():
        kept, fingerprint = load_statistics(file, name)
        if fingerprint == images.fingerprint():
            return kept
    described = describe_images(images, extractor, batch_size, store, progress)
    save_statistics(described, file, name, images.fingerprint())
    return load_statistics(file, name)[0]


def save_statistics(description: Description, file: Path, name: str, fingerprint: str) -> None:
    """Write the statistics of a reference; at most 10 000 of its features, evenly chosen, go with them.

    Args:
        description: of the images.
        file: where to.
        name: of the extractor.
        fingerprint: of the images.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    tensors = {"mean": description.pooled.mean, "covariance": description.pooled.covariance}
    if description.spatial is not None:
        tensors |= {"spatial_mean": description.spatial.mean, "spatial_covariance": description.spatial.covariance}
    if description.features is not None:
        tensors["features"] = _evenly_chosen(description.features, _KEPT_FEATURES).clone()
    metadata = {"extractor": name, "count": str(description.count), "fingerprint": fingerprint}
    aside = file.with_name(f".{file.name}")
    try:
        aside.open("wb").close()
    except OSError as error:
        raise OSError(
            f"The statistics of the reference cannot be kept at {file}: {error.strerror}. Link the reference into a "
            "folder that can be written, and name the link."
        ) from error
    save_file(tensors, aside, metadata=metadata)
    aside.replace(file)


def load_statistics(file: Path, name: str) -> tuple[Description, str]:
    """Statistics that were written before, and the fingerprint of the images that they are of.

    Raises:
        FileNotFoundError: no such file.
        ValueError: they were made with another extractor, or are no statistics.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise FileNotFoundError(f"There are no reference statistics at {file}.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}); remove it to have the statistics made again.") from error
    if not {"extractor", "count", "fingerprint"} <= metadata.keys():
        raise ValueError(f"{file} holds no statistics of images.")
    if metadata["extractor"] != name:
        raise ValueError(f"{file} was made with the extractor {metadata['extractor']!r}, not with {name!r}.")
    spatial = Normal(tensors["spatial_mean"], tensors["spatial_covariance"]) if "spatial_mean" in tensors else None
    pooled = Normal(tensors["mean"], tensors["covariance"])
    description = Description(int(metadata["count"]), pooled, spatial, features=tensors.get("features"))
    return description, metadata["fingerprint"]


def _evenly_chosen(features: torch.Tensor, largest: int) -> torch.Tensor:
    if len(features) <= largest:
        return features
    return features[torch.linspace(0, len(features) - 1, largest, dtype=torch.float64).long()]


def _holds_images(file: Path) -> bool:
    import numpy

    with numpy.load(file, allow_pickle=False) as content:
        return "arr_0" in content.files


def _published_statistics(file: Path) -> Description | None:
    """``mu`` and ``sigma`` (pooled), ``mu_s`` and ``sigma_s`` (spatial) where an npz holds them."""
    import numpy

    with numpy.load(file, allow_pickle=False) as content:
        if not {"mu", "sigma"} <= set(content.files):
            return None
        pooled = Normal(torch.from_numpy(content["mu"]), torch.from_numpy(content["sigma"]))
        if not {"mu_s", "sigma_s"} <= set(content.files):
            return Description(None, pooled)
        return Description(
            None, pooled, Normal(torch.from_numpy(content["mu_s"]), torch.from_numpy(content["sigma_s"]))
        )
