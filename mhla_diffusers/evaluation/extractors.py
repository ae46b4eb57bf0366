"""Feature extractors: Inception as in clean-fid or the ADM suite, DINOv2, or any callable."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from PIL import Image
from safetensors import SafetensorError

from ..devices import choose_device
from ..files import file_hash


class ImageFeatures(NamedTuple):
    """Features of a batch, or of a set, of B images."""

    pooled: torch.Tensor
    """(B, D): for FID, KID, precision and recall."""
    spatial: torch.Tensor | None = None
    """(B, E): for sFID."""
    probabilities: torch.Tensor | None = None
    """(B, classes), each row summing to 1: for the Inception score."""


FeatureExtractor = Callable[[torch.Tensor], torch.Tensor | ImageFeatures]
"""Maps uint8 images (B, 3, H, W) to pooled features (B, D) or :class:`ImageFeatures`.

For a folder of videos it gets (B, F, 3, H, W); with features of videos the Fréchet distance is FVD.
"""


@dataclass(frozen=True)
class Extractor:
    """A feature extractor, and what it is known by."""

    features: FeatureExtractor
    name: str
    """Shown with the scores."""
    fingerprint: str
    """Hash of its weights or code, kept with statistics of a reference, which hold for it alone."""


_CLEAN_WEIGHTS = "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt"
_ADM_WEIGHTS = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
)
_SHOWN_TENSORS = 4


class CleanInception:
    """pool3 of Inception as clean-fid computes it: each image resized with PIL's bicubic filter, unrounded.

    Raises:
        ImportError: clean-fid is missing.
        FileNotFoundError: no weights there; the message says where to get them.
    """

    def __init__(self, weights: Path | None, device: str = "cpu") -> None:
        file = _require_weights(weights, _CLEAN_WEIGHTS)
        try:
            from cleanfid.inception_torchscript import InceptionV3W
            from cleanfid.resize import build_resizer
        except ImportError as error:
            raise ImportError(f"clean-fid cannot be imported ({error}): pip install mhla_diffusers[eval]") from error
        self.name, self.file, self._device = "clean", file, choose_device(device)
        self.resize = build_resizer("clean")
        self._model = InceptionV3W(str(file.parent), download=False, resize_inside=False).to(self._device)

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return features (B, 2048) of uint8 images (B, 3, H, W)."""
        resized = [torch.from_numpy(self.resize(image.permute(1, 2, 0).numpy())) for image in images]
        features: torch.Tensor = self._model(torch.stack(resized).permute(0, 3, 1, 2).to(self._device))
        return features


class AdmInception:
    """Inception with the features of the ADM suite, computed by torch-fidelity.

    pool3 (2048 channels); the first 7 channels of TensorFlow's ``mixed_6/conv``, channels last, 17 x 17 x 7 = 2023
    values; and the softmax of pool3 times the classifier's weights without its bias.

    Raises:
        ImportError: torch-fidelity is missing.
        FileNotFoundError: no weights there; the message says where to get them.
    """

    def __init__(self, weights: Path | None, device: str = "cpu") -> None:
        file = _require_weights(weights, _ADM_WEIGHTS)
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ImportError(
                f"torch-fidelity cannot be imported ({error}): pip install mhla_diffusers[eval]"
            ) from error
        self.name, self.file, self._device = "adm", file, choose_device(device)
        names = ["2048", "logits_unbiased"]
        self._model = FeatureExtractorInceptionV3("inception", names, feature_extractor_weights_path=str(file))
        self._model.to(self._device).eval()

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> ImageFeatures:
        """Return features of uint8 images (B, 3, H, W): pooled 2048, spatial 2023, probabilities 1008 values each."""
        spatial: list[torch.Tensor] = []
        with self._model.Mixed_6d.branch1x1.register_forward_hook(lambda *seen: spatial.append(seen[2])):
            pooled, logits = self._model(images.to(self._device))
        return ImageFeatures(pooled, spatial[0][:, :7].permute(0, 2, 3, 1).flatten(1), logits.softmax(dim=1))


