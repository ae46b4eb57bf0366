"""Causal MHLA (paper, Appendix C) as an attention implementation of transformers, for Llama and models like it.

    apply_mhla(model, blocks=32, block_length=64)  # its attention implementation becomes "mhla"
    model.generate(**prompt, past_key_values=MHLACache(model))

transformers calls :func:`attend` for every layer, after RoPE, so the feature map comes after RoPE. A token sees earlier
blocks through their mixed states, and its own block up to itself with softmax or, as in the paper, linear attention.
"""

import math
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mhla_diffusers.attention import MHLAState, clip_mixing_, extend_mixing, initial_mixing, mhla_attention

NAME, OTHERS = "mhla", "sdpa"
"""The implementation, and that of layers which keep softmax attention."""


class CausalMHLA(nn.Module):
    """What one attention learns: the mixing matrix, and λ where its own block is attended to with softmax.

    Args:
        heads: of the queries.
        blocks: blocks of the longest text that is trained; at least two. Later ones use the last row of the matrix, by
            distance.
        block_length: tokens per block.
        own: how a token attends to its own block.
        mixing_init: see :func:`mhla_diffusers.attention.initial_mixing`.
        mixing_learnable: whether the matrix is trained.
    """

    def __init__(
        self,
        heads: int,
        *,
        blocks: int,
        block_length: int,
        own: Literal["softmax", "linear"] = "softmax",
        mixing_init: Literal["locality", "uniform"] = "locality",
        mixing_learnable: bool = True,
    ) -> None:
        super().__init__()
        self.blocks, self.block_length = blocks, block_length
        self.mixing = nn.Parameter(initial_mixing((blocks,), mixing_init), requires_grad=mixing_learnable)
        self.linear_log_weight = nn.Parameter(torch.zeros(heads)) if own == "softmax" else None

    @property
    def weights(self) -> dict[str, torch.Tensor | None]:
        """Mixing matrix (blocks, blocks), and λ (heads,) or None."""
        weight = self.linear_log_weight
        return {"mixing": self.mixing.clamp_min(0), "linear_weight": None if weight is None else weight.exp()}

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend within whole texts, (B, N, H, D) each."""
        weights, blocks = self.weights, math.ceil(query.shape[1] / self.block_length)
        if blocks > self.blocks:
            weights["mixing"] = extend_mixing(weights["mixing"], (self.blocks,), blocks)
        blocks = max(blocks, self.blocks)
        grid = (blocks * self.block_length,)
        return mhla_attention(query, key, value, grid=grid, blocks=(blocks,), rope="before", causal="token", **weights)

    def new_state(self) -> MHLAState:
        """Begin a text that is continued; every step brings the weights."""
        grid = (self.blocks * self.block_length,)
        return MHLAState(grid, (self.blocks,), causal="token", beyond="relative", rope="before")


def apply_mhla(model: Any, *, layers: Collection[int] | None = None, **settings: Any) -> Any:
    """Replace the self-attention of a Llama in place, and return it.

    Args:
        model: ``LlamaForCausalLM``, or another model whose ``model.layers`` have a ``self_attn`` that calls
            transformers' attention interface.
        layers: indices of those to replace; None for all.
        **settings: of :class:`CausalMHLA`.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, checked_mask)
    for index, layer in enumerate(model.model.layers):
        if layers is None or index in layers:
            attn = layer.self_attn
            attn.mhla = CausalMHLA(model.config.num_attention_heads, **settings).to(attn.q_proj.weight.device)
            attn.register_forward_pre_hook(pass_cache, with_kwargs=True)
    model.set_attn_implementation(NAME)
    return model


