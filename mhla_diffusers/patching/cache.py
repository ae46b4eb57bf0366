"""The cache of a patched language model: of every MHLA layer its state instead of keys and values."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..attention import MHLAState
from ..config import CausalConfig
from ..families import get_family
from .finding import find_transformers
from .layer import MHLALayer, layer_of


class MHLACache(Cache):
    """What ``model.generate(..., past_key_values=MHLACache(model))`` goes on from.

    A layer that runs MHLA has a :class:`mhla_diffusers.attention.MHLAState`, whose size does not grow with the text,
    and a layer that was not replaced has keys and values as in transformers' ``DynamicCache``. Results are those of a
    forward of the whole text, but for rounding. One cache is for one batch of texts that go on together, and for the
    layers as they are now: after ``change_mhla`` or ``load_mhla`` make another.

    Args:
        model: patched language model; PEFT's wrapper of one is looked into.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.

    Raises:
        ValueError: no language model.
    """

    def __init__(self, model: Any, backend: str = "auto") -> None:
        inside = model.get_base_model() if hasattr(model, "get_base_model") else model
        (transformer,) = find_transformers(inside).values()
        family = get_family(transformer)
        if family.kind != "language":
            raise ValueError(
                f"MHLACache is for a language model that generates token by token, and {type(transformer).__name__} "
                f"is a {family.kind} model."
            )
        attentions = list(family.attention.self_attentions(transformer).values())
        layers = [DynamicLayer() if layer_of(attn) is None else StateLayer(attn, backend) for attn in attentions]
        super().__init__(layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values (B, key heads, n, D) of the tokens that come; every attention calls it.

        Raises:
            ValueError: another batch size than that of the texts so far, or the call before has not come to its end.
        """
        if layer_idx == 0:
            lengths = {layer.get_seq_length() for layer in self.layers}
            states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
            awaited = {layer.is_awaited for layer in states}
            # where all wait, the model does not run MHLA at all, and the layers raise an error that says so
            if awaited != {True} and (len(lengths) > 1 or len(awaited) > 1):
                raise ValueError(
                    f"The last call with this MHLACache failed on its way through the layers, which now hold "
                    f"{' or '.join(map(str, sorted(lengths)))} tokens; reset() it and give the text from its begin."
                )
            known, given = next((layer.batch for layer in states), None), key_states.shape[0]
            if known not in (None, given):
                raise ValueError(
                    f"This cache goes on with a batch of {known} texts, and the model was given {given}. Make another "
                    "MHLACache(model), or reset() this one to begin again."
                )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def state_of(self, attn: Any) -> MHLAState:
        """Return the state of the texts so far, from which an attention goes on with the tokens of :meth:`update`.

        Raises:
            ValueError: the attention was not patched when the cache was made, has another MHLA layer than when the
                text began, or is another model's.
        """
        held, layer = self.layers[attn.layer_idx], layer_of(attn)
        if isinstance(held, StateLayer) and attn is held.attn and isinstance(layer, MHLALayer):
            if held.state is None:
                held.state, held.layer = layer.new_state((1,), held.backend), layer
            if layer is held.layer:
                held.is_awaited = False
                return held.state
        raise ValueError(
            f"This MHLACache does not belong to layer {attn.layer_idx} of this model as it is patched now; make "
            "another, MHLACache(model), for every model, patch and batch."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused before any layer is touched: a KV state is a sum, from which single tokens cannot be taken out.

        Raises:
            ValueError: any number but 0.
        """
        if tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}) would take tokens out of an MHLACache, which keeps sums over them. Assisted "
                "generation and others that take tokens back need past_key_values=DynamicCache(), which is slower."
            )

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes."""
        states = sum(layer.nbytes for layer in self.layers if isinstance(layer, StateLayer))
        softmax = (layer for layer in self.layers if isinstance(layer, DynamicLayer) and layer.keys is not None)
        return states + sum(layer.keys.nbytes + layer.values.nbytes for layer in softmax)


class StateLayer(CacheLayerMixin):
    """The state of one MHLA layer, in the place where transformers has keys and values.

    Args:
        attn: the attention, whose layer it is.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, attn: Any, backend: str) -> None:
        super().__init__()
        self.attn = attn
        self.backend = backend
        self.state: MHLAState | None = None
        """None before the first token."""
        self.batch: int | None = None
        """Texts of the batch."""
        self.layer: MHLALayer | None = None
        """That the state is of."""
        self.is_awaited = False
        """Whether tokens were announced that no MHLA layer has attended to yet."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateLayer":
        """Copy for the same model; no tensor of a state is ever written to, so both may hold those there are."""
        other = copy.copy(self)
        other.state = copy.copy(self.state)
        return other

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the state begins with the first tokens."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that come as they are; the attention itself lets the state go on.

        Raises:
            ValueError: the attention that ran before did not.
        """
        if self.is_awaited or layer_of(self.attn) is None:
            raise ValueError(
                "This MHLACache was given to a model that does not run MHLA in the layers that it was made for, so it "
                "has nothing to go on from. After remove_mhla take transformers' DynamicCache; else make it from the "
                "patched model itself, MHLACache(model)."
            )
        self.is_awaited, self.batch = True, key_states.shape[0]
        return key_states, value_states

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.state is None else self.state.nbytes

    def get_seq_length(self) -> int:
        """Count the tokens so far."""
        return 0 if self.state is None else self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask is for, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return how many tokens the blocks hold; -1 for any number."""
        layer = layer_of(self.attn)
        if layer is None or not isinstance(layer.config, CausalConfig) or layer.config.beyond == "relative":
            return -1
        return layer.config.blocks[0] * layer.config.block_length

    def reset(self) -> None:
        """Begin other texts."""
        self.state, self.layer, self.batch, self.is_awaited = None, None, None, False

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Go on with these texts of the batch, as beam search does."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self.batch = len(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every text."""
        if self.batch is not None:
            self.reorder_cache(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these texts alone."""
        self.reorder_cache(indices)
