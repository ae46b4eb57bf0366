"""Facts about a model that its training data depend on, read without weights."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...errors import check
from ...families import Clip, trained_family
from ...families.calling import class_label
from ...families.models import strides_of
from ...files import fingerprint, read_json
from ...generation.pipelines import (
    classes_of,
    component_identity,
    family_of,
    pipeline_file,
    pipeline_source,
    transformer_without_weights,
    usual_clip,
)
from ...reporting import parse_size, times
from .cache import SourceFile
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
        begins = cls is not None and self.family.calling.begins_with_picture(cls, self.transformer.config)
        self.begins_with_picture: bool = begins
        """Whether its pipeline gives the first frame to the transformer, without noise."""

    def clips(
        self,
        frames: Sequence[int] | None = None,
        fps: float | None = None,
        sizes: Sequence[str] | None = None,
        stride: int | None = None,
        longest: bool = False,
        upscale: bool = False,
    ) -> Clips:
        """Return clips of the model's own length, rate and size, or others; ValueError for what it cannot take.

        ``sizes`` are texts such as "480x832"; "auto" among them adds usual aspect ratios in the area of the first.
        ``longest`` adds the model's lengths between the smallest and the largest, or all up to a single one.
        """
        temporal, spatial = strides_of(self.vae, of_videos=self.family.axes == 3)
        step = spatial * self.family.patch_of(self.transformer)[-1]
        chosen = tuple(parse_size(size) for size in sizes or () if size != "auto") or self.usual.sizes
        if "auto" in (sizes or ()) and not self.family.squares_only:
            chosen = tuple(auto_sizes(chosen[0], step))
        lengths = tuple(sorted(set(frames or (self.usual.frames,))))
        if longest:
            least = lengths[0] if len(lengths) > 1 else min(lengths[0], 1 + temporal)
            lengths = tuple(sorted({*lengths, *range(least, lengths[-1], temporal)}))
        fps = fps or self.usual.fps
        found = Clips(frames=lengths, fps=fps, sizes=chosen, stride=stride, longest=longest, upscale=upscale)
        squares = self.family.squares_only
        for size in found.sizes:
            height, width = (max(step, round(side / step) * step) for side in size)
            near = (height, height if squares else width)
            check(
                size == near,
                f"Size {times(size)} must be divisible by {step}{' and square' * squares}; try {times(near)}.",
            )
        for length in found.frames:
            usable = max(0, round((length - 1) / temporal)) * temporal + 1 if self.family.makes_videos else 1
            check(
                length == usable,
                f"frames={length} must be 1, or for video models 1 more than a multiple of {temporal}; try {usable}.",
            )
            check(
                length > 1 or not self.begins_with_picture,
                "frames=1 is only the input image, and image-to-video predicts the frames after it; give more frames.",
            )
        return found

    def check_captions(self, files: Sequence[SourceFile]) -> None:
        """Raise ValueError for a caption that is not a class of a model for classes."""
        if self.family.calling.prompts_are_classes:
            labels, count = classes_of(self.name, self.family)
            for caption in (one for file in files if file.problem is None for one in file.captions):
                class_label(caption, labels, count)

    def header(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what identifies latents that it encodes with some settings; weights on the Hub are None."""
        parts: dict[str, Any] = {}
        for name in ("vae", "text_encoder"):
            parts |= {name: component_identity(self.name, name), f"{name}_weights": fingerprint(Path(self.name, name))}
        return {"family": self.family.name, **parts, "begins_with_picture": self.begins_with_picture, **settings}

    def latents_of(self, bucket: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return the shape of the latents of a clip of frames, height and width, and self-attention's tokens."""
        clip = Clip(frames=bucket[0], fps=self.usual.fps, sizes=((bucket[1], bucket[2]),))
        shape = self.family.inputs.latent_shape(self.transformer.config, self.vae, clip)
        return shape, prod(self.family.token_grid(self.transformer, torch.empty(1, *shape, device="meta")))
