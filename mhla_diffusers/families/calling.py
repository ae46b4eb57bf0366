"""How a family's pipelines are called: prompts, sizes, guidance, outputs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .grids import grid_of_size
from .models import Clip, strides_of

Kwargs = dict[str, Any]
_SHOWN_LABELS = 12


@dataclass(kw_only=True, eq=False)
class Calling:
    """How a family's pipelines are called. A subclass overrides the methods that differ."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every call that differ from the pipeline's defaults."""
    prompts_are_classes: bool = False
    """Whether the model is conditioned on classes, by number or name, instead of text."""
    family: Any = field(init=False)

    @property
    def suffix(self) -> str:
        """Suffix of generated files: ``.mp4`` or ``.png``."""
        return ".mp4" if self.family.makes_videos else ".png"

    def classes(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[dict[str, int], int]:
        """Return label → class, and the number of classes, read without loading the pipeline; 0 if prompts are text."""
        return {}, 0

    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> Kwargs:
        """Return the argument of the pipeline's call that takes the prompts; ValueError for an unknown class."""
        return {"prompt": list(prompts)}

    def asked_frames(self, pipe: Any, frames: int) -> int:
        """Return the ``num_frames`` to pass to the pipeline for a clip of ``frames`` frames."""
        return frames

    def made_frames(self, pipe: Any, frames: int) -> int:
        """Return how many frames the pipeline makes for a ``num_frames``."""
        return frames

    def grid(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Return the token grid of what a pipeline generates for frames and a size in pixels."""
        temporal, spatial = strides_of(pipe.vae.config, of_videos=self.family.axes == 3)
        size = [side // spatial for side in clip.sizes[0]]
        if self.family.axes == 3:
            frames = self.made_frames(pipe, clip.frames)
            size.insert(0, self.family.latent_frames(transformer.config, frames, temporal))
        return grid_of_size(transformer, tuple(size), self.family.patch)

    def clip_arguments(self, pipe: Any, clip: Clip) -> Kwargs:
        """Return the kwargs of the pipeline's call for frames and size, as far as it has them."""
        height, width = clip.sizes[0]
        frames = dict.fromkeys(("num_frames", "frames", "video_length"), self.asked_frames(pipe, clip.frames))
        asked = {"height": height, "width": width, **frames, "use_resolution_binning": False}
        known = inspect.signature(pipe.__call__).parameters
        return {name: value for name, value in asked.items() if name in known}

    def guidance_arguments(self, guidance: float) -> Kwargs:
        """Return the kwargs of the pipeline's call for a guidance scale."""
        return {"guidance_scale": guidance}

    def begins_with_picture(self, pipe: Any, config: Any) -> bool:
        """Whether a pipeline, or its class, takes a picture as the first latent frame, not in channels of its own."""
        is_beside = config.get("in_channels") != config.get("out_channels")
        return self.family.makes_videos and takes_picture(pipe) and not is_beside

    def call(self, pipe: Any, prompts: Sequence[str], generators: Sequence[torch.Generator], **settings: Any) -> Any:
        """Generate one sample per prompt: a PIL image, or frames (F, H, W, 3) in [0, 1], unless ``output_type`` is set.

        ``generators`` draw each sample's noise.
        """
        usual = {"output_type": "np"} if self.family.makes_videos else {}  # some pipelines return PIL images by default
        arguments = {
            **usual,
            **self.settings,
            **self.prompt_arguments(pipe, prompts),
            "generator": list(generators),
            **settings,
        }
        guider = getattr(pipe, "guider", None)  # a component that takes the guidance in place of the pipeline
        if guider is not None and "guidance_scale" in arguments:
            pipe.guider = guider.new(guidance_scale=arguments.pop("guidance_scale"))
        try:
            output = pipe(**arguments)
        finally:
            if guider is not None:
                pipe.guider = guider
        return output.frames if self.family.makes_videos else output.images


class WanCalling(Calling):
    """Calls Wan's pipelines, which round frames to a multiple of the temporal stride plus one."""

    def asked_frames(self, pipe: Any, frames: int) -> int:
        """Leave out the frame that the pipeline adds where its temporal stride divides them, as 1 always does."""
        return frames - (pipe.vae_scale_factor_temporal == 1)

    def made_frames(self, pipe: Any, frames: int) -> int:
        """Round as the pipeline does."""
        stride, _ = strides_of(pipe.vae.config, of_videos=True)
        return frames if frames % stride == 1 else frames // stride * stride + 1


class TrueGuidanceCalling(Calling):
    """Qwen-Image's pipeline guides only if it is given a negative prompt."""

    def guidance_arguments(self, guidance: float) -> Kwargs:
        """Ask for classifier-free guidance, with the negative prompt of the pipeline's documentation."""
        return {"true_cfg_scale": guidance, **({"negative_prompt": " "} if guidance > 1 else {})}


class MiniMaxH3Calling(Calling):
    """Calls MiniMax-H3's modular pipeline, which may lack the autoencoder."""

    def grid(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Take the stride from the pipeline."""
        sides = (side // pipe.vae_spatial_compression_ratio for side in clip.sizes[0])
        return grid_of_size(transformer, (self.family.latent_frames(None, clip.frames, 1), *sides), self.family.patch)


@dataclass(kw_only=True, eq=False)
class ClassCalling(Calling):
    """Calls DiT's pipeline, with classes by number or label."""

    prompts_are_classes: bool = True

    def classes(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[dict[str, int], int]:
        """Return the labels that DiTPipeline reads, and their classes, or without labels all of the transformer."""
        named = index.get("id2label") or {}
        labels = {name.strip(): int(label) for label, names in named.items() for name in names.split(",")}
        return labels, len(named) or int(config["num_embeds_ada_norm"])

    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> Kwargs:
        """Give the classes as ``class_labels``."""
        return {"class_labels": [label_of(pipe, prompt) for prompt in prompts]}


def takes_picture(pipe: Any) -> bool:
    """Whether a pipeline (or its class) needs a first image for every video."""
    known = inspect.signature(pipe.__call__).parameters
    return "image" in known and "conditions" not in known


def label_of(pipe: Any, prompt: str) -> int:
    """Return the number of a class of a pipeline; ValueError if it has no such class."""
    return class_label(prompt, pipe.labels, pipe.transformer.config.num_embeds_ada_norm)


def class_label(prompt: str, labels: Mapping[str, int], count: int) -> int:
    """Return the number of a class of a pipeline, by number, name, or a phrase that ends in it, such as "a seven"."""
    numbers = {int(label) for label in labels.values()} or range(count)
    text = prompt.strip()
    number = text.lstrip("0") or text[-1:]
    if number in map(str, numbers):
        return int(number)
    lower = {name.lower(): label for name, label in labels.items()}
    for name in (text, *text.split()[-1:]):
        # case-sensitive first: "Cardigan" is a dog of ImageNet, "cardigan" is not
        label = labels.get(name, lower.get(name.lower()))
        if label is not None:
            return int(label)
    names = ", ".join(sorted(labels)[:_SHOWN_LABELS])
    raise ValueError(
        f"{prompt!r} is not a class of this DiT; give a number from {min(numbers)} to {max(numbers)}, or one of its "
        f"{len(labels)} labels, such as: {names or 'none'}."
    )
