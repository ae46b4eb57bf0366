"""Attentions of transformers that are led through its attention interface to a processor, as diffusers' are.

A patched model names the implementation ``mhla+`` and the one that it had, for example ``mhla+sdpa``. transformers then
calls :func:`attend` for every layer, which asks the layer's processor, and for layers that were not chosen goes on to
the implementation behind the ``+``. Imported when a model is patched.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from .attention_classes import WithProcessor, give_classes, refuse_weights, take_classes

PREFIX = "mhla+"
"""Of the names of implementations."""


class LlamaAttention(WithProcessor, modeling_llama.LlamaAttention):
    """An attention of a patched Llama: everything else inherited, and named as its base class."""

    own_function = staticmethod(modeling_llama.eager_attention_forward)
    """What transformers calls "eager"."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a model that another process has pickled."""
        super().__setstate__(state)
        implementation = str(self.config._attn_implementation)
        if implementation.startswith(PREFIX):
            _registered(implementation.removeprefix(PREFIX))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As the base class, which hands the further arguments on to :func:`attend`.

        Raises:
            ValueError: another implementation has been set since the patch.
        """
        if not str(self.config._attn_implementation).startswith(PREFIX):
            if self.has_processor:
                raise ValueError(
                    f"This model is patched with MHLA, but its attention implementation has been set to "
                    f"{self.config._attn_implementation!r} since, so MHLA would not run. Call remove_mhla(), set the "
                    "implementation, and patch again; or leave the implementation as the patch has it."
                )
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        kwargs |= {"layer_input": hidden_states, "cache": past_key_values}
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


_WITH = {modeling_llama.LlamaAttention: LlamaAttention}
"""transformers' class → the one with a processor."""


_CONFIG_BEFORE = "_mhla_config_before"
"""Attribute of a patched model: its configuration of before, which other models may share."""
_IMPLEMENTATION = "_attn_implementation_internal"
"""Where a configuration keeps the name of the implementation."""


def _registered(replaced: str) -> str:
    """Name under which transformers finds the implementation beside one that a model had."""
    name = PREFIX + replaced
    AttentionInterface.register(name, partial(attend, replaced=replaced))
    AttentionMaskInterface.register(name, partial(checked_mask, replaced=replaced))
    return name


def give_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """Make the attentions of a model such ones, and name the implementation for them in a configuration of its own."""
    before = transformer.config
    name = _registered(str(before._attn_implementation))
    give_classes(attentions, _WITH)
    own = copy.copy(before)
    own._attn_implementation = name
    _give_config(transformer, before, own)
    setattr(transformer, _CONFIG_BEFORE, before)


def take_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """The inverse of :func:`give_interface`."""
    take_classes(attentions, _WITH)
    before, meanwhile = getattr(transformer, _CONFIG_BEFORE), transformer.config
    # what was set meanwhile stays set
    vars(before).update({name: value for name, value in vars(meanwhile).items() if name != _IMPLEMENTATION})
    if not meanwhile._attn_implementation.startswith(PREFIX):
        before._attn_implementation = meanwhile._attn_implementation
    _give_config(transformer, meanwhile, before)
    delattr(transformer, _CONFIG_BEFORE)


def _give_config(transformer: Any, before: Any, after: Any) -> None:
    for module in transformer.modules():
        if vars(module).get("config") is before:
            module.config = after


class CausalMask:
    """That the tokens of a call follow each other without gaps, and the mask for layers that attend with softmax.

    Patched layers need no mask: a query sees no later key, and padding stands behind all tokens. The other layers' is
    made when the first of them asks.
    """

    def __init__(self, replaced: str, arguments: dict[str, Any]) -> None:
        self.replaced = replaced
        self.arguments = arguments
        self._made: tuple[Any, ...] = ()

    def of_softmax(self) -> Any:
        """What transformers makes for the implementation that the model had."""
        if not self._made:
            make = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(self.replaced)
            self._made = (make(**self.arguments) if make is not None else None,)
        return self._made[0]


def checked_mask(*, replaced: str, **arguments: Any) -> CausalMask:
    """What transformers asks for once in every forward, see :class:`transformers.AttentionMaskInterface`.

    Raises:
        ValueError: padding on the left or in between, a mask that is not causal alone, such as that of packed texts, or
            a cache whose keys are not those of the sequence.
    """
    past, own = arguments["q_offset"], arguments["q_length"]
    if isinstance(past, torch.Tensor) or arguments["kv_length"] != past + own or arguments["kv_offset"]:
        raise ValueError(
            "MHLA goes on from all of a sequence, and this cache holds another number of keys, as a static or a "
            "sliding one does. Give generate() past_key_values=MHLACache(model), or leave its cache_implementation out."
        )
    # a compiled graph gets the mask function of packed texts whether they are packed or not
    if arguments["mask_function"] is not causal_mask_function and not torch.compiler.is_compiling():
        raise ValueError(
            "Some tokens of this call may not see all that come before them, as texts that are packed into one row by "
            "their position_ids, and blocks of MHLA cannot be cut there. Give every text a row of its own, padded on "
            "the right."
        )
    padding = arguments["attention_mask"]
    if padding is not None:
        _check_padding(padding)
    return CausalMask(replaced, arguments)


def _check_padding(mask: torch.Tensor) -> None:
    """Raise unless the tokens that take part, (B, N), come before all that do not."""
    has_gap = (mask[:, 1:] & ~mask[:, :-1]).any()
    message = (
        "attention_mask has padding on the left or between tokens, which would shift the blocks that MHLA cuts a text "
        "into. Pad on the right to train or to score (tokenizer.padding_side = 'right'), and generate from prompts of "
        "one length together, or one by one."
    )
    if torch.compiler.is_compiling():
        torch._assert_async(~has_gap, message)
    elif bool(has_gap):
        raise ValueError(message)


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
    """What transformers calls for an attention, see :class:`transformers.AttentionInterface`.

    Args:
        module: the attention.
        query: (B, H, n, D) after RoPE.
        key: (B, key heads, N, D), all that the cache gives: the last n, or a part of them, are of these tokens.
        value: likewise.
        attention_mask: a :class:`CausalMask`.
        replaced: implementation that the model had.
        layer_input: (B, n, hidden size).
        cache: of the call.
        dropout: of attention weights.
        **kwargs: what transformers tells its implementations besides.

    Returns:
        (B, n, H, D), and weights where another implementation gives them.

    Raises:
        ValueError: a mask that the caller has made, dropout of weights, a wish for them, or texts that are packed into
            one row.
    """
    if not isinstance(attention_mask, CausalMask):
        raise ValueError(
            "A patched model makes its masks itself, and was given a ready one of four axes or none; give "
            "attention_mask of two axes, (batch, tokens), or leave it out."
        )
    if not module.has_processor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(replaced, module.own_function)
        mask, more = attention_mask.of_softmax(), {**kwargs, "dropout": dropout}
        attended: tuple[torch.Tensor, torch.Tensor | None] = function(module, query, key, value, mask, **more)
        return attended
    refuse_weights(dropout, bool(kwargs.get("output_attentions", module.config.output_attentions)))
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("MHLA does not cut rows of packed texts; give every text a row of its own.")
    output = module.processor.attend(
        module,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layer_input,
        cache,
    )
    return output, None