def pass_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let :func:`attend` see the cache, which transformers keeps from attention implementations."""
    return args, kwargs | {"mhla_cache": kwargs.get("past_key_values")}


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    mhla_cache: Cache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One attention, as transformers calls it: (B, heads, n, D) to (B, n, heads, D).

    Raises:
        ValueError: a cache of keys and values that continues a text.
    """
    if not hasattr(module, "mhla"):
        found: tuple[torch.Tensor, torch.Tensor | None] = ALL_ATTENTION_FUNCTIONS[OTHERS](
            module, query, key, value, attention_mask, **kwargs
        )
        return found
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"MHLA continues a text from its states, but a {type(mhla_cache).__name__} holds keys and values. Pass "
            "past_key_values=MHLACache(model)."
        )
    # under autocast RoPE leaves queries and keys in float32
    query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    if isinstance(mhla_cache, MHLACache):
        return mhla_cache.layers[module.layer_idx].state.step(query, key, value, **module.mhla.weights), None
    return module.mhla(query, key, value), None


def checked_mask(*, mask_function: Any, attention_mask: torch.Tensor | None, **arguments: Any) -> Any:
    """Mask of the layers that keep softmax attention; MHLA is causal and needs none, as padding comes last.

    Raises:
        ValueError: padding on the left or between tokens, or texts packed into one row, which would shift the blocks.
    """
    has_gap = attention_mask is not None and bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any())
    if has_gap or mask_function is not causal_mask_function:
        raise ValueError(
            "MHLA's blocks begin with the row, and this one has padding before or between tokens, or several texts. "
            "Give every text a row of its own, padded on the right."
        )
    make = ALL_MASK_ATTENTION_FUNCTIONS[OTHERS]
    return make(mask_function=mask_function, attention_mask=attention_mask, **arguments)


class MHLACache(Cache):
    """A state for every MHLA layer, whose size does not grow with the text; keys and values for the others.

    One cache is for one batch of texts of one length.

    Args:
        model: with MHLA.
    """

    def __init__(self, model: Any) -> None:
        attentions = [layer.self_attn for layer in model.model.layers]
        super().__init__([StateLayer(attn.mhla) if hasattr(attn, "mhla") else DynamicLayer() for attn in attentions])


class StateLayer(CacheLayerMixin):
    """The state of one MHLA layer, where transformers has keys and values."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, layer: CausalMHLA) -> None:
        super().__init__()
        self.layer = layer
        self.state = layer.new_state()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the state begins with the first tokens."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new tokens' keys and values as they are; :func:`attend` adds them to the state."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens a mask is for, and where they begin."""
        return self.state.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: any number."""
        return -1

    def reset(self) -> None:
        """Begin another text."""
        self.state = self.layer.new_state()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue with these texts of the batch, as beam search does."""
        if self.state.length:
            self.state.reorder(beam_idx)


def cache_bytes(cache: Any) -> int:
    """Bytes of an :class:`MHLACache` or of transformers' ``DynamicCache``."""
    return sum(
        layer.state.nbytes if isinstance(layer, StateLayer) else layer.keys.nbytes + layer.values.nbytes
        for layer in cache.layers
    )


def make_optimizer(model: nn.Module, rate: float, mixing_rate: float, decay: float) -> torch.optim.Optimizer:
    """AdamW that clips mixing matrices to (0, 1) after every step, as the paper does.

    Args:
        model: with MHLA or without.
        rate: learning rate of all but mixing matrices and λ.
        mixing_rate: of these.
        decay: weight decay of matrices; norms, biases, mixing matrices and λ have none.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    mixing: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = name.endswith("weight") and parameter.ndim > 1
            (mixing if ".mhla." in name else matrices if is_matrix else others).append(parameter)
    groups = [
        {"params": matrices, "lr": rate, "weight_decay": decay},
        {"params": others, "lr": rate, "weight_decay": 0.0},
        {"params": mixing, "lr": mixing_rate, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])

    @torch.no_grad()
    def clip(*_: Any) -> None:
        for module in model.modules():
            if isinstance(module, CausalMHLA):
                clip_mixing_(module.mixing)

    optimizer.register_step_post_hook(clip)
    return optimizer
