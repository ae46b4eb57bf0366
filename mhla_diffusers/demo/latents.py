"""Digit scenes as the transformers see them: latents and conditioning."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from ..families import Sample, get_family
from ..tiny import TinyPipeline
from ..tiny.digits import Scene, Split, compose, load_digits, to_rgb
from ..training import InMemoryData

_BATCH = 16


@torch.no_grad()
def digit_latents(pipe: Any, tiny: TinyPipeline, samples: int, held_out: int, seed: int = 0) -> InMemoryData:
    """Random scenes, encoded with a pipeline's own autoencoder and text encoder.

    Args:
        pipe: the tiny pipeline, or one that is still to be trained.
        tiny: its description.
        samples: scenes of training digits.
        held_out: scenes of held-out digits, which come last.
        seed: the same seed gives the same scenes.

    Returns:
        Samples for :func:`mhla_diffusers.training.train`, on the CPU.
    """
    family = get_family(pipe.transformer)
    prompts: dict[str, Sample] = {}

    def encode(prompt: str) -> Sample:
        if prompt not in prompts:
            conditioning = family.encode_prompt(pipe, prompt, tiny.call_settings)
            prompts[prompt] = {name: tensor.cpu() for name, tensor in conditioning.items()}
        return prompts[prompt]

    encoded: list[Sample] = []
    splits: tuple[tuple[Split, int], ...] = (("train", samples), ("held-out", held_out))
    for split, count in splits:
        for scenes, pixels in _batches(tiny, split, count, seed):
            latents = family.encode_pixels(pipe, pixels.to(pipe.vae.device)).cpu()
            for scene, own in zip(scenes, latents, strict=True):
                encoded.append({"latents": own, **encode(tiny.prompt(scene))})
    return InMemoryData(encoded, empty=encode(""))


def cut_clips(data: InMemoryData, frames: int, held_out: int) -> InMemoryData:
    """Short pieces of clips, as many as fit side by side; of each of the last ``held_out`` clips the first piece.

    That a piece is what the autoencoder would make of it alone is particular to the tiny one, which sees single frames.
    """
    pieces: list[Sample] = []
    for index in range(len(data)):
        sample = data[index]
        length = sample["latents"].shape[1]
        starts = range(0, length - frames + 1, frames) if index < len(data) - held_out else (0,)
        pieces += [{**sample, "latents": sample["latents"][:, start : start + frames].clone()} for start in starts]
    return InMemoryData(pieces, empty=data.empty)


def _batches(tiny: TinyPipeline, split: Split, count: int, seed: int) -> Iterator[tuple[list[Scene], torch.Tensor]]:
    """Scenes and their pictures (B, 3, F, H, W) in [-1, 1]."""
    chance = random.Random(f"{seed} {split}")
    digits = load_digits(split)
    for start in range(0, count, _BATCH):
        scenes = [tiny.random_scene(chance) for _ in range(min(_BATCH, count - start))]
        pictures = [compose(scene, digits, tiny.digit_size, chance.randrange(2**32)) for scene in scenes]
        yield scenes, torch.stack([to_rgb(picture) for picture in pictures])
