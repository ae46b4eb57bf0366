"""Llama through transformers' attention interface, which rotates queries and keys before the patch gets them.

A patched model's implementation is named ``mhla+`` and the original name, for example ``mhla+sdpa``. transformers then
calls :func:`attend` for every layer. It runs the layer's processor; layers without one use the implementation after the
``+``. This module is imported when a model is patched.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .patched_classes import WithProcessor, refuse_weights, switch, switch_back

PREFIX = "mhla+"
"""Prefix of the names of implementations."""
_CONFIG_BEFORE = "_mhla_config_before"
"""Attribute of a patched model: its original configuration, which other models may share."""
_IMPLEMENTATION = "_attn_implementation_internal"
"""Where a configuration keeps the name of the implementation."""


class CausalAttention(WithProcessor):
    """Mixin of Llama's attentions in a patched model."""

    config: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the implementation for a model that another process pickled."""
        inherited: Any = super()
        inherited.__setstate__(state)
        implementation = str(self.config._attn_implementation)
        if implementation.startswith(PREFIX):
            _register(implementation.removeprefix(PREFIX))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base class, which passes further arguments to :func:`attend`.

        Raises:
            ValueError: another implementation has been set since the patch.
        """
        inherited: Any = super()
        if str(self.config._attn_implementation).startswith(PREFIX):
            kwargs |= {"layer_input": hidden_states, "cache": past_key_values}
        elif self.has_processor:
            raise ValueError(
                f"This model is patched with MHLA, but its attention implementation has been set to "
                f"{self.config._attn_implementation!r} since, so MHLA would not run. Call remove_mhla(), set the "
                "implementation, and patch again; or leave the implementation as the patch has it."
            )
        return inherited.forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


def give_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """Switch a model's attentions to their patched classes, and name the implementation in a copied configuration."""
    before = transformer.config
    own = copy.copy(before)
    own._attn_implementation = _register(str(before._attn_implementation))
    for attn in attentions:
        switch(attn, CausalAttention)
    _replace_config(transformer, before, own)
    setattr(transformer, _CONFIG_BEFORE, before)


def take_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """Undo :func:`give_interface`; settings that were changed meanwhile stay."""
    for attn in attentions:
        switch_back(attn)
    before, meanwhile = getattr(transformer, _CONFIG_BEFORE), transformer.config
    vars(before).update({name: value for name, value in vars(meanwhile).items() if name != _IMPLEMENTATION})
    if not meanwhile._attn_implementation.startswith(PREFIX):
        before._attn_implementation = meanwhile._attn_implementation
    _replace_config(transformer, meanwhile, before)
    delattr(transformer, _CONFIG_BEFORE)


def _register(replaced: str) -> str:
    """Register the patched implementation for an original one, and return its name."""
    name = PREFIX + replaced
    AttentionInterface.register(name, partial(attend, replaced=replaced))
    AttentionMaskInterface.register(name, partial(checked_mask, replaced=replaced))
    return name


def _replace_config(transformer: Any, before: Any, after: Any) -> None:
    for module in transformer.modules():
        if vars(module).get("config") is before:
            module.config = after


class CausalMask:
    """A checked causal mask without gaps, and the mask for layers that keep softmax attention.

    Patched layers need no mask: they are causal, and padding comes after all tokens. The mask of the other layers is
    made when the first of them needs it.
    """

    def __init__(self, replaced: str, arguments: dict[str, Any]) -> None:
        self.replaced = replaced
        self.arguments = arguments
        self._made: tuple[Any, ...] = ()

    def for_softmax(self) -> Any:
        """Return the mask that transformers makes for the original implementation."""
        if not self._made:
            make = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(self.replaced)
            self._made = (make(**self.arguments) if make is not None else None,)
        return self._made[0]


def checked_mask(*, replaced: str, **arguments: Any) -> CausalMask:
    """Called by transformers once per forward, see :class:`transformers.AttentionMaskInterface`.

    Raises:
        ValueError: padding on the left or in between, a mask that is more than causal, such as that of packed texts, or
            a cache that does not hold exactly the keys of the sequence.
    """
    past, own = arguments["q_offset"], arguments["q_length"]
    if isinstance(past, torch.Tensor) or arguments["kv_length"] != past + own or arguments["kv_offset"]:
        raise ValueError(
            "MHLA continues from the whole sequence, but this cache holds another number of keys, as a static or "
            "sliding cache does. Pass past_key_values=MHLACache(model) to generate(), or leave cache_implementation "
            "out."
        )
    # a compiled graph always gets the mask function of packed texts
    if arguments["mask_function"] is not causal_mask_function and not torch.compiler.is_compiling():
        raise ValueError(
            "Some tokens of this call may not see all earlier tokens, as when position_ids pack several texts into one "
            "row, and MHLA cannot split its blocks there. Give every text a row of its own, padded on "
            "the right."
        )
    if (padding := arguments["attention_mask"]) is not None:
        has_gap = (padding[:, 1:] & ~padding[:, :-1]).any()
        message = (
            "attention_mask has padding on the left or between tokens, which would shift the blocks that MHLA splits a "
            "text into. Pad on the right to train or to score (tokenizer.padding_side = 'right'), and generate from "
            "prompts of one length together, or one by one."
        )
        if torch.compiler.is_compiling():
            torch._assert_async(~has_gap, message)
        elif bool(has_gap):
            raise ValueError(message)
    return CausalMask(replaced, arguments)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    replaced: str,
    layer_input: torch.Tensor | None = None,
    cache: Any = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Called by transformers for every attention, see :class:`transformers.AttentionInterface`.

    Returns:
        (B, n, H, D), and weights if another implementation returns them.

    Raises:
        ValueError: a mask made by the caller, attention dropout, ``output_attentions``, or several texts packed into
            one row.
    """
    if not isinstance(attention_mask, CausalMask):
        raise ValueError(
            "A patched model makes its own masks, but got a mask of four axes or none; pass attention_mask with "
            "two axes, (batch, tokens), or leave it out."
        )
    if not module.has_processor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(replaced, eager_attention_forward)
        mask = attention_mask.for_softmax()
        attended: tuple[torch.Tensor, torch.Tensor | None] = function(
            module, query, key, value, mask, dropout=dropout, **kwargs
        )
        return attended
    refuse_weights(dropout, bool(kwargs.get("output_attentions", module.config.output_attentions)))
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("MHLA does not split rows of packed texts; give every text a row of its own.")
    by_token = (x.transpose(1, 2) for x in (query, key, value))
    return module.processor.attend(module, *by_token, layer_input, cache), None
