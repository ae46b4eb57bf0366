"""What patching needs to know of a family of models.

Outside of this folder a family's name is compared with that of a patch file or a command alone; nothing else depends on
it.

A family has no state: class attributes are its facts, and methods cover what facts cannot.
"""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention.rope import Rotary
from ..config import LinearConfig, MHLAConfig, PatchConfig, SparseConfig, kind_of
from .adapters import AttentionAdapter
from .models import Clip, Model, strides_of
from .packing import pack

Kwargs = dict[str, Any]
"""Keyword arguments of a transformer's forward."""
Sample = Mapping[str, Tensor]
"""``latents`` (C, ...) as the transformer takes them, and further arguments of its forward, without a batch axis."""


class Condition(NamedTuple):
    """An argument of the transformer's forward that is made from a prompt."""

    name: str
    shape: tuple[int | str, ...]
    """Without a batch axis; a string names a size in the transformer's configuration."""
    output: int = 0
    """Index in what the pipeline's ``encode_prompt`` returns."""
    dtype: torch.dtype = torch.float32
    """int64 or bool for a mask; floating-point values keep the text encoder's type."""

    def sizes(self, config: Any) -> list[int]:
        """Return the shape for a transformer of this configuration."""
        return [int(getattr(config, size)) if isinstance(size, str) else size for size in self.shape]


