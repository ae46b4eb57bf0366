"""Handwritten digits, composed into captioned images and moving clips, as each tiny pipeline was trained on them.

The digits are the 1797 of 8x8 pixels that come with scikit-learn: the test set of Alpaydin and Kaynak's Optical
Recognition of Handwritten Digits (UCI, CC BY 4.0). They lie beside this file, in 117 kB.

Everything is drawn from a seed, and training and held-out digits never mix. Pictures are single-channel float tensors
in [0, 1]; :func:`to_rgb` makes what a VAE takes.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from mhla_diffusers.tiny import TinyPipeline, tiny_pipeline

Split = Literal["train", "held-out"]

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Motion → (vertical, horizontal) sign, vertical pointing down."""
MOTIONS = (*DIRECTIONS, "bouncing")

_HELD_OUT_EVERY = 5
_REST_SLACK = 4.0
"""How far from the middle of its field a digit may be along an axis that it does not move along, in pixels."""


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of one split: images (n, 8, 8), float32 in [0, 1], and labels (n,), int64."""

    images: torch.Tensor
    labels: torch.Tensor

    def pick(self, label: int, chance: random.Random) -> torch.Tensor:
        """Return a random (8, 8) digit with this label."""
        candidates = (self.labels == label).nonzero().flatten().tolist()
        return self.images[chance.choice(candidates)]


@dataclass(frozen=True)
class Scene:
    """What a caption says: one or two digits and, for a clip, how they move.

    Two digits have halves of the picture of their own, the first one left, or above where they move left or right.
    """

    labels: tuple[int, ...]
    motion: str | None = None

    @property
    def caption(self) -> str:
        """Return the text, for example "a three and an eight bouncing" or "a seven moving left"."""
        words = " and ".join(f"{'an' if NAMES[label] == 'eight' else 'a'} {NAMES[label]}" for label in self.labels)
        return words + (
            f" moving {self.motion}" if self.motion in DIRECTIONS else f" {self.motion}" if self.motion else ""
        )

    def fields(self, size: int) -> list[tuple[int, int, int, int]]:
        """Return the part of a picture of ``size`` pixels of each digit: (top, bottom, left, right)."""
        half = size // 2
        if len(self.labels) == 1:
            return [(0, size, 0, size)]
        if self.motion in ("left", "right"):
            return [(0, half, 0, size), (half, size, 0, size)]
        return [(0, size, 0, half), (0, size, half, size)]


def load_digits(split: Split) -> Digits:
    """Load the digits of one split; every fifth of the 1797 is held out."""
    shipped = load_file(Path(__file__).with_name("digits.safetensors"))
    images, labels = shipped["images"].float() / 16, shipped["labels"].long()
    held_out = torch.arange(len(labels)) % _HELD_OUT_EVERY == 0
    chosen = held_out if split == "held-out" else ~held_out
    return Digits(images[chosen], labels[chosen])


def parse_caption(caption: str) -> Scene:
    """Read the scene that a caption describes; ValueError for one without a digit word or with more than two."""
    words = caption.lower().split()
    labels = tuple(NAMES.index(word) for word in words if word in NAMES)
    if not 1 <= len(labels) <= 2:
        raise ValueError(f"Caption {caption!r} must name one or two digits ({', '.join(NAMES)}).")
    return Scene(labels, next((word for word in words if word in MOTIONS), None))


@dataclass(frozen=True, kw_only=True)
class DigitPipeline(TinyPipeline):
    """A tiny pipeline, the scenes that it was trained on, and how it is patched and adapted."""

    blocks: tuple[int, ...] = (4, 4)
    """Block counts that suit its token grid."""
    block_size: int | None = None
    """Tokens of a block of sparse attention that suit its token grid; None where its own attention is not softmax."""
    mixing_per_head: bool = False
    """Whether its MHLA has a mixing matrix for every head, as the presets of the family have it."""
    batch_size: int = 16
    """Samples per update when a patch is adapted."""
    digit_size: int = 28
    """Height and width in pixels of a drawn digit."""
    most_digits: int = 2
    motions: tuple[str | None, ...] = (None,)
    """How digits move; None for pictures."""
    prompts_are_classes: bool = False
    """Whether it is asked for the number of a digit instead of a caption."""

    def random_scene(self, chance: random.Random) -> Scene:
        """Draw one digit, or one or two where there is room, in motion where they move."""
        count = chance.choice((1, 1, 2)) if self.most_digits == 2 else 1
        labels = tuple(chance.randrange(10) for _ in range(count))
        return Scene(labels, chance.choice(self.motions) if self.is_video else None)

    def random_scenes(self, count: int, seed: int | str) -> list[Scene]:
        """Draw scenes; the same seed gives the same ones."""
        chance = random.Random(seed)
        return [self.random_scene(chance) for _ in range(count)]

    def draw(self, scene: Scene, digits: Digits, seed: int) -> torch.Tensor:
        """Draw a scene with handwritten digits; which ones, places and speeds come from the seed.

        (1, S, S) float32 in [0, 1] for a still scene, (F, S, S) for a moving one.
        """
        chance = random.Random(f"{seed} {scene.caption}")
        side, scale = self.picture_size, self.picture_size / self.digit_size
        frames = 1 if scene.motion is None else self.frames
        picture = torch.zeros(frames, side, side)
        for label, field in zip(scene.labels, scene.fields(side), strict=True):
            centres = _path(scene.motion, field, self.digit_size, frames, chance)
            digit = digits.pick(label, chance).expand(frames, -1, -1)
            picture = torch.maximum(picture, _sample(digit, scale, -scale * (2 * centres / side - 1), side))
        return picture

    def prompt(self, scene: Scene) -> str:
        """Return what the pipeline is asked for, to get a scene."""
        return str(scene.labels[0]) if self.prompts_are_classes else scene.caption

    def scene(self, prompt: str) -> Scene | None:
        """Return the scene that a prompt asks for; None for another tiny pipeline's, ValueError without digit words."""
        if self.prompts_are_classes:
            return Scene((int(prompt),)) if prompt.isdigit() else None
        scene = parse_caption(prompt)
        return scene if (scene.motion is not None) == self.is_video else None


