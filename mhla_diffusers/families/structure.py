"""What a family tells of a transformer: where its self-attentions are, how they are called, and how its tokens lie."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch

from ..attention.rope import Rotary
from ..config import MHLAConfig
from .adapters import AttentionAdapter

Sample = Mapping[str, torch.Tensor]
"""``latents`` (C, ...) as the transformer takes them, and further arguments of its forward, without a batch axis."""


class Structure(ABC):
    """The part of a :class:`Family` that patching needs."""

    name: ClassVar[str]
    """Name in patch files, on the command line and in messages."""
    transformers: ClassVar[tuple[str, ...]]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    library: ClassVar[str] = "diffusers"
    """Module that has these classes, imported when one is asked for."""
    axes: ClassVar[int]
    """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width)."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes that hold transformer blocks; absent ones are passed."""
    attentions: ClassVar[tuple[str, ...]] = ("attn1",)
    """Attributes of a block that are self-attentions over the tokens of the grid; absent ones are passed."""
    adapter: ClassVar[AttentionAdapter] = AttentionAdapter()
    """How these are called, what they attend with, and what they return."""
    extra_tokens: ClassVar[int] = 0
    """Extra tokens of the longest text that the pipeline takes unasked: what costs are told for."""
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ffn")
    """Attributes of a block that are feed-forward layers; absent ones are passed."""
    default_config: ClassVar[MHLAConfig]
    """What ``apply_mhla(pipe)`` uses when it is told nothing else."""
    own_attention: ClassVar[Literal["softmax", "linear", "gated linear"]] = "softmax"
    """What the self-attentions compute without a patch."""
    own_attention_is_causal: ClassVar[bool] = False
    """Whether a token of theirs never sees a later one."""
    own_attention_eps: ClassVar[float] = 0.0
    """Added to the normaliser by a family whose own attention is linear with φ = ReLU."""
    kind: ClassVar[Literal["diffusion", "language", "vision"]] = "diffusion"
    """A diffusion model of diffusers, which a pipeline calls in every denoising step, or a language or vision model of
    transformers.
    """
    squares_only: ClassVar[bool] = False
    """Whether height and width must be equal."""
    lacks_processor_methods: ClassVar[bool] = False
    """Whether diffusers' class lacks ``attn_processors`` and ``set_attn_processor``; a patched instance is given them.

    ``with_processors.py`` must have a class for it.
    """
    dispatches_attention: ClassVar[bool] = False
    """Whether its attentions follow diffusers' ``set_attention_backend``; others call PyTorch's attention."""
    forward_names: ClassVar[tuple[str, ...]] = ("hidden_states",)
    """Names of the arguments that the transformer's forward is given by place; the first are latents."""
    timestep_name: ClassVar[str] = "timestep"
    """Of the argument that tells the transformer the time."""
    streamed: ClassVar[tuple[str, ...]] = ()
    """Those of :attr:`transformers` that can be given a video frame block after frame block: every frame may have a
    time of its own, and :meth:`rotary_from` tells RoPE of later frames.
    """

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a diffusion model."""
        return self.kind == "diffusion"

    @property
    def makes_videos(self) -> bool:
        """Whether a sample has frames."""
        return self.axes == 3

    def transformer_class(self, name: str) -> Any:
        """One of :attr:`transformers`.

        Raises:
            AttributeError: the library lacks it.
        """
        return getattr(import_module(self.library), name)

    def build(self, name: str, settings: Mapping[str, Any]) -> Any:
        """A transformer with fresh weights.

        Args:
            name: one of :attr:`transformers`.
            settings: arguments of the class, or of its configuration where that is an object.

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
        """The module whose forward is given the pixels or latents and runs the blocks; by default all of it."""
        return transformer

    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """The adapter of one of the self-attentions, by default :attr:`adapter`."""
        return self.adapter

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
            timestep: (B,), as the process gives it; of those in :attr:`streamed` also (B, F), of every frame.
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

    def rotary_from(self, transformer: Any, rotary: Rotary, grid: tuple[int, ...], first: int) -> Rotary:
        """RoPE of frames that do not begin a video.

        Args:
            transformer: which.
            rotary: what it hands to its attentions, (cos, sin), as if the frames did begin one.
            grid: of the tokens.
            first: place of the first frame, in tokens of the first axis.

        Raises:
            ValueError: the family does not tell, or the model has no RoPE for so late a frame.
        """
        raise ValueError(f"The {self.name!r} family does not tell RoPE of later frames: give it a rotary_from().")

    def why_too_late(self, transformer: Any, first: int, last: int) -> str | None:
        """Why a transformer has no RoPE for some frames of a video; None, if it has.

        Args:
            transformer: which.
            first: place of the first frame, in tokens of the first axis.
            last: place behind the last one.
        """
        return None

    def why_not_split(self, arguments: Mapping[str, Any], grid: tuple[int, ...]) -> str | None:
        """Why the tokens of a call of the transformer cannot be split over processes; None, if they can.

        Args:
            arguments: of the transformer's forward, by name.
            grid: token grid.
        """
        return None

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

    def why_not_patched(self, transformer: Any, config: MHLAConfig) -> str | None:
        """Why a transformer of this family cannot have these settings, and the way out; None, if it can.

        Args:
            transformer: which.
            config: settings that no other check refuses.
        """
        return None

    def prepare(self, transformer: Any) -> None:
        """Called once before a transformer is patched: gives it ``set_attn_processor`` if its class lacks that."""
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
