"""How a family's models are trained: their process, encoding latents and prompts, and calling the pipeline."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .forward import Forward, Kwargs, Sample, undefined
from .models import Clip
from .packing import unpack
from .processes import KNOWN_FRAMES, DiffusionProcess, FlowMatching


@dataclass(kw_only=True, eq=False)
class Training:
    """How a family's models are trained, encoded for and called. A subclass overrides the methods that differ."""

    ddpm: Callable[[], DiffusionProcess] | None = None
    """Makes the process of models that were not trained with flow matching."""
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the pipeline's ``encode_prompt`` that differ from its defaults."""
    pads_text: bool = False
    """Whether samples hold the text, padded with zeros to one length, and its mask, which are the conditions."""
    encodes_frames: bool = False
    """Whether images are encoded by an autoencoder of videos, for which an image is one frame."""
    prompts_are_classes: bool = False
    """Whether the model is conditioned on classes, by number or name, instead of text."""
    forward: Forward = field(init=False)
    """The family's, which :attr:`Family.training` sets."""

    @property
    def suffix(self) -> str:
        """Suffix of generated files: ``.mp4`` or ``.png``."""
        return ".mp4" if self.forward.makes_videos else ".png"

    # Training

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return the process that the model was trained with, by default flow matching.

        Channels of a picture, which a video model takes and does not predict, stay clean.

        Raises:
            ValueError: the transformer is conditioned on pictures.
        """
        config = transformer.config
        self._check_trained_on_text(config)
        if self.ddpm is not None:
            return self.ddpm()
        scale = 1e-3 if self.forward.takes_sigma else 1.0
        process = FlowMatching(flow_shift, scale, is_reversed=self.forward.time_is_reversed)
        if self.forward.makes_videos and config.in_channels != (config.get("out_channels") or config.in_channels):
            process.channels = int(config.out_channels)
        return process

    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Return the prediction for latents (B, C, ...), of their shape: by default the output, towards the noise."""
        if self.forward.packs_latents:
            output = unpack(output, self.forward.token_grid(transformer, latents), self.forward.patch(transformer))
        predicted: Tensor = -output if self.forward.time_is_reversed else output
        return predicted

    def prepare_for_training(self, transformer: nn.Module) -> None:
        """Called once after ``transformer.train()``: disables anything that draws its own random numbers."""

    def parts_to_gather(self, transformer: nn.Module) -> list[nn.Module]:
        """Return the modules that several blocks use; FSDP2 must gather them separately."""
        return []

    def needs_pictures(self, config: Any) -> bool:
        """Whether a transformer of this configuration needs pictures beside text, and so cannot be trained here."""
        return False

    def _check_trained_on_text(self, config: Any) -> None:
        if self.needs_pictures(config):
            raise ValueError(
                "This checkpoint is conditioned on pictures, which captions do not hold. It can be patched and "
                "generates; encode and train with a text-to-video checkpoint."
            )

    # Encoding

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode clips to latents in the transformer's scale; a first latent frame that is a picture by itself.

        Args:
            pipe: pipeline with its autoencoder.
            pixels: (B, 3, F, H, W) in [-1, 1], on the autoencoder's device and in its type.

        Returns:
            float32 (B, C, F, H, W), or (B, C, H, W) for images.
        """
        latents = self.encoded(pipe, pixels)
        if not self.keeps_first_frame(pipe, pipe.transformer.config):
            return latents
        return torch.cat([self.encoded(pipe, pixels[:, :, :1]), latents[:, :, 1:]], dim=2)

    def encoded(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Run the autoencoder on clips, and scale their latents as :func:`scaled_latents`."""
        found = pipe.vae.encode(pixels if self.forward.makes_videos or self.encodes_frames else pixels[:, :, 0])
        latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
        scaled = scaled_latents(pipe.vae, latents.float())
        return scaled[:, :, 0] if self.encodes_frames else scaled

    def encode_picture(self, pipe: Any, pixels: Tensor) -> Sample:
        """Return the kwargs of the transformer's forward that come from a clip (1, 3, F, H, W).

        By default none, beside :data:`~.processes.KNOWN_FRAMES`, the number of given latent frames, where the first is
        a picture.
        """
        return {KNOWN_FRAMES: torch.tensor(1)} if self.keeps_first_frame(pipe, pipe.transformer.config) else {}

    def picture_settings(self, pipe: Any, pixels: Tensor) -> Mapping[str, Any]:
        """Return the settings of :meth:`encode_prompt` that come from a clip (1, 3, F, H, W).

        By default its first frame as ``image``, where prompts of videos are encoded with a picture.
        """
        is_taken = self.forward.makes_videos and "image" in inspect.signature(pipe.encode_prompt).parameters
        return {"image": first_picture(pipe, pixels)} if is_taken else {}

    def beside(self, pipe: Any, latents: Tensor, *pictures: Tensor) -> Tensor:
        """Add channels of pictures, each (B, C, F, H, W) with at most the latents' frames, filled up with zeros.

        Raises:
            ValueError: the transformer takes another number of channels.
        """
        frames, wanted = latents.shape[2], self.forward.channels(pipe.transformer.config)
        filled = [functional.pad(one, (0, 0, 0, 0, 0, frames - one.shape[2])) for one in pictures]
        found = torch.cat([latents, *filled], dim=1)
        if wanted != found.shape[1]:
            raise ValueError(
                f"{type(pipe.transformer).__name__} takes {wanted} channels, not the {latents.shape[1]} of latents or "
                f"the {found.shape[1]} with a first frame; give the samples as InMemoryData."
            )
        return found

    def keeps_first_frame(self, pipe: Any, config: Any) -> bool:
        """Whether a pipeline, or its class, gives its picture to the transformer as a first latent frame without noise.

        ``config`` is the transformer's configuration.
        """
        return False

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Return the kwargs of the transformer's forward for a prompt, without a batch axis, by default ``conditions``.

        Args:
            pipe: pipeline with its text encoder.
            prompt: text, or a class; "" for the empty prompt.
            settings: of the pipeline's call; settings that ``encode_prompt`` does not take are ignored.

        Raises:
            ValueError: a prompt that the model does not know, a transformer that is conditioned on pictures, or the
                family does not define how prompts are encoded.
        """
        config = pipe.transformer.config
        self._check_trained_on_text(config)
        conditions = self.forward.conditions_of(config)
        if not conditions:
            raise undefined(self, "how prompts are encoded", "encode_prompt")
        usual = {"max_sequence_length": conditions[0].sizes(config)[0], **self.text_settings}
        tokens = {**usual, **(settings or {})}
        outputs = self.encode_text(pipe, prompt, tokens)
        if self.pads_text:
            embeddings, masks = outputs
            return self._padded(embeddings, masks, tokens["max_sequence_length"])
        found = {one.name: (outputs[one.output][0], one.dtype) for one in conditions}
        return {name: x if dtype.is_floating_point else x.to(dtype) for name, (x, dtype) in found.items()}

    def _padded(self, embeddings: Any, masks: Any, length: int) -> Sample:
        """Return a text of one sample, padded with zeros to a length, and the mask of its tokens."""
        text, mask = self.forward.conditions
        # encode_prompt gives a mask, or None, or texts of a negative prompt in its place
        found = embeddings[0][masks[0].bool()] if isinstance(masks, Tensor) else embeddings[0]
        takes_part = torch.arange(length, device=found.device) < len(found)
        padded = functional.pad(found, (0, 0, 0, length - len(found)))
        return {text.name: padded, mask.name: takes_part.to(mask.dtype)}

    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Run the pipeline's ``encode_prompt`` without guidance; settings that it does not take are ignored."""
        known = inspect.signature(pipe.encode_prompt).parameters
        chosen = {name: value for name, value in settings.items() if name in known}
        if "do_classifier_free_guidance" in known:
            chosen["do_classifier_free_guidance"] = False
        return pipe.encode_prompt(**{**chosen, "prompt": prompt})

    # Calling the pipeline

    def class_count(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """Return the number of classes a pipeline was trained on, read without loading it; 0 if prompts are text."""
        return 0

    def check_class(self, index: Mapping[str, Any], config: Mapping[str, Any], prompt: str) -> None:
        """Raise ValueError for a class that a pipeline does not have, read without loading it."""

    def check_prompt(self, pipe: Any, prompt: str) -> None:
        """Raise ValueError for a class that the model does not have."""

    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> Kwargs:
        """Return the argument of the pipeline's call that takes the prompts."""
        return {"prompt": list(prompts)}

    def asked_frames(self, pipe: Any, frames: int) -> int:
        """Return what the pipeline's call must be asked for to give so many frames."""
        return frames

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

    def call(self, pipe: Any, prompts: Sequence[str], generators: Sequence[torch.Generator], **settings: Any) -> Any:
        """Generate one sample per prompt.

        Args:
            pipe: the pipeline, patched or not.
            prompts: text or classes.
            generators: noise of every sample; on the CPU for noise that does not depend on the device.
            **settings: further arguments of the pipeline's call.

        Returns:
            For every prompt a PIL image, or frames (F, H, W, 3) in [0, 1], unless ``output_type`` is set.

        Raises:
            ValueError: the pipeline needs more arguments, such as a picture.
        """
        usual = (
            {"output_type": "np"} if self.forward.makes_videos else {}
        )  # some pipelines return PIL images by default
        arguments = {**usual, **self.prompt_arguments(pipe, prompts), "generator": list(generators), **settings}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        missing = [
            name
            for name, parameter in inspect.signature(pipe.__call__).parameters.items()
            if parameter.default is parameter.empty and parameter.kind in by_name and name not in arguments
        ]
        if "image" not in (*arguments, *missing) and self.keeps_first_frame(pipe, pipe.transformer.config):
            missing.append("image")
        if missing:
            raise ValueError(
                f"{type(pipe).__name__} must be given {', '.join(missing)} beside prompts. mhla generate takes a "
                "picture (--image FILE); for anything else call the pipeline yourself. Train on videos of your own "
                "(mhla encode)."
            )
        guider = getattr(pipe, "guider", None)  # a component that takes the guidance in place of the pipeline
        if guider is not None and "guidance_scale" in arguments:
            pipe.guider = guider.new(guidance_scale=arguments.pop("guidance_scale"))
        try:
            output = pipe(**arguments)
        finally:
            if guider is not None:
                pipe.guider = guider
        return output.frames if self.forward.makes_videos else output.images

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> Tensor:
        """Generate latents in the transformer's scale: (C, ...)."""
        settings = {"num_inference_steps": steps, "output_type": "latent", **self.guidance_arguments(guidance)}
        latents: Tensor = self.call(pipe, [prompt], [generator], **self.clip_arguments(pipe, clip), **settings)[0]
        if self.forward.packs_latents and latents.ndim == 2:
            grid = self.forward.grid_of_clip(pipe, pipe.transformer, clip)
            latents = unpack(latents[None], grid, self.forward.patch(pipe.transformer))[0]
        return latents


def first_picture(pipe: Any, pixels: Tensor) -> Any:
    """Return the first frame of a clip (1, 3, F, H, W) as a PIL image."""
    return pipe.video_processor.postprocess(pixels[:, :, 0].float(), output_type="pil")[0]


def takes_picture(pipe: Any) -> bool:
    """Whether a pipeline, or its class, begins every video with a picture; one that takes any conditions need not."""
    known = inspect.signature(pipe.__call__).parameters
    return "image" in known and "conditions" not in known


def scaled_latents(vae: Any, latents: Tensor) -> Tensor:
    """Scale an autoencoder's latents (B, C, ...) as transformers take them.

    Uses the autoencoder's mean and deviation per channel, from its buffers or configuration, or its one shift, and its
    ``scaling_factor``; those that it lacks change nothing.
    """
    shift, scale = _scale_of(vae, latents)
    return (latents - shift) * scale


def unscaled_latents(vae: Any, latents: Tensor) -> Tensor:
    """Undo :func:`scaled_latents`, for an autoencoder to decode: (B, C, ...)."""
    shift, scale = _scale_of(vae, latents)
    return latents / scale + shift


def _scale_of(vae: Any, latents: Tensor) -> tuple[Any, Any]:
    """Return the shift and factor of the latents: numbers, or one value per channel."""
    known = {**vae.config, **dict(vae.named_buffers(recurse=False))}
    mean, deviation = (
        None if values is None else torch.as_tensor(values).to(latents).view(-1, *[1] * (latents.ndim - 2))
        for values in (known.get("latents_mean"), known.get("latents_std"))
    )
    shift = mean if mean is not None else known.get("shift_factor") or 0.0
    factor = known.get("scaling_factor") or 1.0
    return shift, factor if deviation is None else factor / deviation