TINY = {
    "dit": DigitPipeline(
        **vars(tiny_pipeline("dit")), block_size=2, digit_size=52, most_digits=1, prompts_are_classes=True
    ),
    "sana": DigitPipeline(**vars(tiny_pipeline("sana"))),
    "wan": DigitPipeline(
        **vars(tiny_pipeline("wan")),
        blocks=(3, 4, 4),
        block_size=4,
        mixing_per_head=True,
        batch_size=4,
        motions=MOTIONS,
    ),
}
"""Name → tiny pipeline."""
LONG = replace(
    TINY["wan"],
    name="wan-long",
    call_settings=TINY["wan"].call_settings | {"num_frames": 80},
    frames=81,
    block_size=64,
    batch_size=1,
)
"""tiny-wan, trained on for clips of 81 frames: 5,184 tokens, whose blocks are those of real sizes. It does not ship."""


def to_rgb(picture: torch.Tensor) -> torch.Tensor:
    """Turn (F, H, W) in [0, 1] into (3, F, H, W) in [-1, 1]."""
    return (2 * picture - 1).expand(3, *picture.shape)


def _path(
    motion: str | None, field: tuple[int, int, int, int], size: int, frames: int, chance: random.Random
) -> torch.Tensor:
    """Draw the centre of a digit in every frame, (F, 2) in pixels, within its field."""
    top, bottom, left, right = field
    axes = []
    for axis, (low, high) in enumerate(((top + size / 2, bottom - size / 2), (left + size / 2, right - size / 2))):
        sign = DIRECTIONS.get(motion or "", (0, 0))[axis]
        if motion == "bouncing":  # back and forth between two walls at constant speed, slower in longer clips
            span, speed = high - low, (9 / frames) ** 0.5
            start, step = chance.uniform(0, 2 * span), chance.choice((-1, 1)) * chance.uniform(3, 6) * speed
            phase = start + torch.arange(frames) * step
            axes.append(high - (phase.remainder(2 * span) - span).abs())
        elif sign:  # from one wall to the other at constant speed, give or take a fifth of the way
            slack = (high - low) / 5
            path = torch.linspace(low + chance.uniform(0, slack), high - chance.uniform(0, slack), frames)
            axes.append(path if sign > 0 else path.flip(0))
        else:  # at rest near the middle
            slack = min((high - low) / 2, _REST_SLACK)
            middle = (low + high) / 2 + chance.uniform(-slack, slack)
            axes.append(torch.full((frames,), middle))
    return torch.stack(axes, dim=1)


def locate(picture: torch.Tensor, field: tuple[int, int, int, int]) -> torch.Tensor:
    """Return the ink's centre of mass in a field of each frame, (F, 2) in pixels; without ink the field's middle."""
    top, bottom, left, right = field
    ink = (picture[:, top:bottom, left:right] - 0.25).clamp_min(0) + torch.finfo(torch.float32).eps
    weights = ink / ink.sum(dim=(1, 2), keepdim=True)
    rows, columns = torch.arange(top, bottom) + 0.5, torch.arange(left, right) + 0.5
    return torch.stack([(weights.sum(dim=2) * rows).sum(dim=1), (weights.sum(dim=1) * columns).sum(dim=1)], dim=1)


def crop(picture: torch.Tensor, field: tuple[int, int, int, int], size: int, resolution: int = 16) -> torch.Tensor:
    """Cut the digit of ``size`` pixels out of a field of (F, S, S), centred on its ink: (F, resolution, resolution).

    What lies outside the field (top, bottom, left, right) is not seen.
    """
    top, bottom, left, right = field
    side, own = picture.shape[-1], torch.zeros_like(picture)
    own[:, top:bottom, left:right] = picture[:, top:bottom, left:right]
    return _sample(own, size / side, 2 * locate(picture, field) / side - 1, resolution)


def _sample(source: torch.Tensor, scale: float, centre: torch.Tensor, resolution: int) -> torch.Tensor:
    """Cut a scaled square of each frame around a centre (F, 2) in [-1, 1]: (F, resolution, resolution)."""
    frames = len(centre)
    theta = torch.zeros(frames, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = scale
    theta[:, 0, 2], theta[:, 1, 2] = centre[:, 1], centre[:, 0]
    grid = torch.nn.functional.affine_grid(theta, [frames, 1, resolution, resolution], align_corners=False)
    return torch.nn.functional.grid_sample(source[:, None], grid, align_corners=False).squeeze(1)
