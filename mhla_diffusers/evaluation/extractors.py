"""Features of images: Inception as in clean-fid or the ADM suite, or any callable."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from ..devices import choose_device
from ..errors import installing


class ImageFeatures(NamedTuple):
    """Features of a batch, or of a set, of B images."""

    pooled: torch.Tensor
    """(B, D): for FID, KID, precision and recall."""
    spatial: torch.Tensor | None = None
    """(B, E): for sFID."""
    probabilities: torch.Tensor | None = None
    """(B, classes), each row summing to 1: for the Inception score."""


Extractor = Callable[[torch.Tensor], torch.Tensor | ImageFeatures]
"""Maps uint8 images (B, 3, H, W) to pooled features (B, D) or :class:`ImageFeatures`.

For a folder of videos it gets (B, F, 3, H, W); with features of videos the Fréchet distance is FVD.
"""
_CLEAN_WEIGHTS = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"
_ADM_WEIGHTS = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
)


class CleanInception:
    """pool3 of Inception and KID by clean-fid: each image resized with PIL's bicubic filter, unrounded."""

    def __init__(self, weights: Path | None, device: str = "cpu") -> None:
        file = _require_weights(weights, _CLEAN_WEIGHTS)
        from cleanfid.inception_torchscript import InceptionV3W
        from cleanfid.resize import build_resizer

        self._device, self._resize = choose_device(device), build_resizer("clean")
        self._model = InceptionV3W(str(file.parent), download=False, resize_inside=False).to(self._device)

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return features (B, 2048) of uint8 images (B, 3, H, W)."""
        resized = [torch.from_numpy(self._resize(image.permute(1, 2, 0).numpy())) for image in images]
        features: torch.Tensor = self._model(torch.stack(resized).permute(0, 3, 1, 2).to(self._device))
        return features

    def kernel_distance(self, reference: torch.Tensor, samples: torch.Tensor) -> float:
        """Return KID of features (n, 2048) and (m, 2048), over 100 random subsets of 1000, the same in every run."""
        from cleanfid.fid import kernel_distance

        numpy.random.seed(0)
        return float(kernel_distance(reference.double().numpy(), samples.double().numpy()))


class AdmInception:
    """Inception with the features of the ADM suite, computed by torch-fidelity.

    pool3 (2048 channels); the first 7 channels of TensorFlow's ``mixed_6/conv``, channels last, 17 x 17 x 7 = 2023
    values; and the softmax of pool3 times the classifier's weights without its bias.
    """

    def __init__(self, weights: Path | None, device: str = "cpu") -> None:
        file = _require_weights(weights, _ADM_WEIGHTS)
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        self._device, names = choose_device(device), ["2048", "logits_unbiased"]
        self._model = FeatureExtractorInceptionV3("inception", names, feature_extractor_weights_path=str(file))
        self._model.to(self._device).eval()

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> ImageFeatures:
        """Return features of uint8 images (B, 3, H, W): pooled 2048, spatial 2023, probabilities 1008 values each."""
        spatial: list[torch.Tensor] = []
        with self._model.Mixed_6d.branch1x1.register_forward_hook(lambda *seen: spatial.append(seen[2])):
            pooled, logits = self._model(images.to(self._device))
        return ImageFeatures(pooled, spatial[0][:, :7].permute(0, 2, 3, 1).flatten(1), logits.softmax(dim=1))


def _require_weights(file: Path | None, source: str) -> Path:
    name = source.rpartition("/")[2]
    if file is None or not file.is_file() or file.name != name:
        given = "No weights are named" if file is None else f"There is no {name} at {file}"
        raise FileNotFoundError(
            f"{given}; download {source} and give its path with --weights. It is not downloaded automatically."
        )
    return file


def load_extractor(choice: str, weights: Path | None = None, device: str = "cpu") -> Extractor:
    """Load an extractor.

    Args:
        choice: "adm" or "clean" for Inception, or ``package.module:name`` of a callable.
        weights: file of Inception's weights.
        device: cpu, cuda, ….

    Raises:
        FileNotFoundError: no weights there; the message says where to get them.
        ValueError: unknown extractor, or weights for a callable.
        ImportError: a package is missing.
    """
    if ":" in choice:
        if weights is not None:
            raise ValueError(f"Weights ({weights}) are for Inception; the callable {choice} brings its own.")
        return load_callable(choice)
    if choice not in ("adm", "clean"):
        raise ValueError(f"extractor={choice!r} is unknown; allowed: adm, clean, or package.module:callable.")
    try:
        return AdmInception(weights, device) if choice == "adm" else CleanInception(weights, device)
    except ImportError as error:
        raise ImportError(f"{choice} cannot be computed here ({error}); {installing('eval')}.") from error


def load_callable(place: str) -> Callable[..., Any]:
    """Load ``package.module:name``, also from the current folder; ValueError or ImportError if it is not there."""
    module, _, name = place.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"{module} has no callable named {name!r}.")
    return found
