"""What is particular to one model family; everything else in the package asks a family.

A family has no state: it tells where the self-attentions of a transformer are and how its tokens lie, how the model was
trained, what conditions it, how its pipeline is called, and at which sizes it is measured.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from .encoding import of_unit_scale
from .processes import DiffusionProcess
from .sizes import Clip, Model, strides_of
from .structure import Sample, Structure

_STRIDES = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
"""Attributes of diffusers' pipelines: pixels per latent along height and width."""
_TEMPORAL_STRIDES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
"""Frames per latent frame, after the first one."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Family(Structure):
    """Tells everything about one family of diffusers transformers.

    To add a model, subclass this, fill in what is abstract, change what differs from a text-to-image pipeline with an
    ``encode_prompt``, and pass an instance to :func:`register_family`; ``docs/add-a-model.md`` shows one.
    """

    default_clip: ClassVar[Clip] = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    """What is encoded or generated when nothing else is said: frames, rate and size."""
    prompts_are_classes: ClassVar[bool] = False
    """Whether the model is conditioned on classes, given by number or name, and not on text."""
    models: ClassVar[tuple[Model, ...]] = ()
    """Configurations that ``mhla bench`` builds with random weights."""
    measured_unasked: ClassVar[bool] = False
    """Whether ``mhla bench`` on a GPU measures them where no model is named."""

    @property
    def suffix(self) -> str:
        """Of the files that hold what is generated: ``.mp4`` or ``.png``."""
        return ".mp4" if self.makes_videos else ".png"

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Token grid of what a pipeline makes of frames and size in pixels.

        By default the autoencoder's strides divide them, and the first frame becomes a latent frame of its own.
        """
        stride, sides = self.spatial_stride(pipe), clip.sizes[0]
        frames = [(clip.frames - 1) // self.temporal_stride(pipe) + 1] if self.makes_videos else []
        latents = torch.empty(1, 1, *frames, *(side // stride for side in sides), device="meta")
        return tuple(int(size) for size in self.token_grid(transformer, latents))

    # Training

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """The process that the model was trained with.

        Args:
            transformer: whose configuration may change it.
            flow_shift: shift of the timesteps, for families trained with flow matching.

        Raises:
            ValueError: the family does not tell.
        """
        raise self._unknown("how the model was trained", "process")

    def prepare_for_training(self, transformer: nn.Module) -> None:
        """Called once after ``transformer.train()``: switches off what draws random numbers of its own."""

    def parts_to_gather(self, transformer: nn.Module) -> list[nn.Module]:
        """Modules that more than one block uses, which FSDP2 must gather by themselves."""
        return []

    # Latents and conditioning

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Latents of clips, of the scale that the transformer takes; by default see :func:`of_unit_scale`.

        Args:
            pipe: pipeline with its autoencoder.
            pixels: (B, 3, F, H, W) in [-1, 1], on the autoencoder's device and in its type.

        Returns:
            float32 (B, C, F, H, W), or (B, C, H, W) for images.
        """
        encoded = pipe.vae.encode(pixels if self.makes_videos else pixels[:, :, 0])
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        return of_unit_scale(pipe.vae, latents.float())

    def encode_picture(self, pipe: Any, pixels: torch.Tensor) -> Sample:
        """Arguments of the transformer's forward that come from a clip itself, without a batch axis; by default none.

        Args:
            pipe: pipeline with its encoders.
            pixels: one clip, (1, 3, F, H, W) in [-1, 1].
        """
        return {}

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Arguments of the transformer's forward for a prompt, without a batch axis; "" for the empty prompt.

        Args:
            pipe: pipeline with its text encoder.
            prompt: text, or a class.
            settings: of the pipeline's call; those that its ``encode_prompt`` takes change how text is encoded.

        Raises:
            ValueError: a prompt that the model does not know, or the family does not tell.
        """
        raise self._unknown("how prompts are encoded", "encode_prompt")

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """What :meth:`encode_prompt` gives, without values, on the meta device.

        Args:
            transformer: configuration of the transformer.

        Raises:
            ValueError: the family does not tell.
        """
        raise self._unknown("what conditions the model", "conditioning_shapes")

    def channels(self, transformer: Any) -> int:
        """Channels of the latents that a transformer of this configuration takes."""
        return int(transformer.in_channels)

    def latent_shape(self, transformer: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """Shape of a sample's latents, (C, H, W) or (C, F, H, W); by default with the autoencoder's strides.

        Args:
            transformer: configuration of the transformer.
            vae: configuration of the autoencoder.
            clip: frames and size.
        """
        temporal, spatial = strides_of(vae)
        frames = [(clip.frames - 1) // temporal + 1] if self.makes_videos else []
        return self.channels(transformer), *frames, *(side // spatial for side in clip.sizes[0])

    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """What the pipeline's ``encode_prompt`` gives without guidance; settings that it does not take are left out."""
        known = inspect.signature(pipe.encode_prompt).parameters
        chosen = {name: value for name, value in settings.items() if name in known}
        if "do_classifier_free_guidance" in known:
            chosen["do_classifier_free_guidance"] = False
        return pipe.encode_prompt(prompt, **chosen)

    def spatial_patch(self, transformer: Any) -> int:
        """Latents per token along height and width; by default the last of the configuration's ``patch_size``."""
        patch = transformer.config.patch_size
        return int(patch if isinstance(patch, int) else patch[-1])

    def spatial_stride(self, pipe: Any) -> int:
        """Pixels per latent along height and width."""
        found = next((getattr(pipe, name) for name in _STRIDES if hasattr(pipe, name)), None)
        return int(found) if found is not None else 2 ** (len(pipe.vae.config.block_out_channels) - 1)

    def temporal_stride(self, pipe: Any) -> int:
        """Frames of a video per latent frame, after the first one; 1 of autoencoders of images."""
        return int(next((getattr(pipe, name) for name in _TEMPORAL_STRIDES if hasattr(pipe, name)), 1))

    # Calling the pipeline

    def class_count(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """How many classes a pipeline was trained on, told without loading it; 0 where prompts are text.

        Args:
            index: what its ``model_index.json`` holds.
            config: what the ``config.json`` of its transformer holds.
        """
        return 0

    def check_prompt(self, pipe: Any, prompt: str) -> None:
        """Raise unless the pipeline can be asked for a prompt.

        Raises:
            ValueError: a class that the model does not have.
        """

    def prompt_arguments(self, pipe: Any, prompts: Sequence[str]) -> dict[str, Any]:
        """The argument of the pipeline's call that takes the prompts."""
        return {"prompt": list(prompts)}

    def clip_arguments(self, pipe: Any, clip: Clip) -> dict[str, Any]:
        """Arguments of the pipeline's call for frames and size, those that it has."""
        height, width = clip.sizes[0]
        asked = {"height": height, "width": width, "num_frames": clip.frames, "use_resolution_binning": False}
        known = inspect.signature(pipe.__call__).parameters
        return {name: value for name, value in asked.items() if name in known}

    def call(self, pipe: Any, prompts: Sequence[str], generators: Sequence[torch.Generator], **settings: Any) -> Any:
        """Generate one sample per prompt.

        Args:
            pipe: the pipeline, patched or not.
            prompts: text or classes.
            generators: noise of every sample; on the CPU for noise that does not depend on the device.
            **settings: further arguments of the pipeline's call.

        Returns:
            For every prompt a PIL image, or frames (F, H, W, 3) in [0, 1]; with ``output_type`` what that asks for.

        Raises:
            ValueError: the pipeline must be given more, such as a picture.
        """
        usual = {"output_type": "np"} if self.makes_videos else {}  # some pipelines give frames as pictures
        arguments = {**usual, **self.prompt_arguments(pipe, prompts), "generator": list(generators), **settings}
        missing = [
            name
            for name, parameter in inspect.signature(pipe.__call__).parameters.items()
            if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in arguments
        ]
        if missing:
            raise ValueError(
                f"{type(pipe).__name__} must be given {', '.join(missing)} beside prompts, which the mhla command has "
                "no place for. Call the pipeline yourself, and train on videos of your own (mhla encode)."
            )
        output = pipe(**arguments)
        return output.frames if self.makes_videos else output.images

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """What the pipeline hands to its autoencoder, of the scale that the transformer takes: (C, ...)."""
        settings = {"num_inference_steps": steps, "output_type": "latent", **self.guidance_arguments(guidance)}
        latents: torch.Tensor = self.call(pipe, [prompt], [generator], **self.clip_arguments(pipe, clip), **settings)[0]
        return latents

    def guidance_arguments(self, guidance: float) -> dict[str, Any]:
        """Arguments of the pipeline's call for a scale of guidance."""
        return {"guidance_scale": guidance}

    def _unknown(self, what: str, method: str) -> ValueError:
        return ValueError(f"The {self.name!r} family does not tell {what}: give {type(self).__name__} a {method}().")

    def _needs_pictures(self) -> ValueError:
        return ValueError(
            f"This {self.name!r} checkpoint is conditioned on pictures, which captions do not tell. It can be patched "
            "and generates; encode and train with a text-to-video checkpoint."
        )
