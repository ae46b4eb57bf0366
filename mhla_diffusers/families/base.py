"""What is particular to one model family: where its self-attentions are and how its tokens lie."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from ..config import MHLAConfig


class Family(ABC):
    """Tells the patching code about one family of diffusers transformers.

    To add a model, subclass this, fill in what is abstract and pass an instance to :func:`register_family`.
    """

    name: ClassVar[str]
    """Name in patch files and messages."""
    transformers: ClassVar[tuple[str, ...]]
    """Class names of the transformers, for example ``("WanTransformer3DModel",)``."""
    axes: ClassVar[int]
    """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width)."""
    block_lists: ClassVar[tuple[str, ...]]
    """Attributes that hold transformer blocks, each with its self-attention as ``attn1``; absent ones are passed."""
    default_config: ClassVar[MHLAConfig]
    """What ``apply_mhla(pipe)`` uses when it is told nothing else."""

    def self_attentions(self, transformer: Any) -> dict[str, Any]:
        """Name and module of every self-attention, in the order of the layer indices."""
        return {
            f"{list_name}.{index}.attn1": block.attn1
            for list_name in self.block_lists
            for index, block in enumerate(getattr(transformer, list_name, ()))
        }

    def token_grid(self, transformer: Any, hidden_states: torch.Tensor) -> tuple[int, ...]:
        """Token grid that the transformer makes of its input ``hidden_states``.

        By default the latents (B, C, ...) are cut into patches of ``config.patch_size``, one size for all axes or one
        for each.
        """
        sizes, patch = hidden_states.shape[2:], transformer.config.patch_size
        patches = (patch,) * len(sizes) if isinstance(patch, int) else patch
        return tuple(size // length for size, length in zip(sizes, patches, strict=True))

    @abstractmethod
    def self_attention_processor(self) -> Any:
        """A fresh processor of the kind that diffusers gives the self-attentions of this family."""

    def cross_attention_processor(self) -> Any:
        """A fresh processor of the kind that diffusers gives the cross-attentions, ``AttnProcessor2_0`` by default."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return AttnProcessor2_0()

    def prepare(self, transformer: Any) -> None:  # noqa: B027 - most families need nothing here
        """Called once when a transformer is patched."""

    def restore(self, transformer: Any) -> None:  # noqa: B027
        """Called once when the patch is removed; undoes :meth:`prepare`."""
