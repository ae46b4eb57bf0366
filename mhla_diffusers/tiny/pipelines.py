"""The tiny pipelines: what each one shows, and how it is called and patched; ``tools/make_tiny.py`` makes them.

Pictures are 64 pixels high and wide, a clip has 9 frames; autoencoders make 4 channels of latents at a quarter of the
resolution, frame by frame. The transformers of DiT and SANA see 64 tokens of an image, that of Wan 9x8x8 = 576 of a
clip.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch

from .digits import FRAMES, MOTIONS, PICTURE_SIZE, Digits, Scene, compose, parse_caption

_TEXT_CALL = {
    "num_inference_steps": 20,
    "guidance_scale": 3.0,
    "height": PICTURE_SIZE,
    "width": PICTURE_SIZE,
    "max_sequence_length": 10,  # the longest caption has eight tokens
}


@dataclass(frozen=True)
class TinyPipeline:
    """One tiny pipeline of real diffusers classes."""

    name: str
    """The pipeline is tiny-<name>; that of its family has the family's name."""
    family: str
    call_settings: dict[str, Any]
    """Arguments of the pipeline's call that it was trained for."""
    blocks: tuple[int, ...] = (4, 4)
    """Block counts that suit its token grid."""
    block_size: int | None = None
    """Tokens of a block of sparse attention that suit its token grid; None where its own attention is not softmax."""
    mixing_per_head: bool = False
    """Whether its MHLA has a mixing matrix for every head, as the presets of the family have it."""
    batch_size: int = 16
    """Samples per update when a patch is adapted."""
    picture_size: int = PICTURE_SIZE
    """Height and width in pixels of a picture."""
    digit_size: int = 28
    """Height and width in pixels of a drawn digit."""
    most_digits: int = 2
    motions: tuple[str | None, ...] = (None,)
    """How digits move; None for pictures."""
    prompts_are_classes: bool = False
    """Whether it is asked for the number of a digit instead of a caption."""

    @property
    def is_video(self) -> bool:
        """Whether its digits move."""
        return self.motions != (None,)

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
        """Draw a scene as :func:`compose`, at the pipeline's sizes: float32 (F, S, S) in [0, 1]."""
        return compose(scene, digits, self.digit_size, seed, self.picture_size)

    def prompt(self, scene: Scene) -> str:
        """Return what the pipeline is asked for, to get a scene."""
        return str(scene.labels[0]) if self.prompts_are_classes else scene.caption

    def scene(self, prompt: str) -> Scene | None:
        """Return the scene that a prompt asks for; None for another tiny pipeline's, ValueError without digit words."""
        if self.prompts_are_classes:
            return Scene((int(prompt),)) if prompt.isdigit() else None
        scene = parse_caption(prompt)
        return scene if (scene.motion is not None) == self.is_video else None


TINY: dict[str, TinyPipeline] = {
    "dit": TinyPipeline(
        "dit",
        "dit",
        {"num_inference_steps": 30, "guidance_scale": 4.0},
        block_size=2,
        digit_size=52,
        most_digits=1,
        prompts_are_classes=True,
    ),
    "sana": TinyPipeline(
        "sana", "sana", {**_TEXT_CALL, "use_resolution_binning": False, "complex_human_instruction": None}
    ),
    "wan": TinyPipeline(
        "wan",
        "wan",
        # WanPipeline rounds the number of frames to a multiple of the temporal stride and adds one
        {**_TEXT_CALL, "num_frames": FRAMES - 1},
        blocks=(3, 4, 4),
        block_size=4,
        mixing_per_head=True,
        batch_size=4,
        motions=MOTIONS,
    ),
}
"""Name → tiny pipeline."""


def tiny_pipeline(name: str) -> TinyPipeline:
    """Return the description of the tiny pipeline of a name, such as that of a family; ValueError without one."""
    if name not in TINY:
        raise ValueError(f"family={name!r} has no tiny pipeline; allowed: {', '.join(TINY)}.")
    return TINY[name]
