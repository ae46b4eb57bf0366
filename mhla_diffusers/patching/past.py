"""What a patched attention of a language model attends to: the tokens of the call, and the text before them."""

from typing import Any

import torch

from ..attention import MHLAState
from .layer import layer_of


def attend_to_past(
    attn: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden_states: torch.Tensor,
    cache: Any,
    backend: str,
) -> torch.Tensor:
    """What a patched attention gives for the tokens that come.

    Args:
        attn: the attention.
        query: (B, n, H, D) after RoPE.
        key: (B, N, H, D): of the n tokens, or with transformers' ``DynamicCache`` of all so far.
        value: like ``key``.
        hidden_states: (B, n, hidden size), input of the attention.
        cache: :class:`mhla_diffusers.MHLACache`, a ``DynamicCache``, or None.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.

    Returns:
        (B, n, H, D).

    Raises:
        ValueError: a cache of another kind, or of another model.
    """
    layer, count = layer_of(attn), query.shape[1]
    if layer is None:
        raise ValueError("This attention runs MHLA and has no layer for it; call apply_mhla(model) again.")
    state: MHLAState | None = None
    if hasattr(cache, "state_of"):
        state = cache.state_of(attn)
    else:
        _check_cache(cache)
        if key.shape[1] > count:
            # nothing of the keys is summed up, so that is done anew in every call: right, and slower than MHLACache
            state = layer.new_state((1,), backend)
    output: torch.Tensor = attn.mhla(query, key, value, hidden_states, (count,), backend=backend, state=state)
    return output


def _check_cache(cache: Any) -> None:
    from transformers import DynamicCache

    if cache is not None and type(cache) is not DynamicCache:
        raise ValueError(
            f"A {type(cache).__name__} does not go with MHLA; give past_key_values=MHLACache(model), or transformers' "
            "DynamicCache."
        )
