"""Judge generated digits: a small classifier says whether a digit is the one that was asked for."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ..evaluation.extractors import ImageFeatures
from ..evaluation.metrics import frechet_distance
from ..families import get_family
from ..patching.few_step_scheduler import few_steps_of
from ..tiny import TINY, TinyPipeline
from ..tiny.digits import PICTURE_SIZE, Digits, Scene, compose, crop, load_digits
from ..tiny.loading import ASSET_FOLDER, check_asset

CLASSIFIER_FILE = ASSET_FOLDER / "classifier.safetensors"

_WHOLE = (0, PICTURE_SIZE, 0, PICTURE_SIZE)
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
        """Logits (n, 10) of crops (n, 16, 16) in [0, 1]."""
        logits: torch.Tensor = self.head(self.features(crops[:, None]))
        return logits

    @torch.no_grad()
    def describe(self, crops: torch.Tensor) -> torch.Tensor:
        """Features (n, 64) of crops (n, 16, 16), for Fréchet distances."""
        features: torch.Tensor = self.features(crops[:, None])
        return features


def load_classifier() -> DigitClassifier:
    """The classifier that ships with the package.

    Raises:
        DamagedAssetError: its file is missing or damaged.
    """
    check_asset(CLASSIFIER_FILE)
    classifier = DigitClassifier()
    classifier.load_state_dict(load_file(CLASSIFIER_FILE))
    return classifier.eval()


def generate_scenes(
    pipe: Any, tiny: TinyPipeline, scenes: Sequence[Scene], seed: int, **settings: Any
) -> list[torch.Tensor]:
    """Generate pictures of scenes with a tiny pipeline, patched or not.

    The starting noise of a scene depends on the seed and its place alone, and is drawn on the CPU.

    Args:
        pipe: the pipeline.
        tiny: its description.
        scenes: what to generate.
        seed: of the first scene; the next one has the next seed.
        **settings: replace those that it was trained for.

    Returns:
        For each scene (1, 64, 64), or (9, 64, 64) of a clip, in [0, 1].
    """
    family, arguments = get_family(pipe.transformer), {**tiny.call_settings, **settings}
    if (few_steps := few_steps_of(pipe)) is not None:
        arguments |= {"num_inference_steps": len(few_steps.times), **family.guidance_arguments(1.0)}
    pictures: list[torch.Tensor] = []
    for start in range(0, len(scenes), _BATCH):
        prompts = [tiny.prompt(scene) for scene in scenes[start : start + _BATCH]]
        generators = [torch.Generator().manual_seed(seed + start + place) for place in range(len(prompts))]
        output = torch.as_tensor(family.call(pipe, prompts, generators, output_type="np", **arguments))
        pictures += output.mean(dim=-1).view(len(prompts), -1, PICTURE_SIZE, PICTURE_SIZE).unbind()
    return pictures


def real_scenes(scenes: Sequence[Scene], tiny: TinyPipeline, digits: Digits, seed: int) -> list[torch.Tensor]:
    """The same scenes, composed of real digits."""
    return [compose(scene, digits, tiny.digit_size, seed + place) for place, scene in enumerate(scenes)]


def scene_crops(picture: torch.Tensor, scene: Scene, size: int) -> torch.Tensor:
    """What the classifier sees of a picture (F, 64, 64): every digit of every frame, (digits, F, 16, 16)."""
    return torch.stack([crop(picture, field, size) for field in scene.fields()])


@torch.no_grad()
def recognised(picture: torch.Tensor, scene: Scene, tiny: TinyPipeline, classifier: DigitClassifier) -> torch.Tensor:
    """Whether the classifier takes each digit of each frame for what the scene names: bool (digits, F)."""
    crops = scene_crops(picture, scene, tiny.digit_size)
    found = classifier(crops.flatten(0, 1)).argmax(dim=1).view(crops.shape[:2])
    return found == torch.tensor(scene.labels)[:, None]


def digit_accuracy(
    pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], tiny: TinyPipeline, classifier: DigitClassifier
) -> float:
    """Part of the digits, over all scenes and frames, that the classifier takes for what the scene names."""
    found = [recognised(picture, scene, tiny, classifier) for picture, scene in zip(pictures, scenes, strict=True)]
    return float(torch.cat(found).double().mean())


def digit_features(
    pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], tiny: TinyPipeline, classifier: DigitClassifier
) -> torch.Tensor:
    """Classifier features of every digit of every frame: (n, 64)."""
    crops = [scene_crops(picture, scene, tiny.digit_size) for picture, scene in zip(pictures, scenes, strict=True)]
    return classifier.describe(torch.cat([crop.flatten(0, 1) for crop in crops]))


@dataclass(frozen=True)
class Yardstick:
    """Scenes that every attention generates from the same noise, and what they are judged by."""

    tiny: TinyPipeline
    scenes: list[Scene]
    seed: int
    classifier: DigitClassifier
    real: torch.Tensor
    """Features of the same scenes, composed of real digits."""

    @classmethod
    def of(cls, tiny: TinyPipeline, count: int, seed: int) -> "Yardstick":
        """With scenes that the seed draws."""
        chance, classifier = random.Random(seed), load_classifier()
        scenes = [tiny.random_scene(chance) for _ in range(count)]
        real = real_scenes(scenes, tiny, load_digits("held-out"), seed)
        return cls(tiny, scenes, seed, classifier, digit_features(real, scenes, tiny, classifier))

    def generate(self, pipe: Any) -> list[torch.Tensor]:
        """What a pipeline makes of the scenes."""
        return generate_scenes(pipe, self.tiny, self.scenes, self.seed)

    def accuracy(self, pictures: Sequence[torch.Tensor]) -> list[float]:
        """Of every scene the part of its digits that is recognised."""
        pairs = zip(pictures, self.scenes, strict=True)
        return [digit_accuracy([picture], [scene], self.tiny, self.classifier) for picture, scene in pairs]

    def distance(self, pictures: Sequence[torch.Tensor]) -> float:
        """Fréchet distance of the digits to real ones, over all scenes."""
        return frechet_distance(self.real, digit_features(pictures, self.scenes, self.tiny, self.classifier))


def picture_features(images: torch.Tensor) -> ImageFeatures:
    """What the classifier sees of pictures with one digit: an extractor for ``mhla eval fid``.

    Of uint8 images (B, 3, H, W), or videos (B, F, 3, H, W), whose features are the means over their frames. Sizes other
    than the 64x64 of the tiny pipelines are brought to that.
    """
    classifier = load_classifier()
    grey = images.float().mean(dim=-3).flatten(0, -3) / 255
    if grey.shape[1:] != (PICTURE_SIZE, PICTURE_SIZE):
        grey = nn.functional.interpolate(grey[:, None], (PICTURE_SIZE,) * 2, mode="bilinear", antialias=True)[:, 0]
    crops = crop(grey, _WHOLE, TINY["dit"].digit_size)
    with torch.no_grad():
        features = classifier.describe(crops), classifier(crops).softmax(dim=1)
    pooled, probabilities = (x.view(len(images), -1, x.shape[1]).mean(dim=1) for x in features)
    return ImageFeatures(pooled, probabilities=probabilities)


def digit_shown(images: Sequence[torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
    """How many of the digits that were asked for the classifier sees: a score for ``mhla eval compare``.

    Args:
        images: uint8, each (3, 64, 64) or (F, 3, 64, 64), as the tiny pipelines make them.
        texts: the number of a class for the tiny DiT pipeline, a caption for the others.

    Returns:
        (B,) part of the digits, over all frames.

    Raises:
        ValueError: a caption without a digit word, or pictures of another size, whose digits it would not find.
    """
    classifier = load_classifier()
    parts = []
    for image, text in zip(images, texts, strict=True):
        if image.shape[-2:] != (PICTURE_SIZE, PICTURE_SIZE):
            raise ValueError(
                f"The picture of {text!r} has {image.shape[-2]}x{image.shape[-1]} pixels; digits are told apart in "
                f"pictures of {PICTURE_SIZE}x{PICTURE_SIZE}, as the tiny pipelines make them."
            )
        tiny, scene = next((tiny, scene) for tiny in TINY.values() if (scene := tiny.scene(text)) is not None)
        picture = image.float().mean(dim=-3).view(-1, PICTURE_SIZE, PICTURE_SIZE) / 255
        parts.append(digit_accuracy([picture], [scene], tiny, classifier))
    return torch.tensor(parts)
