"""A small classifier of handwritten digits: it says whether a generated digit is the one that was asked for."""

import random
from pathlib import Path

import torch
from torch import nn

from ..tiny.digits import DIGIT_SIZES, PICTURE_SIZE, Digits, Scene, compose, crop, load_digits

CLASSIFIER_FILE = Path(__file__).parent / "assets" / "classifier.safetensors"

_WHOLE = (0, PICTURE_SIZE, 0, PICTURE_SIZE)
_STEPS = 800
_BATCH = 128


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
    """Train on the training digits, drawn at the sizes of all families; half a minute on one core."""
    torch.manual_seed(seed)
    crops, labels = real_crops(load_digits("train"), seed)
    classifier = DigitClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    for _ in range(_STEPS):
        chosen = torch.randint(len(crops), (_BATCH,))
        loss = nn.functional.cross_entropy(classifier(_augment(crops[chosen])), labels[chosen], label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return classifier.eval()


def real_crops(digits: Digits, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Crops (3 n, 16, 16) and labels (3 n,) of real digits, drawn once at the size of each family."""
    chance = random.Random(seed)
    crops, labels = [], []
    for size in DIGIT_SIZES.values():
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

    from ..tiny.checksums import check_asset

    check_asset(CLASSIFIER_FILE)
    classifier = DigitClassifier()
    classifier.load_state_dict(load_file(CLASSIFIER_FILE))
    return classifier.eval()
