"""Clips longer than any that was trained on, frame after frame: ``python -m mhla_diffusers.demo.streaming``.

The adapted causal patch generates them, and a classifier says in which frames the digits are those that were asked for.
Beside it stands softmax attention at the length that it was trained on, which is as far as it goes.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..devices import free_threads, threads
from ..files import write_json
from ..generation.streaming import decode_latents, stream_latents
from ..patching import load_mhla, require_layers
from ..reporting import html_media, html_table, text_table
from ..tiny import TINY, TinyPipeline, load_tiny
from ..tiny.digits import FRAMES, Scene
from .figures import draw_clips
from .judging import DigitClassifier, generate_scenes, load_classifier, scene_crops

LONGER = 4
"""Times the length that was trained on."""
_SCENES = 24
HEADER = ("attention", "frames", "digits right", "first quarter", "second", "third", "fourth")


@dataclass(frozen=True)
class Judged:
    """Clips of one attention, judged frame by frame."""

    name: str
    pictures: list[torch.Tensor]
    """For every scene (F, 64, 64) in [0, 1]."""
    right: list[float]
    """For every frame the part of the digits, over all scenes, that is recognised."""

    @classmethod
    def of(
        cls,
        name: str,
        pictures: list[torch.Tensor],
        scenes: Sequence[Scene],
        tiny: TinyPipeline,
        judge: DigitClassifier,
    ) -> "Judged":
        """Judge pictures of scenes."""
        found = []
        for picture, scene in zip(pictures, scenes, strict=True):
            crops, labels = scene_crops(picture, scene, tiny.digit_size)
            with torch.no_grad():
                right = judge(crops).argmax(dim=1) == labels
            found.append(right.view(len(scene.labels), -1))
        return cls(name, pictures, torch.cat(found).float().mean(dim=0).tolist())

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table: all frames, and of a long clip its quarters."""
        by_frame = torch.tensor(self.right)
        parts = [by_frame, *(by_frame.chunk(LONGER) if len(by_frame) > FRAMES else ())]
        shown = [f"{part.mean():.1%}" for part in parts]
        return self.name, str(len(by_frame)), *shown, *[""] * (len(HEADER) - 2 - len(shown))


def load_streamed(tiny: TinyPipeline, device: str = "cpu") -> Any:
    """The tiny pipeline with its causal patch."""
    return load_mhla(load_tiny(tiny.family, device), f"tiny-{tiny.family}-causal")


def stream_scenes(pipe: Any, tiny: TinyPipeline, scenes: Sequence[Scene], frames: int, seed: int) -> list[torch.Tensor]:
    """Generate clips of scenes frame block after frame block.

    Args:
        pipe: the tiny pipeline with a causal patch.
        tiny: its description.
        scenes: what to generate, as one batch.
        frames: of each clip, whole frame blocks.
        seed: of the first scene; the next one has the next seed.

    Returns:
        For each scene (frames, 64, 64) in [0, 1].
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
    judge, pipe = load_classifier(), load_streamed(tiny, device)
    usual = generate_scenes(load_tiny(tiny.family, device, control=True), tiny, scenes, seed)
    long = stream_scenes(pipe, tiny, scenes, LONGER * FRAMES, seed)
    return [
        Judged.of("softmax", usual, scenes, tiny, judge),
        Judged.of("MHLA, causal, the same frames", [clip[:FRAMES] for clip in long], scenes, tiny, judge),
        Judged.of("MHLA, causal, streamed", long, scenes, tiny, judge),
    ]


def section_of_page(judged: Sequence[Judged], scenes: Sequence[Scene], folder: Path) -> str:
    """HTML of table and clips, which are drawn into a folder as well."""
    long = judged[-1]
    clips = draw_clips(long.name, long.pictures, scenes, folder / "stream.gif")
    told = (
        f"A few frames after others, {LONGER} times as many as were trained on, each seeing what is kept of the frames "
        "before it, which takes the same memory however many there are."
    )
    return f"<p>{told}</p>{html_table(HEADER, (one.cells for one in judged))}{html_media(clips, long.name)}"


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/stream"))
    parser.add_argument("--scenes", type=int, default=_SCENES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tiny, chance = TINY["wan"], random.Random(arguments.seed)
    scenes = [tiny.random_scene(chance) for _ in range(arguments.scenes)]
    with threads(free_threads()):
        judged = judge_streams(tiny, scenes, arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {
        "command": f"python -m mhla_diffusers.demo.streaming --scenes {arguments.scenes} --seed {arguments.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "digits right, by frame": {one.name: one.right for one in judged},
    }
    write_json(results, arguments.output / "stream.json")
    draw_clips(judged[-1].name, judged[-1].pictures, scenes, arguments.output / "stream.gif")
    sys.stdout.write(f"{text_table(HEADER, (one.cells for one in judged), right=True)}\n")


if __name__ == "__main__":
    main()
