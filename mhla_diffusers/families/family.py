"""Everything specific to one model family. The rest of the package never asks for a family's name.

A family has no state. Class attributes describe it as data; methods cover what data cannot.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from ..attention.rope import Rotary
from ..config import MHLAConfig
from .adapters import AttentionAdapter
from .models import Clip, Model, strides_of
from .processes import DiffusionProcess, FlowMatching

Sample = Mapping[str, torch.Tensor]
"""``latents`` (C, ...) as the transformer takes them, and further arguments of its forward, without a batch axis."""

_STRIDES = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
)
"""Attributes of diffusers' pipelines: pixels per latent along height and width."""
_TEMPORAL_STRIDES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
"""Frames per latent frame, after the first one."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Condition(NamedTuple):
    """An argument of the transformer's forward that is made from a prompt."""

    name: str
    shape: tuple[int | str, ...]
    """Without a batch axis; a string names a size in the transformer's configuration."""
    output: int = 0
    """Index in what the pipeline's ``encode_prompt`` returns."""
    dtype: torch.dtype = torch.float32
    """int64 or bool for a mask; floating-point values keep the text encoder's type."""


class Family:
    """All that is known about one family of transformers.

    To add a model, subclass this, set what has no default, override what differs, and pass an instance to
    :func:`register_family`. ``docs/add-a-model.md`` has an example.
    """

    # Patching

    name: ClassVar[str]
    """Name in patch files, on the command line and in messages."""
    transformers: ClassVar[tuple[str, ...]]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    library: ClassVar[str] = "diffusers"
    """Module that has these classes, imported when one is asked for."""
    axes: ClassVar[int]
    """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width)."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes that hold transformer blocks; absent ones are skipped."""
    attentions: ClassVar[tuple[str, ...]] = ("attn1",)
    """Attributes of a block that are self-attentions over the tokens of the grid; absent ones are skipped."""
    adapter: ClassVar[AttentionAdapter] = AttentionAdapter()
    """How they are called, what they attend with, and what they return."""
    processor: ClassVar[str] = "diffusers.models.attention_processor.AttnProcessor2_0"
    """Import path of the processor that diffusers gives the self-attentions."""
    cross_processor: ClassVar[str] = "diffusers.models.attention_processor.AttnProcessor2_0"
    """Import path of the processor of the cross-attentions."""
    attention_class: ClassVar[str | None] = None
    """End of the import path of the self-attentions' class, if no other family uses that class."""
    extra_tokens: ClassVar[int] = 0
    """Extra tokens of the longest text that the pipeline takes by default; costs are computed for this many."""
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ffn")
    """Attributes of a block that are feed-forward layers; absent ones are skipped."""
    default_config: ClassVar[MHLAConfig]
    """Settings of ``apply_mhla(pipe)``."""
    own_attention: ClassVar[Literal["softmax", "linear", "gated linear"]] = "softmax"
    """What the self-attentions compute without a patch."""
    own_attention_is_causal: ClassVar[bool] = False
    """Whether a token never sees a later one."""
    own_attention_eps: ClassVar[float] = 0.0
    """Added to the normaliser by a family whose own attention is linear with φ = ReLU."""
    kind: ClassVar[Literal["diffusion", "language", "vision"]] = "diffusion"
    """A diffusion model, called by a pipeline in every denoising step, or a model of transformers."""
    squares_only: ClassVar[bool] = False
    """Whether height and width must be equal."""
    lacks_processor_methods: ClassVar[bool] = False
    """Whether diffusers' class lacks ``attn_processors`` and ``set_attn_processor``; a patched instance gets them, and
    its self-attentions ``set_processor`` if they lack it.

    ``patched_classes.py`` must have a class for each.
    """
    dispatches_attention: ClassVar[bool] = False
    """Whether its attentions follow diffusers' ``set_attention_backend``; others call PyTorch's attention."""
    forward_names: ClassVar[tuple[str, ...]] = ("hidden_states",)
    """Names of the transformer's positional arguments; the first is the latents."""
    timestep_name: ClassVar[str] = "timestep"
    """Name of the transformer's argument for the time."""
    rotary_channels: ClassVar[Mapping[int, tuple[int, ...]]] = {}
    """Head dim → channels that RoPE rotates with each axis of the token grid."""
    why_never_split: ClassVar[str | None] = None
    """Why diffusers' ``_cp_plan`` must not split its tokens over processes; None if it may."""
    streamed: ClassVar[tuple[str, ...]] = ()
    """Classes of :attr:`transformers` that can generate a video one block of frames after another: every frame may have
    its own time, and :meth:`rotary_from` returns RoPE of later frames.
    """
    perturbed_processors: ClassVar[Mapping[str, int]] = {}
    """Class of a perturbed-attention guidance processor → number of parts of the batch; it perturbs the last part."""

    # Training, generating and measuring

    process_class: ClassVar[type[DiffusionProcess] | None] = None
    """How the model was trained."""
    takes_sigma: ClassVar[bool] = False
    """Whether the transformer takes σ, in place of the scheduler's timestep of 1000 σ."""
    why_not_trained: ClassVar[str | None] = None
    """Why nothing can be encoded for it or trained, and what to do instead; None if it can."""
    conditions: ClassVar[tuple[Condition, ...]] = ()
    """What the transformer gets from a prompt, texts first."""
    text_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the pipeline's ``encode_prompt`` that differ from its defaults."""
    guidance: ClassVar[float | None] = None
    """Guidance scale for transformers that embed it."""
    default_clip: ClassVar[Clip] = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    """Frames, rate and size that are encoded or generated by default."""
    prompts_are_classes: ClassVar[bool] = False
    """Whether the model is conditioned on classes, by number or name, instead of text."""
    models: ClassVar[tuple[Model, ...]] = ()
    """Configurations that ``mhla bench`` builds with random weights."""
    measured_unasked: ClassVar[bool] = False
    """Whether ``mhla bench`` on a GPU measures them by default."""

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a diffusion model."""
        return self.kind == "diffusion"

    @property
    def makes_videos(self) -> bool:
        """Whether a sample has frames."""
        return self.axes == 3

    @property
    def suffix(self) -> str:
        """Suffix of generated files: ``.mp4`` or ``.png``."""
        return ".mp4" if self.makes_videos else ".png"

    # The transformer

    def transformer_class(self, name: str) -> Any:
        """One of :attr:`transformers`.

        Raises:
            AttributeError: the library lacks it.
        """
        return getattr(import_module(self.library), name)

    def build(self, name: str, settings: Mapping[str, Any]) -> Any:
        """A transformer with fresh weights.

        Raises:
            AttributeError: the library lacks it.
        """
        return self.transformer_class(name)(**settings)

    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every transformer block that has a self-attention, in the order of the layer indices."""
        return {
            f"{list_name}.{index}": block
            for list_name in self.block_lists
            for index, block in enumerate(getattr(transformer, list_name, ()))
        }

    def trunk(self, transformer: Any) -> Any:
        """The module that takes the pixels or latents and runs the blocks; by default the transformer."""
        return transformer

    def self_attentions(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every self-attention, in the order of the layer indices."""
        return {
            f"{name}.{attention}": getattr(block, attention)
            for name, block in self.blocks_of(transformer).items()
            for attention in self.attentions
            if getattr(block, attention, None) is not None
        }

    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """The adapter of one self-attention, by default :attr:`adapter`."""
        return self.adapter

    def self_attention_processor(self, attn: Any = None) -> Any:
        """A fresh processor of the kind that diffusers gives the self-attentions, or one of them."""
        return _imported(self.processor)()

    def softmax_processor(self) -> Any:
        """A processor that computes softmax attention in a self-attention; by default the family's own."""
        return self.self_attention_processor()

    def cross_attention_processor(self) -> Any:
        """A fresh processor of the kind that diffusers gives the cross-attentions."""
        return _imported(self.cross_processor)()

    def perturbed_parts(self, processor: Any) -> int | None:
        """Number of parts of a batch under perturbed-attention guidance, which perturbs the last part; else None."""
        return self.perturbed_processors.get(type(processor).__name__)

    def recognises_self_attention(self, attn: Any) -> bool:
        """Whether a self-attention of an unknown model belongs to this family, by :attr:`attention_class`."""
        path = f".{type(attn).__module__}.{type(attn).__qualname__}"
        return self.attention_class is not None and path.endswith(f".{self.attention_class}")

    def recognises_cross_attention(self, attn: Any) -> bool:
        """Whether a cross-attention of an unknown model needs this family's processor."""
        return False

    def why_not_patched(self, transformer: Any, config: MHLAConfig) -> str | None:
        """Why a transformer of this family cannot have these settings, and what to do instead; None if it can."""
        return None

    def prepare(self, transformer: Any) -> None:
        """Called once before a transformer is patched: gives it ``set_attn_processor`` if its class lacks that."""
        if self.lacks_processor_methods:
            from .patched_classes import give_processor_methods

            give_processor_methods(transformer, self.self_attentions(transformer).values())

    def restore(self, transformer: Any) -> None:
        """Called once when the patch is removed; undoes :meth:`prepare`."""
        if self.lacks_processor_methods:
            from .patched_classes import take_processor_methods

            take_processor_methods(transformer, self.self_attentions(transformer).values())

    def without_values(self) -> AbstractContextManager[Any]:
        """Context for a forward on the meta device; for models that read values of their inputs."""
        return nullcontext()

    # Tokens

    def patch(self, transformer: Any) -> tuple[int, ...]:
        """Latents per token along each axis of the token grid, by default ``patch_size`` and ``patch_size_t``."""
        size = transformer.config.patch_size
        if not isinstance(size, int):
            return tuple(size)
        if self.axes < 3:
            return (size,) * self.axes
        return getattr(transformer.config, "patch_size_t", size) or 1, size, size

    def spatial_patch(self, transformer: Any) -> int:
        """Latents per token along height and width."""
        return self.patch(transformer)[-1]

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """Token grid of latents (B, C, ...).

        Raises:
            ValueError: latent frames that do not fill the last token.
        """
        patch, frames = self.patch(transformer), latents.shape[2]
        if self.makes_videos and frames % patch[0]:
            raise ValueError(
                f"{frames} latent frames are no multiple of {patch[0]}, the latent frames of a token of this "
                f"{self.name!r} model; give a multiple, as mhla encode and mhla synthesize do."
            )
        return tuple(size // length for size, length in zip(latents.shape[2:], patch, strict=True))

    def named_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a transformer's forward by name."""
        return {**dict(zip(self.forward_names, args, strict=False)), **kwargs}

    def time_of(self, arguments: Mapping[str, Any]) -> Any:
        """The time of the grid's tokens in a forward, in the transformer's scale; None if it is not given."""
        return arguments.get(self.timestep_name)

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Token grid of a forward of the transformer; by default ``hidden_states`` are latents (B, C, ...)."""
        return self.token_grid(transformer, arguments["hidden_states"])

    def grid_of_attention(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Token grid that the RoPE tables of a self-attention imply; None for another model, or if they imply none.

        With it diffusers' own ``set_attn_processor`` needs no ``grid``.
        """
        return None

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Token grid of what a pipeline generates for frames and a size in pixels.

        By default the autoencoder's strides divide them, and the first frame becomes a latent frame of its own.
        """
        stride, sides = self.spatial_stride(pipe), clip.sizes[0]
        frames: list[int] = []
        if self.makes_videos:
            frames.append(self.latent_frames(transformer.config, clip.frames, self.temporal_stride(pipe)))
        latents = torch.empty(1, 1, *frames, *(side // stride for side in sides), device="meta")
        return tuple(int(size) for size in self.token_grid(transformer, latents))

    def rotary_axes(self, head_dim: int) -> tuple[int, ...] | None:
        """Channels of a head that RoPE rotates with each axis of the token grid; None for no RoPE, or another kind.

        With it, kernels read one row of the table per position on an axis, instead of one per token.
        """
        return self.rotary_channels.get(head_dim)

    def rotary_from(self, transformer: Any, rotary: Rotary, grid: tuple[int, ...], first: int) -> Rotary:
        """RoPE of later frames of a video, from position ``first`` of the grid's first axis on.

        ``rotary`` is what the model passes to its attentions, (cos, sin), as if the frames began a video.

        Raises:
            ValueError: the family does not implement this, or the model has no RoPE for so late a frame.
        """
        raise ValueError(f"The {self.name!r} family does not define RoPE of later frames; implement rotary_from().")

    def why_too_late(self, transformer: Any, first: int, last: int) -> str | None:
        """Why a transformer has no RoPE for frames ``first`` to ``last - 1`` of the grid; None if it has."""
        return None

    def why_not_split(self, arguments: Mapping[str, Any], grid: tuple[int, ...]) -> str | None:
        """Why the tokens of a call, given by its arguments, cannot be split over processes; None if they can."""
        return self.why_never_split

    # The transformer's forward

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward for latents (B, C, ...).

        By default ``hidden_states`` and ``timestep``, the conditioning, and :attr:`guidance` if the model embeds it.

        Args:
            transformer: which.
            latents: (B, C, ...).
            timestep: (B,), from the process; for classes in :attr:`streamed` also (B, F), one per frame.
            conditioning: from :meth:`encode_prompt`, each with a batch axis.
        """
        arguments = {self.forward_names[0]: latents, self.timestep_name: timestep}
        if self.guidance is not None and transformer.config.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, self.guidance, dtype=latents.dtype)
        return {**arguments, **conditioning}

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """The prediction for latents (B, C, ...), of their shape: by default the transformer's output."""
        predicted: torch.Tensor = output
        return predicted

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """The scheduler's timestep, from the transformer's argument for the time."""
        return 1000 * timestep if self.takes_sigma else timestep

    # Training

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """The process that the model was trained with, by default of :attr:`process_class`.

        Raises:
            ValueError: the family does not implement this, or the transformer is conditioned on pictures.
        """
        self._check_trained_on_text(transformer.config)
        if self.process_class is None:
            raise self._unknown("how the model was trained", "process")
        if issubclass(self.process_class, FlowMatching):
            return self.process_class(flow_shift, 1e-3 if self.takes_sigma else 1.0)
        return self.process_class()

    def prepare_for_training(self, transformer: nn.Module) -> None:
        """Called once after ``transformer.train()``: disables anything that draws its own random numbers."""

    def parts_to_gather(self, transformer: nn.Module) -> list[nn.Module]:
        """Modules that several blocks use; FSDP2 must gather them separately."""
        return []

    # Latents and conditioning

    def needs_pictures(self, config: Any) -> bool:
        """Whether a transformer of this configuration needs pictures beside text, and so cannot be trained here."""
        return False

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Latents of clips in the transformer's scale; by default see :func:`of_unit_scale`.

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
        """Arguments of the transformer's forward that come from a clip (1, 3, F, H, W); by default none.

        :data:`~.processes.KNOWN_FRAMES` is none of them: it is the number of latent frames that are given.
        """
        return {}

    def picture_settings(self, pipe: Any, pixels: torch.Tensor) -> Mapping[str, Any]:
        """Settings of :meth:`encode_prompt` that come from a clip (1, 3, F, H, W); by default none."""
        return {}

    def keeps_first_frame(self, pipe: Any, config: Any) -> bool:
        """Whether a pipeline gives its picture to the transformer as the first latent frame, without noise.

        Args:
            pipe: or its class.
            config: of its transformer.
        """
        return False

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Arguments of the transformer's forward for a prompt, without a batch axis, by default :attr:`conditions`.

        Args:
            pipe: pipeline with its text encoder.
            prompt: text, or a class; "" for the empty prompt.
            settings: of the pipeline's call; settings that ``encode_prompt`` does not take are ignored.

        Raises:
            ValueError: a prompt that the model does not know, a transformer that is conditioned on pictures, or the
                family does not implement this.
        """
        config = pipe.transformer.config
        self._check_trained_on_text(config)
        conditions = self.conditions_of(config)
        if not conditions:
            raise self._unknown("how prompts are encoded", "encode_prompt")
        usual = {"max_sequence_length": _sizes(conditions[0], config)[0], **self.text_settings}
        outputs = self.encode_text(pipe, prompt, {**usual, **(settings or {})})
        found = {one.name: (outputs[one.output][0], one.dtype) for one in conditions}
        return {name: x if dtype.is_floating_point else x.to(dtype) for name, (x, dtype) in found.items()}

    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Output of the pipeline's ``encode_prompt`` without guidance; settings that it does not take are ignored."""
        known = inspect.signature(pipe.encode_prompt).parameters
        chosen = {name: value for name, value in settings.items() if name in known}
        if "do_classifier_free_guidance" in known:
            chosen["do_classifier_free_guidance"] = False
        return pipe.encode_prompt(**{**chosen, "prompt": prompt})

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """The output of :meth:`encode_prompt` on the meta device, without values.

        Raises:
            ValueError: the family does not implement this.
        """
        conditions = self.conditions_of(transformer)
        if not conditions:
            raise self._unknown("what conditions the model", "conditioning_shapes")
        return {one.name: torch.empty(_sizes(one, transformer), dtype=one.dtype, device="meta") for one in conditions}

    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """What a transformer of this configuration gets from a prompt, by default :attr:`conditions`."""
        return self.conditions

    def channels(self, transformer: Any) -> int:
        """Channels of the latents that a transformer of this configuration takes."""
        return int(transformer.in_channels)

    def latent_shape(self, transformer: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """Shape of a sample's latents, (C, H, W) or (C, F, H, W); by default with the autoencoder's strides."""
        temporal, spatial = strides_of(vae, of_videos=self.axes == 3)
        frames = [self.latent_frames(transformer, clip.frames, temporal)] if self.makes_videos else []
        return self.channels(transformer), *frames, *(side // spatial for side in clip.sizes[0])

    def latent_frames(self, config: Any, frames: int, stride: int) -> int:
        """Latent frames that the pipeline makes for frames of a video: the first becomes one of its own.

        Args:
            config: of the transformer.
            frames: of the video.
            stride: frames per latent frame, after the first one.
        """
        return (frames - 1) // stride + 1

    def spatial_stride(self, pipe: Any) -> int:
        """Pixels per latent along height and width."""
        found = next((getattr(pipe, name) for name in _STRIDES if hasattr(pipe, name)), None)
        return int(found) if found is not None else strides_of(pipe.vae.config)[1]

    def temporal_stride(self, pipe: Any) -> int:
        """Frames of a video per latent frame, after the first one; 1 where frames are no axis of the token grid.

        Raises:
            ValueError: neither the pipeline nor the autoencoder's configuration holds it.
        """
        found = next((getattr(pipe, name) for name in _TEMPORAL_STRIDES if hasattr(pipe, name)), None)
        if found is None and self.axes < 3:
            return 1
        return int(found) if found is not None else strides_of(pipe.vae.config, of_videos=True)[0]

    # Calling the pipeline

    def class_count(self, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """Number of classes a pipeline was trained on, read without loading it; 0 if prompts are text."""
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
        """Arguments of the pipeline's call for frames and size, as far as it has them."""
        height, width = clip.sizes[0]
        frames = dict.fromkeys(("num_frames", "frames", "video_length"), clip.frames)
        asked = {"height": height, "width": width, **frames, "use_resolution_binning": False}
        known = inspect.signature(pipe.__call__).parameters
        return {name: value for name, value in asked.items() if name in known}

    def guidance_arguments(self, guidance: float) -> dict[str, Any]:
        """Arguments of the pipeline's call for a guidance scale."""
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
        usual = {"output_type": "np"} if self.makes_videos else {}  # some pipelines return PIL images by default
        arguments = {**usual, **self.prompt_arguments(pipe, prompts), "generator": list(generators), **settings}
        missing = [
            name
            for name, parameter in inspect.signature(pipe.__call__).parameters.items()
            if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in arguments
        ]
        if "image" not in (*arguments, *missing) and self.keeps_first_frame(pipe, pipe.transformer.config):
            missing.append("image")
        if missing:
            raise ValueError(
                f"{type(pipe).__name__} must be given {', '.join(missing)} beside prompts. mhla generate takes a "
                "picture (--image FILE); for anything else call the pipeline yourself. Train on videos of your own "
                "(mhla encode)."
            )
        output = pipe(**arguments)
        return output.frames if self.makes_videos else output.images

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """The generated latents in the transformer's scale: (C, ...)."""
        settings = {"num_inference_steps": steps, "output_type": "latent", **self.guidance_arguments(guidance)}
        latents: torch.Tensor = self.call(pipe, [prompt], [generator], **self.clip_arguments(pipe, clip), **settings)[0]
        return latents

    def _check_trained_on_text(self, config: Any) -> None:
        if self.why_not_trained is not None:
            raise ValueError(self.why_not_trained)
        if self.needs_pictures(config):
            raise ValueError(
                f"This {self.name!r} checkpoint is conditioned on pictures, which captions do not hold. It can be "
                "patched and generates; encode and train with a text-to-video checkpoint."
            )

    def _unknown(self, what: str, method: str) -> ValueError:
        return ValueError(
            f"The {self.name!r} family does not define {what}; implement {type(self).__name__}.{method}()."
        )


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _sizes(condition: Condition, config: Any) -> list[int]:
    return [int(getattr(config, size)) if isinstance(size, str) else size for size in condition.shape]


def of_unit_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents of an autoencoder, (B, C, ...), normalised to the scale that transformers are trained on.

    Uses the autoencoder's mean and deviation per channel, from its buffers or configuration, or its one shift, and its
    ``scaling_factor``; those that it lacks change nothing.
    """
    shift, factor, deviation = _scale_of(vae, latents)
    scaled = (latents - shift) * factor
    return scaled if deviation is None else scaled / deviation


def of_own_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`of_unit_scale`: latents to decode, (B, C, ...)."""
    shift, factor, deviation = _scale_of(vae, latents)
    scaled = latents if deviation is None else latents * deviation
    return scaled / factor + shift


def _scale_of(vae: Any, latents: torch.Tensor) -> tuple[Any, float, torch.Tensor | None]:
    """Shift, factor and, if there are any, deviations of the channels."""

    def of_channels(name: str) -> torch.Tensor | None:
        values = buffers.get(name, config.get(name))
        return None if values is None else torch.as_tensor(values).to(latents).view(-1, *[1] * (latents.ndim - 2))

    buffers, config = dict(vae.named_buffers(recurse=False)), vae.config
    mean, deviation = of_channels("latents_mean"), of_channels("latents_std")
    shift = mean if mean is not None else config.get("shift_factor") or 0.0
    return shift, config.get("scaling_factor") or 1.0, deviation