class Family:
    """A family of transformers that can be patched. :class:`TrainedFamily` adds what encoding and training need.

    To add a model, subclass this, set what has no default, override what differs, and pass an instance to
    :func:`register_family`. ``docs/add-a-model.md`` has an example.
    """

    name: ClassVar[str]
    """Name in patch files, on the command line and in messages."""
    transformers: ClassVar[tuple[str, ...]]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    library: ClassVar[str] = "diffusers"
    """Module that has these classes, imported when one is asked for."""
    kind: ClassVar[Literal["diffusion", "vision", "language"]] = "diffusion"
    """A diffusion model, called by a pipeline in every denoising step, or a model of transformers."""
    axes: ClassVar[int]
    """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width), 1 for text."""
    fixed_patch: ClassVar[tuple[int, ...] | None] = None
    """Latents per token along each axis, where the transformer's configuration does not say."""
    squares_only: ClassVar[bool] = False
    """Whether height and width must be equal."""
    mhla_blocks: ClassVar[tuple[int, ...]]
    """MHLA block counts of a patch that gives none, at the family's default size."""
    default_clip: ClassVar[Clip] = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    """Frames, rate and size that are generated or encoded by default."""
    models: ClassVar[tuple[Model, ...]] = ()
    """Configurations that ``mhla bench`` builds with random weights."""
    why_not_trained: ClassVar[str] = (
        "This family can be patched, but it does not say how its models are encoded, trained and called by a pipeline; "
        "derive it from TrainedFamily."
    )
    """The error for commands that need a :class:`TrainedFamily`: why it is none, and what to do instead."""

    # Where the self-attentions are, and what they compute

    block_lists: ClassVar[tuple[str, ...]]
    """Attributes that hold transformer blocks; absent ones are skipped."""
    attentions: ClassVar[tuple[str, ...]] = ("attn1", "attn")
    """Attributes of a block that are self-attentions over the tokens of the grid; absent ones are skipped."""
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ffn", "ff_context")
    """Attributes of a block that are feed-forward layers; absent ones are skipped."""
    adapter: ClassVar[AttentionAdapter] = AttentionAdapter()
    """How the self-attentions are called, what they attend with, and what they return."""
    attention_class: ClassVar[str | None] = None
    """End of the import path of the self-attentions' class, if no other family uses that class."""
    processor: ClassVar[str] = "diffusers.models.attention_processor.AttnProcessor2_0"
    """Import path of the processor that the library gives the self-attentions."""
    cross_processor: ClassVar[str] = "diffusers.models.attention_processor.AttnProcessor2_0"
    """Import path of the processor of the cross-attentions."""
    softmax_processor: ClassVar[str | None] = None
    """Import path of a processor that computes softmax attention, if :attr:`processor` computes another."""
    perturbed_processors: ClassVar[Mapping[str, int]] = {}
    """Class of a perturbed-attention guidance processor → number of parts of the batch; it perturbs the last part."""
    dispatches_attention: ClassVar[bool] = False
    """Whether its attentions follow diffusers' ``set_attention_backend``; others call PyTorch's attention."""
    own_attention: ClassVar[Literal["softmax", "linear", "gated linear"]] = "softmax"
    """What the self-attentions compute without a patch."""
    own_attention_is_causal: ClassVar[bool] = False
    """Whether a token never sees a later one."""
    own_attention_eps: ClassVar[float] = 0.0
    """Added to the normaliser by a family whose own attention is linear with φ = ReLU."""
    extra_tokens: ClassVar[int] = 0
    """Extra tokens of the longest text that the pipeline takes by default; costs are computed for this many."""
    has_rope: ClassVar[bool] = False
    """Whether self-attentions have RoPE, with which benchmarks then measure them."""
    why_never_split: ClassVar[str | None] = None
    """Why diffusers' ``_cp_plan`` must not split its tokens over processes; None if it may."""
    streamed: ClassVar[tuple[str, ...]] = ()
    """Classes of :attr:`transformers` that can generate a video one block of frames after another: every frame may have
    its own time, and :meth:`rotary_from` returns RoPE of later frames.
    """

    # What its forward takes

    latents_name: ClassVar[str] = "hidden_states"
    """Name of the transformer's argument for the latents, from which the token grid is read."""
    packs_latents: ClassVar[bool] = False
    """Whether it takes latents as tokens, (B, N, C patch), and predicts them so."""
    channels_name: ClassVar[str] = "in_channels"
    """Name of the setting that counts the channels of the latents that the transformer takes."""
    timestep_name: ClassVar[str] = "timestep"
    """Name of the transformer's argument for the time."""
    takes_sigma: ClassVar[bool] = False
    """Whether the transformer takes σ, in place of the scheduler's timestep of 1000 σ."""
    time_is_reversed: ClassVar[bool] = False
    """Whether time runs from the noise to the data: the model takes 1 − σ and predicts the velocity to the data."""
    guidance: ClassVar[float | None] = None
    """Guidance scale for transformers that embed it."""
    conditions: ClassVar[tuple[Condition, ...]] = ()
    """What the transformer gets from a prompt, texts first."""
    without_values: ClassVar[Any] = nullcontext
    """Class of the context for a forward on the meta device: ``WithoutValues`` for models that read their inputs."""

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a diffusion model."""
        return self.kind == "diffusion"

    @property
    def makes_videos(self) -> bool:
        """Whether a sample has frames."""
        return self.axes == 3

    def transformer_class(self, name: str) -> Any:
        """Return one of :attr:`transformers`; AttributeError if the library lacks it."""
        return getattr(import_module(self.library), name)

    def build(self, name: str, settings: Mapping[str, Any]) -> Any:
        """Make a transformer with fresh weights; AttributeError if the library lacks its class."""
        return self.transformer_class(name)(**settings)

    def class_settings(
        self, model: Model, height: int, frames: int | None = None, layers: int | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a model's class, or of its configuration where that is an object.

        Args:
            model: which.
            height: in pixels, which some transformers must know.
            frames: of a video, too.
            layers: build only so many, at least one; None for all.
        """
        built = layers or model.layers
        others = {name: max(1, count * built // model.layers) for name, count in model.more_layers.items()}
        known = inspect.signature(self.transformer_class(model.transformer)).parameters
        shape = {
            "num_attention_heads": model.heads,
            "attention_head_dim": model.head_dim,
            "sample_size": height // model.stride,
            "video_length": frames,
        }
        taken = {name: value for name, value in shape.items() if name in known}
        return {**taken, **model.settings, model.layers_argument: built, **others}

    def trunk(self, transformer: Any) -> Any:
        """Return the module that takes the pixels or latents and runs the blocks; by default the transformer."""
        return transformer

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

    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """Return the adapter of one self-attention, by default :attr:`adapter`."""
        return self.adapter

    def self_attention_processor(self, attn: Any = None) -> Any:
        """Return a fresh processor of the kind that the library gives the self-attentions, or one of them."""
        return imported(self.processor)()

    def recognises_self_attention(self, attn: Any) -> bool:
        """Whether a self-attention of an unknown model belongs to this family, by :attr:`attention_class`."""
        path = f".{type(attn).__module__}.{type(attn).__qualname__}"
        return self.attention_class is not None and path.endswith(f".{self.attention_class}")

    def recognises_cross_attention(self, attn: Any) -> bool:
        """Whether a cross-attention of an unknown model needs this family's processor."""
        return False

    @property
    def default_config(self) -> PatchConfig:
        """Settings of ``apply_mhla(pipe)``: sparse attention in the place of softmax attention, else MHLA."""
        return SparseConfig() if self.own_attention == "softmax" else self.complete({})

    def complete(self, settings: Mapping[str, Any]) -> PatchConfig:
        """Return the settings of a patch: those given, whose names decide which attention it runs, and the family's.

        Blocks that are not given are the family's, and are fitted to the grid of every call.

        Raises:
            ValueError: unknown fields, those of two attentions, or values that are not allowed.
        """
        kind = kind_of(settings, SparseConfig if self.own_attention == "softmax" else MHLAConfig, MHLAConfig)
        usual: dict[str, Any] = {}
        if issubclass(kind, LinearConfig):
            usual = {"blocks": self.mhla_blocks}
            usual |= {"rope": "before"} if self.adapter.rope_by_head else {}
            usual |= {"clamp_blocks": "blocks" not in settings} if kind is MHLAConfig else {}
        return kind(**(usual | dict(settings)))

    def why_not_patched(self, transformer: Any, config: PatchConfig) -> str | None:
        """Return why a transformer cannot have these settings, and what to do instead; None if it can."""
        return None

    def prepare(self, transformer: Any) -> None:
        """Called once before a transformer is patched: adds methods to set processors where its classes lack them."""
        from diffusers.models.attention import AttentionMixin

        from .patched_classes import ProcessorMethods, switch

        if not hasattr(transformer, "set_attn_processor"):
            switch(transformer, AttentionMixin)
        for attn in self.self_attentions(transformer).values():
            if not hasattr(attn, "set_processor"):
                switch(attn, ProcessorMethods)

    def restore(self, transformer: Any) -> None:
        """Called once when the patch is removed; undoes :meth:`prepare`."""
        from .patched_classes import switch_back

        for module in (transformer, *self.self_attentions(transformer).values()):
            switch_back(module)

    # The token grid

    def patch(self, transformer: Any) -> tuple[int, ...]:
        """Return latents per token and axis: :attr:`fixed_patch`, else ``patch_size`` and ``patch_size_t``."""
        if self.fixed_patch is not None:
            return self.fixed_patch
        size = transformer.config.patch_size
        if not isinstance(size, int):
            return tuple(size)
        if self.axes < 3:
            return (size,) * self.axes
        return getattr(transformer.config, "patch_size_t", size) or 1, size, size

    def token_grid(self, transformer: Any, latents: Tensor) -> tuple[int, ...]:
        """Return the token grid of latents (B, C, ...); ValueError if frames do not fill the last token."""
        patch, frames = self.patch(transformer), latents.shape[2]
        if self.makes_videos and frames % patch[0]:
            raise ValueError(
                f"{frames} latent frames are no multiple of {patch[0]}, the latent frames of a token of this "
                f"{self.name!r} model; give a multiple, as mhla encode and mhla synthesize do."
            )
        return tuple(size // length for size, length in zip(latents.shape[2:], patch, strict=True))

    def named_arguments(self, transformer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kwargs:
        """Return the kwargs of the forward of a transformer, or of its :meth:`trunk`, by name."""
        forward: Any = type(transformer).forward
        return {**dict(zip(_names_of_arguments(forward), args, strict=False)), **kwargs} if args else {**kwargs}

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token grid of a forward of the transformer; by default the latents are (B, C, ...)."""
        return self.token_grid(transformer, arguments[self.latents_name])

    def grid_of_attention(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Return the token grid that RoPE tables of a self-attention imply; None for another model, or no grid.

        With it diffusers' own ``set_attn_processor`` needs no ``grid``.
        """
        return None

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Return the token grid of what a pipeline generates for frames and a size in pixels."""
        shape = self.latent_shape(transformer.config, pipe.vae.config, clip)
        return tuple(int(size) for size in self.token_grid(transformer, torch.empty(1, *shape, device="meta")))

    def latent_shape(self, config: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """Return the shape of a sample's latents, (C, H, W) or (C, F, H, W), by transformer's and vae's settings."""
        temporal, spatial = self.strides(vae)
        frames = [self.latent_frames(config, clip.frames, temporal)] if self.makes_videos else []
        return self.channels(config), *frames, *(side // spatial for side in clip.sizes[0])

    def strides(self, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return frames per latent frame after the first, and pixels per latent, by an autoencoder's configuration."""
        return strides_of(vae, of_videos=self.axes == 3)

    def latent_frames(self, config: Any, frames: int, stride: int) -> int:
        """Return the latent frames of a video with a stride of frames; by default the first becomes one of its own."""
        return (frames - 1) // stride + 1

    # RoPE, time and processes

    def rotary_from(self, transformer: Any, rotary: Rotary, grid: tuple[int, ...], first: int) -> Rotary:
        """Return RoPE of later frames of a video, from position ``first`` of the grid's first axis on.

        ``rotary`` is what the model passes to its attentions, (cos, sin), as if the frames began a video.

        Raises:
            ValueError: the family does not implement this, or the model has no RoPE for so late a frame.
        """
        raise ValueError(f"The {self.name!r} family does not define RoPE of later frames; implement rotary_from().")

    def why_too_late(self, transformer: Any, first: int, last: int) -> str | None:
        """Return why a transformer has no RoPE for frames ``first`` to ``last - 1`` of the grid; None if it has."""
        return None

    def why_not_split(self, arguments: Mapping[str, Any], grid: tuple[int, ...]) -> str | None:
        """Return why the tokens of a call, given by its arguments, cannot be split over processes; None if they can."""
        return self.why_never_split

    def time_of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the time of the grid's tokens in a forward, in the transformer's scale; None if it is not given."""
        return arguments.get(self.timestep_name)

    def scheduler_timestep(self, transformer: Any, timestep: Tensor) -> Tensor:
        """Return the scheduler's timestep, from the transformer's argument for the time."""
        if not self.takes_sigma:
            return timestep
        return 1000 * (1 - timestep if self.time_is_reversed else timestep)

    # Inputs of a forward

    def channels(self, config: Any) -> int:
        """Return the channels of the latents that a transformer of this configuration takes."""
        return int(getattr(config, self.channels_name))

    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return what a transformer of this configuration gets from a prompt, by default :attr:`conditions`."""
        return self.conditions

    def conditioning_shapes(self, config: Any) -> Sample:
        """Return what conditions a transformer of this configuration, on the meta device, without values.

        Raises:
            ValueError: the family does not say what conditions the model.
        """
        conditions = self.conditions_of(config)
        if not conditions:
            raise self.undefined("what conditions the model", "conditioning_shapes")
        return {one.name: torch.empty(one.sizes(config), dtype=one.dtype, device="meta") for one in conditions}

    def forward_arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Make the forward's kwargs: latents, time, conditioning, and guidance if the model embeds it.

        Args:
            transformer: which.
            latents: (B, C, ...).
            timestep: (B,), in the transformer's scale; for classes in :attr:`streamed` also (B, F), one per frame.
            conditioning: as :meth:`conditioning_shapes`, each with a batch axis.
        """
        taken = pack(latents, self.patch(transformer)) if self.packs_latents else latents
        arguments = {self.latents_name: taken, self.timestep_name: timestep}
        if self.guidance is not None and transformer.config.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, self.guidance, dtype=latents.dtype)
        return {**arguments, **conditioning}

    def undefined(self, what: str, method: str) -> ValueError:
        """Return the error about something that this family does not define."""
        return ValueError(
            f"The {self.name!r} family does not define {what}; implement {type(self).__name__}.{method}()."
        )


@cache
def _names_of_arguments(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)[1:]


# the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
vars(_names_of_arguments)["_dynamo_marked_constant"] = True


def imported(path: str) -> Any:
    """Import what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
