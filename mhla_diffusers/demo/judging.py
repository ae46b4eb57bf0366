"""Judge generated digits: a small classifier says whether a digit is the one that was asked for."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..evaluation.extractors import ImageFeatures
from ..families import get_family
from ..tiny import TINY, TinyPipeline
from ..tiny.digits import PICTURE_SIZE, Digits, Scene, compose, crop, load_digits
from ..tiny.loading import ASSET_FOLDER, check_asset

CLASSIFIER_FILE = ASSET_FOLDER / "classifier.safetensors"

_WHOLE = (0, PICTURE_SIZE, 0, PICTURE_SIZE)
_BATCH = 10
_CLASSIFIER_STEPS = 800
_CLASSIFIER_BATCH = 128


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


def scene_crops(picture: torch.Tensor, scene: Scene, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the classifier sees of a scene: every digit of every frame.

    Args:
        picture: (F, 64, 64) in [0, 1].
        scene: what the picture should show.
        size: height and width of a digit in pixels.

    Returns:
        Crops (digits * F, 16, 16) and wanted labels (digits * F,).
    """
    crops = [crop(picture, field, size) for field in scene.fields()]
    labels = torch.tensor(scene.labels).repeat_interleave(len(picture))
    return torch.cat(crops), labels


def train_classifier(seed: int = 0) -> DigitClassifier:
    """Train on the training digits, drawn at the sizes of all tiny pipelines; half a minute on one core."""
    torch.manual_seed(seed)
    crops, labels = real_crops(load_digits("train"), seed)
    classifier = DigitClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _CLASSIFIER_STEPS)
    for _ in range(_CLASSIFIER_STEPS):
        chosen = torch.randint(len(crops), (_CLASSIFIER_BATCH,))
        loss = nn.functional.cross_entropy(classifier(_augment(crops[chosen])), labels[chosen], label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return classifier.eval()


def real_crops(digits: Digits, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Crops (3 n, 16, 16) and labels (3 n,) of real digits, drawn once at the size of each tiny pipeline."""
    chance = random.Random(seed)
    crops, labels = [], []
    for size in (tiny.digit_size for tiny in TINY.values()):
        for image, label in zip(digits.images, digits.labels.tolist(), strict=True):
            one = Digits(image[None], torch.tensor([label]))
            picture = compose(Scene((label,)), one, size, chance.randrange(2**32))
            crops.append(crop(picture, _WHOLE, size))
            labels.append(label)
    return torch.cat(crops), torch.tensor(labels)


def _augment(crops: torch.Tensor) -> torch.Tensor:
    """Slightly turned, scaled, shifted and noisy crops."""
    count = len(crops)
    angle = 0.15 * torch.randn(count)
    scale = 1 + 0.08 * torch.randn(count)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * scale
    theta[:, 0, 1], theta[:, 1, 0] = -angle.sin() * scale, angle.sin() * scale
    theta[:, :, 2] = 0.05 * torch.randn(count, 2)
    grid = nn.functional.affine_grid(theta, [count, 1, *crops.shape[1:]], align_corners=False)
    turned = nn.functional.grid_sample(crops[:, None], grid, align_corners=False).squeeze(1)
    return (turned + 0.05 * torch.randn_like(turned)).clamp(0, 1)


def load_classifier() -> DigitClassifier:
    """The classifier that ships with the package.

    Raises:
        DamagedAssetError: its file is missing or damaged.
    """
    from safetensors.torch import load_file

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


@torch.no_grad()
def digit_accuracy(
    pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], tiny: TinyPipeline, classifier: DigitClassifier
) -> float:
    """Part of the digits, over all scenes and frames, that the classifier takes for what the scene names."""
    right = total = 0
    for picture, scene in zip(pictures, scenes, strict=True):
        crops, labels = scene_crops(picture, scene, tiny.digit_size)
        right += int((classifier(crops).argmax(dim=1) == labels).sum())
        total += len(labels)
    return right / total


def digit_features(
    pictures: Sequence[torch.Tensor], scenes: Sequence[Scene], tiny: TinyPipeline, classifier: DigitClassifier
) -> torch.Tensor:
    """Classifier features of every digit of every frame: (n, 64)."""
    crops = [scene_crops(picture, scene, tiny.digit_size)[0] for picture, scene in zip(pictures, scenes, strict=True)]
    return classifier.describe(torch.cat(crops))


def picture_features(images: torch.Tensor) -> ImageFeatures:
    """What the classifier sees of pictures with one digit: an extractor for ``mhla eval fid``.

    Args:
        images: uint8 (B, 3, H, W), or videos (B, F, 3, H, W), whose features are the means over their frames. Sizes
            other than the 64x64 of the tiny pipelines are brought to that.
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
