"""Clips longer than any that was trained on, made frame after frame by the adapted causal patch and judged by frame.

Beside it stands softmax attention at the length that it was trained on, which is as far as it goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..generation.streaming import decode_latents, stream_latents
from ..patching import load_mhla, require_layers
from ..tiny import TinyPipeline, load_tiny
from ..tiny.digits import FRAMES, Scene
from .judging import DigitClassifier, generate_scenes, load_classifier, recognised

LONGER = 4
"""Times the length that was trained on."""
HEADER = ("attention", "frames", "digits right", "first quarter", "second", "third", "fourth")


@dataclass(frozen=True)
class Judged:
    """Clips of one attention, judged frame by frame."""

    name: str
    pictures: list[torch.Tensor]
    """For every scene (F, 64, 64) in [0, 1]."""
    right: list[float]
    """For every frame the part of the digits, over all scenes, that is recognised."""

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table: all frames, and of a long clip its quarters."""
        by_frame = torch.tensor(self.right)
        parts = [by_frame, *(by_frame.chunk(LONGER) if len(by_frame) > FRAMES else ())]
        shown = [f"{part.mean():.1%}" for part in parts]
        return self.name, str(len(by_frame)), *shown, *[""] * (len(HEADER) - 2 - len(shown))


def judge(
    name: str, pictures: list[torch.Tensor], scenes: Sequence[Scene], tiny: TinyPipeline, classifier: DigitClassifier
) -> Judged:
    """Judge one attention's pictures of scenes."""
    found = [recognised(picture, scene, tiny, classifier) for picture, scene in zip(pictures, scenes, strict=True)]
    return Judged(name, pictures, torch.cat(found).float().mean(dim=0).tolist())


def load_streamed(tiny: TinyPipeline, device: str = "cpu") -> Any:
    """The tiny pipeline with its causal patch."""
    return load_mhla(load_tiny(tiny.family, device), f"tiny-{tiny.family}-causal")


def stream_scenes(pipe: Any, tiny: TinyPipeline, scenes: Sequence[Scene], frames: int, seed: int) -> list[torch.Tensor]:
    """Generate clips (frames, 64, 64) of scenes frame block after frame block, as one batch.

    Args:
        pipe: the tiny pipeline with a causal patch.
        tiny: its description.
        scenes: what to generate.
        frames: of each clip, whole frame blocks.
        seed: of the first scene; the next one has the next seed.
    """
    settings = tiny.call_settings
    length = next(iter(require_layers(pipe.transformer).values())).config.block_length or 1
    latents = stream_latents(
        pipe,
        [tiny.prompt(scene) for scene in scenes],
        frames // length,
        height=settings["height"],
        width=settings["width"],
        steps=settings["num_inference_steps"],
        guidance=settings["guidance_scale"],
        generator=[torch.Generator().manual_seed(seed + place) for place in range(len(scenes))],
        max_sequence_length=settings["max_sequence_length"],
    )
    return list(decode_latents(pipe, torch.cat(list(latents), dim=2)).mean(dim=-1).unbind())


def judge_streams(tiny: TinyPipeline, scenes: Sequence[Scene], seed: int, device: str = "cpu") -> list[Judged]:
    """Softmax at the length that was trained on, then the causal patch at ``LONGER`` times this."""
    classifier = load_classifier()
    usual = generate_scenes(load_tiny(tiny.family, device, control=True), tiny, scenes, seed)
    long = stream_scenes(load_streamed(tiny, device), tiny, scenes, LONGER * FRAMES, seed)
    made = {
        "softmax": usual,
        "MHLA, causal, the same frames": [clip[:FRAMES] for clip in long],
        "MHLA, causal, streamed": long,
    }
    return [judge(name, pictures, scenes, tiny, classifier) for name, pictures in made.items()]
