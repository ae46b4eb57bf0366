"""What is particular to one model family; everything else in the package asks a family.

A family has no state: it tells where the self-attentions of a transformer are and how its tokens lie, how the model was
trained, what conditions it, how its pipeline is called, and at which sizes it is measured.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..attention.rotary import Rotary
from ..attention.tiles import square_tiles
from ..config import MHLAConfig
from .encoding import of_unit_scale
from .forms import AttentionForm
from .processes import DiffusionProcess
from .sizes import Clip, Model, strides_of

Sample = Mapping[str, torch.Tensor]
"""``latents`` (C, ...) as the transformer takes them, and further arguments of its forward, without a batch axis."""

_STRIDES = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
"""Attributes of diffusers' pipelines: pixels per latent along height and width."""
_TEMPORAL_STRIDES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
"""Frames per latent frame, after the first one."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Family(ABC):
    """Tells everything about one family of diffusers transformers.

    To add a model, subclass this, fill in what is abstract, change what differs from a text-to-image pipeline with an
    ``encode_prompt``, and pass an instance to :func:`register_family`; ``docs/add-a-model.md`` shows one.
    """

    name: ClassVar[str]
    """Name in patch files, on the command line and in messages."""
    transformers: ClassVar[tuple[str, ...]]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    axes: ClassVar[int]
    """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width)."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes that hold transformer blocks; absent ones are passed."""
    attentions: ClassVar[tuple[str, ...]] = ("attn1",)
    """Attributes of a block that are self-attentions over the tokens of the grid; absent ones are passed."""
    form: ClassVar[AttentionForm] = AttentionForm()
    """How these are called, what they attend with, and what they return."""
    outside_tokens: ClassVar[int] = 0
    """Tokens outside the grid of the longest text that the pipeline takes unasked: what costs are told for."""
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ffn")
    """Attributes of a block that are feed-forward layers; absent ones are passed."""
    default_config: ClassVar[MHLAConfig]
    """What ``apply_mhla(pipe)`` uses when it is told nothing else."""
    own_attention: ClassVar[Literal["softmax", "linear"]] = "softmax"
    """What the self-attentions compute without a patch."""
    own_attention_eps: ClassVar[float] = 0.0
    """Added to the normaliser by a family whose own attention is linear with φ = ReLU."""
    squares_only: ClassVar[bool] = False
    """Whether height and width must be equal."""
    lacks_processor_methods: ClassVar[bool] = False
    """Whether diffusers' class lacks ``attn_processors`` and ``set_attn_processor``; a patched instance is given them.

    ``with_processors.py`` must have a class for it.
    """
    dispatches_attention: ClassVar[bool] = False
    """Whether its attentions follow diffusers' ``set_attention_backend``; others call PyTorch's attention."""
    default_clip: ClassVar[Clip] = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    """What is encoded or generated when nothing else is said: frames, rate and size."""
    forward_names: ClassVar[tuple[str, ...]] = ("hidden_states",)
    """Names of the arguments that the transformer's forward is given by place; the first are latents."""
    timestep_name: ClassVar[str] = "timestep"
    """Of the argument that tells the transformer the time."""
    prompts_are_classes: ClassVar[bool] = False
    """Whether the model is conditioned on classes, given by number or name, and not on text."""
    models: ClassVar[tuple[Model, ...]] = ()
    """Configurations that ``mhla bench`` builds with random weights."""
    measured_unasked: ClassVar[bool] = False
    """Whether ``mhla bench`` on a GPU measures them where no model is named."""

    @property
    def makes_videos(self) -> bool:
        """Whether a sample has frames."""
        return self.axes == 3

    @property
    def suffix(self) -> str:
        """Of the files that hold what is generated: ``.mp4`` or ``.png``."""
        return ".mp4" if self.makes_videos else ".png"

    # Patching

    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every transformer block that has a self-attention, in the order of the layer indices."""
        return {
            f"{list_name}.{index}": block
            for list_name in self.block_lists
            for index, block in enumerate(getattr(transformer, list_name, ()))
        }

    def self_attentions(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every self-attention, in the order of the layer indices."""
        return {
            f"{name}.{attention}": getattr(block, attention)
            for name, block in self.blocks_of(transformer).items()
            for attention in self.attentions
            if getattr(block, attention, None) is not None
        }

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """Token grid that the transformer makes of latents (B, C, ...).

        By default they are cut into patches of ``config.patch_size``, one size for all axes or one for each.
        """
        sizes, patch = latents.shape[2:], transformer.config.patch_size
        patches = (patch,) * len(sizes) if isinstance(patch, int) else patch
        return tuple(size // length for size, length in zip(sizes, patches, strict=True))

    def named_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a transformer's forward by name."""
        return {**dict(zip(self.forward_names, args, strict=False)), **kwargs}

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Token grid of a forward of the transformer; by default ``hidden_states`` are latents (B, C, ...).

        Args:
            transformer: which.
            arguments: of its forward by name.
        """
        return self.token_grid(transformer, arguments["hidden_states"])

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward for latents (B, C, ...).

        By default ``hidden_states`` and ``timestep`` beside the conditioning; others pack latents or have other names.

        Args:
            transformer: which.
            latents: (B, C, ...).
            timestep: (B,), as the process gives it.
            conditioning: what :meth:`encode_prompt` gives, each with a batch axis.
        """
        return {"hidden_states": latents, "timestep": timestep, **conditioning}

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """What the transformer predicts for latents (B, C, ...), like them: its output, by default as it is.

        Args:
            transformer: which.
            output: first of what its forward returns as a tuple.
            latents: those that it was given.
        """
        predicted: torch.Tensor = output
        return predicted

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Token grid of what a pipeline makes of frames and size in pixels.

        By default the autoencoder's strides divide them, and the first frame becomes a latent frame of its own.
        """
        stride, sides = self.spatial_stride(pipe), clip.sizes[0]
        frames = [(clip.frames - 1) // self.temporal_stride(pipe) + 1] if self.makes_videos else []
        latents = torch.empty(1, 1, *frames, *(side // stride for side in sides), device="meta")
        return tuple(int(size) for size in self.token_grid(transformer, latents))

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """The scheduler's timestep that the pipeline made the transformer's argument ``timestep`` of; by default it."""
        return timestep

    def grid_of_attention(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Token grid that the tables of RoPE tell a self-attention; None of another model, or if they do not tell.

        With it diffusers' own ``set_attn_processor`` needs no ``grid``.

        Args:
            attn: a self-attention, in whatever model it is.
            rotary: what the model hands to it, (cos, sin).
        """
        return None

    def exact_tiles(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Tile counts that exact tiles of a token grid are measured with.

        By default tiles of about 64 tokens with equal sides, see :func:`mhla_diffusers.attention.tiles.square_tiles`.
        """
        return square_tiles(grid)

    def rotary_axes(self, head_dim: int) -> tuple[int, ...] | None:
        """Channels of a head that RoPE turns with each axis of the token grid; None for no RoPE, or for another kind.

        Kernels then read one row of the table for every place on an axis, not one for every token.
        """
        return None

    @abstractmethod
    def self_attention_processor(self) -> Any:
        """A fresh processor of the kind that diffusers gives the self-attentions of this family."""

    def softmax_processor(self) -> Any:
        """A processor that computes softmax attention in a self-attention; by default the family's own."""
        return self.self_attention_processor()

    def cross_attention_processor(self) -> Any:
        """A fresh processor of the kind that diffusers gives the cross-attentions, ``AttnProcessor2_0`` by default."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()

    def perturbed_parts(self, processor: Any) -> int | None:
        """Parts of a batch under a processor of perturbed-attention guidance, which perturbs the last; else None."""
        return None

    def recognises_self_attention(self, attn: Any) -> bool:
        """Whether a self-attention, in whatever model it is, is one of this family."""
        return False

    def recognises_cross_attention(self, attn: Any) -> bool:
        """Whether a cross-attention, in whatever model it is, needs this family's processor."""
        return False

    def prepare(self, transformer: Any) -> None:
        """Called once when a transformer is patched: gives it ``set_attn_processor`` if its class lacks that."""
        if self.lacks_processor_methods:
            from .with_processors import give_processor_methods

            give_processor_methods(transformer)

    def restore(self, transformer: Any) -> None:
        """Called once when the patch is removed; undoes :meth:`prepare`."""
        if self.lacks_processor_methods:
            from .with_processors import take_processor_methods

            take_processor_methods(transformer)

    def without_values(self) -> AbstractContextManager[Any]:
        """What a forward on the meta device runs in; for models that ask for values of their inputs."""
        return nullcontext()

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

    def prepare_for_training(self, transformer: nn.Module) -> None:  # noqa: B027
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

    def check_prompt(self, pipe: Any, prompt: str) -> None:  # noqa: B027 - text needs no check
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
