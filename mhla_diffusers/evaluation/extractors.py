"""Features of images: Inception as in clean-fid or the ADM suite, or any callable."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device
from ..errors import installing

Extractor = Callable[[torch.Tensor], torch.Tensor]
"""Maps uint8 images (B, 3, H, W) to features (B, D).

For a folder of videos it gets (B, F, 3, H, W); with features of videos the Fréchet distance is FVD.
"""
_CLEAN_WEIGHTS = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"
_ADM_WEIGHTS = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
)


def clean_inception(weights: Path | None, device: torch.device) -> Extractor:
    """Return pool3 (B, 2048) of Inception by clean-fid: each image resized with PIL's bicubic filter, unrounded."""
    file = _require_weights(weights, _CLEAN_WEIGHTS)
    from cleanfid.inception_torchscript import InceptionV3W
    from cleanfid.resize import build_resizer

    resize = build_resizer("clean")
    model: Any = InceptionV3W(str(file.parent), download=False, resize_inside=False).to(device)

    def extract(images: torch.Tensor) -> torch.Tensor:
        resized = [torch.from_numpy(resize(image.permute(1, 2, 0).numpy())) for image in images]
        features: torch.Tensor = model(torch.stack(resized).permute(0, 3, 1, 2).to(device))
        return features

    return extract


def adm_inception(weights: Path | None, device: torch.device) -> Extractor:
    """Return pool3 (B, 2048) of Inception with the resizing of the ADM suite, by torch-fidelity."""
    file = _require_weights(weights, _ADM_WEIGHTS)
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    model: Any = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(file))
    model.to(device).eval()
    return lambda images: model(images.to(device))[0]


def _require_weights(file: Path | None, source: str) -> Path:
    name = source.rpartition("/")[2]
    if file is None or not file.is_file() or file.name != name:
        given = "No weights are named" if file is None else f"There is no {name} at {file}"
        raise FileNotFoundError(
            f"{given}; download {source} and give its path with --weights. It is not downloaded automatically."
        )
    return file


def load_extractor(choice: str, weights: Path | None = None, device: str = "cpu") -> Extractor:
    """Load "adm" or "clean", Inception by a file of its weights, or ``package.module:name``, a callable of your own."""
    if ":" in choice:
        if weights is not None:
            raise ValueError(f"Weights ({weights}) are for Inception; the callable {choice} brings its own.")
        return load_callable(choice)
    if choice not in ("adm", "clean"):
        raise ValueError(f"extractor={choice!r} is unknown; allowed: adm, clean, or package.module:callable.")
    try:
        return torch.no_grad()((adm_inception if choice == "adm" else clean_inception)(weights, choose_device(device)))
    except (ImportError, RuntimeError) as error:  # RuntimeError if an installed torchvision does not match torch
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
