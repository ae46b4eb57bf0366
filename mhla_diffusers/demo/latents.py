"""Digit scenes as the transformers see them: latents and conditioning."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from ..training import InMemoryData
from ..tiny.digits import DIGIT_SIZES, Scene, Split, compose, load_digits, random_scene, to_rgb
from .text import MAX_TOKENS

NO_CLASS = 1000
"""Label of "no class" in ``DiTPipeline``."""

_BATCH = 16


def digit_latents(pipe: Any, family: str, samples: int, held_out: int, seed: int = 0) -> InMemoryData:
    """Random scenes, encoded with a pipeline's own autoencoder and text encoder.

    Args:
        pipe: the tiny pipeline, or one that is still to be trained.
        family: dit, sana or wan.
        samples: scenes of training digits.
        held_out: scenes of held-out digits, which come last.
        seed: the same seed gives the same scenes.

    Returns:
        Samples for :func:`mhla_diffusers.training.train`.
    """
    prompts: dict[str, dict[str, torch.Tensor]] = {}
    encoded: list[dict[str, torch.Tensor]] = []
    splits: tuple[tuple[Split, int], ...] = (("train", samples), ("held-out", held_out))
    for split, count in splits:
        for scenes, pictures in _batches(family, split, count, seed):
            for scene, latents in zip(scenes, encode_pictures(pipe, family, pictures), strict=True):
                if scene.caption not in prompts:
                    prompts[scene.caption] = encode_scene(pipe, family, scene)
                encoded.append({"latents": latents, **prompts[scene.caption]})
    return InMemoryData(encoded, empty=encode_scene(pipe, family, None))


def cut_clips(data: InMemoryData, frames: int, held_out: int) -> InMemoryData:
    """Short pieces of clips, as many as fit side by side; of each of the last ``held_out`` clips the first piece.

    That a piece is what the autoencoder would make of it alone is particular to the tiny one, which sees single frames.
    """
    pieces: list[dict[str, torch.Tensor]] = []
    for index in range(len(data)):
        sample = data[index]
        length = sample["latents"].shape[1]
        starts = range(0, length - frames + 1, frames) if index < len(data) - held_out else (0,)
        pieces += [{**sample, "latents": sample["latents"][:, start : start + frames].clone()} for start in starts]
    return InMemoryData(pieces, empty=data.empty)


def _batches(family: str, split: Split, count: int, seed: int) -> Iterator[tuple[list[Scene], torch.Tensor]]:
    chance = random.Random(f"{seed} {split}")
    digits = load_digits(split)
    for start in range(0, count, _BATCH):
        scenes = [random_scene(family, chance) for _ in range(min(_BATCH, count - start))]
        pictures = [compose(scene, digits, DIGIT_SIZES[family], chance.randrange(2**32)) for scene in scenes]
        yield scenes, torch.stack([to_rgb(picture) for picture in pictures])


@torch.no_grad()
def encode_pictures(pipe: Any, family: str, pictures: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, ...) of pictures (B, 3, ...) in [-1, 1], of the scale that the transformer takes."""
    encoded = pipe.vae.encode(pictures.to(pipe.vae.device))
    latents = (encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent).cpu()
    if family != "wan":
        return latents * pipe.vae.config.scaling_factor
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    return (latents - mean) / std


@torch.no_grad()
def encode_scene(pipe: Any, family: str, scene: Scene | None) -> dict[str, torch.Tensor]:
    """Conditioning of a scene, or of none: arguments of the transformer's forward without their batch axis."""
    if family == "dit":
        return {"class_labels": torch.tensor(NO_CLASS if scene is None else scene.labels[0])}
    caption = "" if scene is None else scene.caption
    encoded = pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS)
    if family == "wan":
        return {"encoder_hidden_states": encoded[0][0].cpu()}
    return {"encoder_hidden_states": encoded[0][0].cpu(), "encoder_attention_mask": encoded[1][0].cpu()}