class Dinov2Features:
    """Class token of a DINOv2, as in FD-DINOv2 (Stein et al. 2023, https://arxiv.org/abs/2306.04675, with ViT-L/14).

    Each image is resized to 224 x 224 with PIL's bicubic filter and normalised by ImageNet's mean and deviation.

    Raises:
        FileNotFoundError: no weights there.
        ValueError: weights of another kind of model, or that do not fit its configuration.
    """

    def __init__(self, weights: Path | None, device: str = "cpu") -> None:
        from transformers import AutoConfig, Dinov2Config, Dinov2Model

        if weights is None or not (weights / "model.safetensors").is_file():
            given = "No weights are named" if weights is None else f"There is no model.safetensors in {weights}"
            raise FileNotFoundError(
                f"{given}; download a DINOv2 such as facebook/dinov2-large (hf download facebook/dinov2-large "
                "--local-dir FOLDER) and give the folder with --weights. It is not downloaded automatically."
            )
        config = AutoConfig.from_pretrained(weights)
        if not isinstance(config, Dinov2Config):
            raise ValueError(f"{weights} holds a model of type {config.model_type!r}; --extractor needs a DINOv2.")
        self.file, self._device = weights / "model.safetensors", choose_device(device)
        self._model = load_whole(Dinov2Model, weights).to(self._device).eval()
        self.name = (
            f"dinov2 ({config.num_hidden_layers} layers, {config.hidden_size} wide, patches of {config.patch_size})"
        )

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return features (B, D) of uint8 images (B, 3, H, W); ValueError for videos."""
        if images.ndim != 4:
            raise ValueError(f"DINOv2 takes pictures, got videos: {tuple(images.shape)}. Use an extractor for videos.")
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        resized = [numpy.asarray(picture.resize((224, 224), Image.Resampling.BICUBIC)) for picture in pictures]
        pixels = torch.from_numpy(numpy.stack(resized)).permute(0, 3, 1, 2).float() / 255
        mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        features: torch.Tensor = self._model(((pixels - mean) / deviation).to(self._device)).last_hidden_state[:, 0]
        return features


_MODELS: dict[str, type[CleanInception | AdmInception | Dinov2Features]] = {
    "adm": AdmInception,
    "clean": CleanInception,
    "dinov2": Dinov2Features,
}


def _require_weights(file: Path | None, source: str) -> Path:
    """Return the file, if it exists under the name that its library expects."""
    name = source.rpartition("/")[2]
    if file is None or not file.is_file() or file.name != name:
        given = "No weights are named" if file is None else f"There is no {name} at {file}"
        raise FileNotFoundError(
            f"{given}; download {source} and give its path with --weights. It is not downloaded automatically."
        )
    return file


def load_whole(cls: Any, place: str | Path) -> Any:
    """Load a model of transformers, which would fill in random values for what its weights lack.

    Raises:
        ValueError: damaged weights, or tensors that are missing, left over, or of another shape.
    """
    try:
        model, found = cls.from_pretrained(place, output_loading_info=True, ignore_mismatched_sizes=True)
    except SafetensorError as error:
        raise ValueError(f"The weights of {place} are damaged: {error}. Download them again.") from error
    names = {
        "lack": found["missing_keys"],
        # older weights of CLIP hold positions, which it makes itself now
        "have unexpected": set(found["unexpected_keys"]) - {name for name, _ in model.named_buffers()},
        "have another shape of": [name for name, *_ in found["mismatched_keys"]],
    }
    for problem, tensors in names.items():
        if tensors:
            raise ValueError(
                f"The weights of {place} {problem} {', '.join(sorted(tensors)[:_SHOWN_TENSORS])} ({len(tensors)} in "
                f"all), so they do not fit its config.json as a {cls.__name__}. Download both again."
            )
    return model


def load_extractor(choice: str, weights: Path | None = None, device: str = "cpu") -> Extractor:
    """Load an extractor.

    Args:
        choice: "adm" or "clean" for Inception, "dinov2", or ``package.module:name`` of a callable.
        weights: file of Inception's weights, or folder of a DINOv2.
        device: cpu, cuda, ….

    Raises:
        FileNotFoundError: no weights there.
        ValueError: unknown extractor, weights for a callable, or weights that do not fit their model.
        ImportError: a package is missing.
    """
    if choice in _MODELS:
        model = _MODELS[choice](weights, device)
        return Extractor(model, model.name, file_hash(model.file))
    if ":" not in choice:
        raise ValueError(f"extractor={choice!r} is unknown; allowed: adm, clean, dinov2, or package.module:callable.")
    if weights is not None:
        raise ValueError(f"Weights ({weights}) are for Inception and DINOv2; the callable {choice} brings its own.")
    features = load_callable(choice)
    source = inspect.getsourcefile(inspect.getmodule(features) or type(features))
    return Extractor(features, choice, "" if source is None else file_hash(Path(source)))


def load_callable(place: str) -> Callable[..., Any]:
    """Load a callable given as ``package.module:name``, which may lie in the current folder, as for ``python -m``.

    Raises:
        ValueError: a module without such a callable.
        ImportError: no such module.
    """
    module, _, name = place.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"{module} has no callable named {name!r}.")
    return found
