"""Judge digits that a tiny pipeline has generated."""

from collections.abc import Sequence
from typing import Any

import torch

from ..evaluation.extractors import ImageFeatures
from .classifier import DigitClassifier, load_classifier, scene_crops
from ..tiny.digits import DIGIT_SIZES, PICTURE_SIZE, Digits, Scene, compose, crop, parse_caption
from ..tiny.loading import call_settings

_BATCH = 10


def generate_scenes(pipe: Any, family: str, scenes: Sequence[Scene], seed: int, **settings: Any) -> list[torch.Tensor]:
    """Generate pictures of scenes with a tiny pipeline, patched or not.

    The starting noise of a scene depends on the seed and its place alone, and is drawn on the CPU.

    Args:
        pipe: the pipeline.
        family: dit, sana or wan.
        scenes: what to generate.
        seed: of the first scene; the next one has the next seed.
        **settings: replace those of :func:`call_settings`.

    Returns:
        For each scene (1, 64, 64), or (9, 64, 64) for wan, in [0, 1].
    """
    arguments = {**call_settings(family), **settings}
    pictures: list[torch.Tensor] = []
    for start in range(0, len(scenes), _BATCH):
        part = scenes[start : start + _BATCH]
        generators = [torch.Generator().manual_seed(seed + start + place) for place in range(len(part))]
        if family == "dit":
            labels = [scene.labels[0] for scene in part]
            output = pipe(class_labels=labels, generator=generators, output_type="np", **arguments).images
            output = torch.tensor(output).permute(0, 3, 1, 2)[:, None]
        else:
            prompts = [scene.caption for scene in part]
            output = pipe(prompts, generator=generators, output_type="pt", **arguments)
            output = output.frames if family == "wan" else output.images[:, None]
        pictures += list(output.float().cpu().mean(dim=2))
    return pictures


def real_scenes(scenes: Sequence[Scene], family: str, digits: Digits, seed: int) -> list[torch.Tensor]:
    """The same scenes, composed of real digits."""
    return [compose(scene, digits, DIGIT_SIZES[family], seed + place) for place, scene in enumerate(scenes)]


@torch.no_grad()
def digit_accuracy(
    pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], family: str, classifier: DigitClassifier
) -> float:
    """Part of the digits, over all scenes and frames, that the classifier takes for what the scene names."""
    right = total = 0
    for picture, scene in zip(pictures, scenes, strict=True):
        crops, labels = scene_crops(picture, scene, DIGIT_SIZES[family])
        right += int((classifier(crops).argmax(dim=1) == labels).sum())
        total += len(labels)
    return right / total


def digit_features(
    pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], family: str, classifier: DigitClassifier
) -> torch.Tensor:
    """Classifier features of every digit of every frame: (n, 64)."""
    crops = [
        scene_crops(picture, scene, DIGIT_SIZES[family])[0] for picture, scene in zip(pictures, scenes, strict=True)
    ]
    return classifier.describe(torch.cat(crops))


def picture_features(images: torch.Tensor) -> ImageFeatures:
    """What the classifier sees of pictures with one digit: an extractor for ``mhla eval fid``.

    Args:
        images: uint8 (B, 3, 64, 64), as the tiny DiT pipeline makes them.
    """
    classifier = load_classifier()
    pictures = images.float().mean(dim=1) / 255
    crops = crop(pictures, (0, PICTURE_SIZE, 0, PICTURE_SIZE), DIGIT_SIZES["dit"])
    with torch.no_grad():
        return ImageFeatures(classifier.describe(crops), probabilities=classifier(crops).softmax(dim=1))


def digit_shown(images: Sequence[torch.Tensor], texts: Sequence[str]) -> torch.Tensor:
    """How many of the digits that were asked for the classifier sees: a score for ``mhla eval compare``.

    Args:
        images: uint8, each (3, 64, 64) or (F, 3, 64, 64), as the tiny pipelines make them.
        texts: the number of a class for the tiny DiT pipeline, a caption for the others.

    Returns:
        (B,) part of the digits, over all frames.

    Raises:
        ValueError: a caption without a digit word.
    """
    classifier = load_classifier()
    parts = []
    for image, text in zip(images, texts, strict=True):
        scene = Scene((int(text),)) if text.isdigit() else parse_caption(text)
        family = "dit" if text.isdigit() else "wan" if scene.motion else "sana"
        picture = image.float().mean(dim=-3).view(-1, PICTURE_SIZE, PICTURE_SIZE) / 255
        parts.append(digit_accuracy([picture], [scene], family, classifier))
    return torch.tensor(parts)
