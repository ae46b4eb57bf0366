"""Where a model's self-attentions are, how they are called and what they compute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from typing import Any, Literal

from ..attention.rope import Rotary
from ..config import PatchConfig
from .adapters import AttentionAdapter

Counts = tuple[int | None, int | None]
"""Extra tokens before and after those of the grid; None for as many as the sequence holds."""


@dataclass(kw_only=True, eq=False)
class Attention:
    """The self-attentions of a family. A subclass overrides the methods that differ."""

    block_lists: tuple[str, ...] = ("transformer_blocks",)
    """Attributes of the transformer that hold blocks; absent ones are skipped."""
    attentions: tuple[str, ...] = ("attn1", "attn")
    """Attributes of a block, or dotted paths, that are self-attentions over the tokens of the grid; absent ones are
    skipped.
    """
    feed_forwards: tuple[str, ...] = ("ff", "ffn", "ff_context")
    """The same of feed-forward layers."""
    adapter: AttentionAdapter = AttentionAdapter()
    """How the self-attentions are called, what they attend with, and what they return."""
    class_path: str | None = None
    """End of the import path of the self-attentions' class, if no other family uses that class."""
    processor: str = ""
    """Import path of the processor that the library gives the self-attentions; empty for their class's default, or of a
    class without one ``AttnProcessor2_0``.
    """
    cross_processor: str = ""
    """The same of the cross-attentions."""
    softmax_processor: str = ""
    """Import path of a processor that computes softmax attention, if :attr:`processor` computes another."""
    perturbed_processors: Mapping[str, int] = field(default_factory=dict)
    """Class of a perturbed-attention guidance processor → number of parts of the batch; it perturbs the last part."""
    dispatches: bool = False
    """Whether the attentions follow diffusers' ``set_attention_backend``; others call PyTorch's attention."""
    computes: Literal["softmax", "linear"] = "softmax"
    """What the self-attentions compute without a patch."""
    eps: float = 0.0
    """Added to the normaliser by attention that is linear with φ = ReLU."""
    extra: Counts | Callable[[Mapping[str, Any]], Counts] = (0, 0)
    """Extra tokens before and after the grid's in the sequence that an attention sees, at most one of them None; or a
    function that counts them, given the arguments of the transformer's forward by name.
    """
    rows_alike: bool = False
    """Whether an attention mask with a row per query has the same row for all queries of the grid, so that the row of
    the grid's first token is a mask of keys. A mask between tokens, for which it is False, has no sparse form.
    """
    pads_behind_grid: bool = False
    """Whether the padding of shorter samples stands behind the grid: with a mask, grids begin at different tokens."""
    extra_tokens: int = 0
    """Extra tokens of the longest text that the pipeline takes by default; costs are computed for this many."""

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
            f"{name}.{attention}": found
            for name, block in self.blocks_of(transformer).items()
            for attention in self.attentions
            if (found := part_of(block, attention)) is not None
        }

    def adapter_of(self, attn: Any) -> AttentionAdapter:
        """Return the adapter of one self-attention, by default :attr:`adapter`."""
        return self.adapter

    def own_processor(self, attn: Any) -> Any:
        """Return a fresh processor of the kind that the library gives a self-attention."""
        return usual_processor(attn, self.processor)

    def recognises(self, attn: Any) -> bool:
        """Whether a self-attention of an unknown model belongs to this family, by :attr:`class_path`."""
        path = f".{type(attn).__module__}.{type(attn).__qualname__}"
        return self.class_path is not None and path.endswith(f".{self.class_path}")

    def recognises_cross(self, attn: Any) -> bool:
        """Whether a cross-attention of an unknown model needs this family's processor."""
        return False

    def grid_of(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Return the token grid that RoPE tables of a self-attention imply; None for another model, or no grid.

        With it diffusers' own ``set_attn_processor`` needs no ``grid``.
        """
        return None

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


def part_of(block: Any, path: str) -> Any:
    """Return what a dotted path of attributes names in a block; None if it is absent."""
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), block)


def usual_processor(attn: Any, path: str = "") -> Any:
    """Return a fresh processor: of an import path, else of the default of an attention's class."""
    own = None if path else getattr(type(attn), "_default_processor_cls", None)
    return (own or imported(path or "diffusers.models.attention_processor.AttnProcessor2_0"))()


def imported(path: str) -> Any:
    """Import what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
