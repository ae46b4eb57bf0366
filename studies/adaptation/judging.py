"""Judge generated digits: a small classifier says whether a digit is the one that was asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.families import trained_family
from studies.adaptation.digits import TINY, DigitPipeline, Scene, crop, load_digits

CLASSIFIER_FILE = Path(__file__).with_name("classifier.safetensors")
_BATCH = 10
"""Scenes that are generated at a time."""


class DigitClassifier(nn.Module):
    """Two convolutions and two linear layers over a crop of 16x16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of crops (n, 16, 16) in [0, 1]."""
        logits: torch.Tensor = self.head(self.features(crops[:, None]))
        return logits

    @torch.no_grad()
    def recognised(self, picture: torch.Tensor, scene: Scene, size: int) -> torch.Tensor:
        """Whether each digit of each frame (F, S, S) is taken for what the scene names: bool (digits, F)."""
        found = [self(crop(picture, field, size)).argmax(dim=1) for field in scene.fields(picture.shape[-1])]
        return torch.stack(found) == torch.tensor(scene.labels)[:, None]


def load_classifier() -> DigitClassifier:
    """Load the classifier that ships."""
    classifier = DigitClassifier()
    classifier.load_state_dict(load_file(CLASSIFIER_FILE))
    return classifier.eval()


def generate_scenes(
    pipe: Any, tiny: DigitPipeline, scenes: Sequence[Scene], seed: int, **settings: Any
) -> list[torch.Tensor]:
    """Generate pictures of scenes with a tiny pipeline, patched or not: (1, S, S) each, or (F, S, S) of a clip.

    Values are in [0, 1]. ``seed`` is of the first scene's noise, and the next scene has the next one; ``settings``
    replace those that the pipeline was trained for.
    """
    family = trained_family(pipe.transformer)
    arguments = {**tiny.call_settings, **settings}
    pictures: list[torch.Tensor] = []
    for start in range(0, len(scenes), _BATCH):
        prompts = [tiny.prompt(scene) for scene in scenes[start : start + _BATCH]]
        generators = [torch.Generator().manual_seed(seed + start + place) for place in range(len(prompts))]
        output = torch.as_tensor(family.calling.call(pipe, prompts, generators, output_type="np", **arguments))
        pictures += output.mean(dim=-1).view(len(prompts), -1, *(tiny.picture_size,) * 2).unbind()
    return pictures


class Yardstick:
    """Scenes that every attention generates from the same noise, and what the pictures are judged by."""

    def __init__(self, tiny: DigitPipeline, scenes: Sequence[Scene], seed: int) -> None:
        self.tiny, self.scenes, self.seed, self.classifier = tiny, scenes, seed, load_classifier()
        digits = load_digits("held-out")
        self.real = [tiny.draw(scene, digits, seed + place) for place, scene in enumerate(scenes)]
        """The same scenes, composed of real digits."""

    def generate(self, pipe: Any, **settings: Any) -> list[torch.Tensor]:
        """Generate the scenes, see :func:`generate_scenes`."""
        return generate_scenes(pipe, self.tiny, self.scenes, self.seed, **settings)

    def recognised(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return for every scene whether its digits are recognised: bool (digits, F)."""
        judge, size = self.classifier.recognised, self.tiny.digit_size
        return [judge(picture, scene, size) for picture, scene in zip(pictures, self.scenes, strict=False)]

    def accuracy(self, pictures: Sequence[torch.Tensor]) -> float:
        """Return the part of the digits, over all scenes and frames, that is recognised."""
        return float(torch.cat([found.flatten() for found in self.recognised(pictures)]).double().mean())

    @torch.no_grad()
    def features(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return for every scene the classifier's features of its digits: (digits · F, 64)."""
        found, size = [], self.tiny.digit_size
        for picture, scene in zip(pictures, self.scenes, strict=True):
            crops = torch.cat([crop(picture, field, size) for field in scene.fields(picture.shape[-1])])
            found.append(self.classifier.features(crops[:, None]))
        return found

    def distance(self, pictures: Sequence[torch.Tensor]) -> float:
        """Return the Fréchet distance of the digits to real ones, over all scenes."""
        return frechet_distance(torch.cat(self.features(self.real)), torch.cat(self.features(pictures)))


def picture_features(images: torch.Tensor) -> torch.Tensor:
    """Extract the classifier's features (B, 64) of pictures with one digit, for ``mhla eval fid``.

    Takes uint8 images (B, 3, H, W), or videos (B, F, 3, H, W), whose features are the means over their frames. Sizes
    other than that of tiny-dit are brought to it.
    """
    tiny = TINY["dit"]
    size = tiny.picture_size
    grey = images.float().mean(dim=-3).flatten(0, -3) / 255
    if grey.shape[1:] != (size, size):
        grey = nn.functional.interpolate(grey[:, None], (size, size), mode="bilinear", antialias=True)[:, 0]
    with torch.no_grad():
        features = load_classifier().features(crop(grey, (0, size, 0, size), tiny.digit_size)[:, None])
    return features.view(len(images), -1, features.shape[1]).mean(dim=1)


def digit_shown(images: Sequence[torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
    """Return the share of the digits asked for that the classifier recognises: (B,), for ``mhla eval compare``.

    Images are uint8, each (3, S, S) or (F, 3, S, S), as the tiny pipelines make them; texts name the class for the
    tiny DiT pipeline, or are captions. ValueError for a caption without a digit word, or pictures of another size.
    """
    classifier, parts = load_classifier(), []
    for image, text in zip(images, texts, strict=True):
        sized = [tiny for tiny in TINY.values() if image.shape[-2:] == (tiny.picture_size, tiny.picture_size)]
        if not sized:
            raise ValueError(
                f"The picture of {text!r} has {image.shape[-2]}x{image.shape[-1]} pixels, which is not the size of a "
                "tiny pipeline; the classifier judges theirs alone."
            )
        tiny, scene = next((tiny, scene) for tiny in sized if (scene := tiny.scene(text)) is not None)
        picture = image.float().mean(dim=-3).view(-1, *image.shape[-2:]) / 255
        parts.append(float(classifier.recognised(picture, scene, tiny.digit_size).double().mean()))
    return torch.tensor(parts)
