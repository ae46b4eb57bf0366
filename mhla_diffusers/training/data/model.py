"""A model as far as data depends on it, read without weights."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...errors import check
from ...families import Clip, trained_family
from ...families.models import strides_of
from ...files import fingerprint, read_json
from ...generation.pipelines import (
    check_classes,
    component_identity,
    family_of,
    pipeline_file,
    pipeline_source,
    transformer_without_weights,
    usual_clip,
)
from ...reporting import times
from .clips import Clips, auto_sizes


class DataModel:
    """Clips, tokens and captions of the model in a pipeline; ValueError for one that is not trained here."""

    def __init__(self, model: str) -> None:
        import diffusers

        self.name = pipeline_source(model)
        self.family = trained_family(family_of(self.name).name)
        self.usual = usual_clip(self.name, self.family)
        self.transformer = transformer_without_weights(self.name, self.family.name)
        self.vae: dict[str, Any] = read_json(pipeline_file(self.name, "vae/config.json"))
        cls = getattr(diffusers, str(read_json(pipeline_file(self.name, "model_index.json"))["_class_name"]), None)
        is_known = cls is not None and self.family.calling.begins_with_picture(cls, self.transformer.config)
        self.begins_with_picture = bool(is_known)
        """Whether its pipeline gives the first frame to the transformer, without noise."""

    def fitted(self, clips: Clips | None) -> Clips:
        """Return clips, or the model's own for None, with sizes for the model; ValueError for what it cannot take."""
        clips = clips or Clips(self.usual.frames, self.usual.fps, self.usual.sizes)
        family, sizes = self.family, clips.sizes
        temporal, spatial = strides_of(self.vae, of_videos=family.axes == 3)
        step = spatial * family.patch_of(self.transformer)[-1]
        if isinstance(sizes, str):
            first = clips.auto_size(self.usual)
            sizes = (first,) if family.squares_only else auto_sizes(first, step)
        for size in sizes:
            nearest = [max(step, round(side / step) * step) for side in size]
            divides = all(side > 0 and side % step == 0 for side in size)
            check(divides, f"Size {times(size)} must be divisible by {step}; the nearest is {times(nearest)}.")
            check(
                not family.squares_only or size[0] == size[1],
                f"Size {times(size)} is not square, but {family.name} only makes squares; try {size[0]}x{size[0]}.",
            )
        for frames in clips.lengths:
            if not family.makes_videos:
                check(frames == 1, f"frames={frames} is for video models; this one makes images, so frames must be 1.")
                continue
            near = max(0, round((frames - 1) / temporal)) * temporal + 1
            check(
                (frames - 1) % temporal == 0,
                f"frames={frames} must be 1 more than a multiple of {temporal}; try {near}.",
            )
            check(
                frames > 1 or not self.begins_with_picture,
                "frames=1 is the picture alone, which image-to-video does not predict; ask for more frames.",
            )
        return replace(clips, sizes=sizes)

    def check_captions(self, captions: Iterable[str]) -> None:
        """Raise ValueError for a caption that is not a class of a model for classes."""
        check_classes(self.name, self.family.name, captions)

    def header(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what identifies latents that it encodes with some settings; weights on the Hub are None."""
        parts: dict[str, Any] = {}
        for name in ("vae", "text_encoder"):
            parts |= {name: component_identity(self.name, name), f"{name}_weights": fingerprint(Path(self.name, name))}
        return {"family": self.family.name, **parts, "begins_with_picture": self.begins_with_picture, **settings}

    def latent_shape(self, bucket: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the latents of a clip of frames, height and width."""
        clip = Clip(bucket[0], self.usual.fps, ((bucket[1], bucket[2]),))
        return self.family.inputs.latent_shape(self.transformer.config, self.vae, clip)

    def tokens(self, latents: tuple[int, ...]) -> int:
        """Return how many tokens self-attention has for latents of a shape."""
        return prod(self.family.token_grid(self.transformer, torch.empty(1, *latents, device="meta")))
