"""How MHLA reads a self-attention call before RoPE, which it applies after the feature map."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ..attention.layout import Shape
from ..attention.precision import autocast_type
from ..attention.rope import Rotary, rotary_of_complex
from .grids import Grid, in_line, read_once

Arguments = Mapping[str, Any]
"""Arguments of an attention's call by diffusers' names: hidden_states, encoder_hidden_states, attention_mask,
and rotary_emb (RoPE as the model passes it). Those that are None are left out."""
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_PLACES = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
_ACROSS_HEADS = "diffusers.models.transformers.sana_transformer.SanaAttnProcessor2_0"
_FLOAT16_MAX = 65504.0
_LAID_OUT: set[Grid] = set()
"""Shapes of views whose coordinates were read, which waits for the device, and are that token grid."""


@dataclass(frozen=True)
class AttentionInputs:
    """What one self-attention attends with, (B, N, H, D): the tokens of the grid, or a process's share of them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden_states: torch.Tensor
    """(B, N, hidden size), input of the attention, which the gate projects."""
    grid: Shape
    rotary: Rotary | None = None
    """(cos, sin), each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None


class AttentionAdapter:
    """Self-attention over the tokens of the grid alone, as in Wan, SANA and DiT, read as diffusers' ``Attention``.

    Args:
        class_path: end of the import path of the self-attentions' class, which is Wan's or a copy of it.
        processor: import path of the self-attentions' processor, if not the default of their class.
        cross: import path of that of the cross-attentions, if the class's default or their norms do not give it.
    """

    def __init__(self, *, class_path: str | None = None, processor: str = "", cross: str = "") -> None:
        self.class_path, self.processor, self.cross = class_path, processor, cross

    def own_processor(self, attn: Any) -> Any:
        """Return a fresh processor of the kind that diffusers gives a self-attention."""
        return _usual_processor(attn, self.processor)

    def own_cross_processor(self, attn: Any) -> Any:
        """Return a fresh processor of the kind that diffusers gives a cross-attention."""
        weight = getattr(getattr(attn, "norm_q", None), "weight", None)
        # SANA 1.5 and SANA-Video norm query and key across heads, which diffusers' common processor does not
        across = not hasattr(attn, "_default_processor_cls") and weight is not None and weight.numel() == attn.inner_dim
        return _usual_processor(attn, self.cross or (_ACROSS_HEADS if across else ""))

    def recognises(self, attn: Any) -> bool:
        """Whether an attention of an unknown model belongs to this family, by its class."""
        path = f".{type(attn).__module__}.{type(attn).__qualname__}"
        return self.class_path is not None and path.endswith(f".{self.class_path}")

    def grid_of(self, attn: Any, rotary: Rotary) -> Grid | None:
        """Return the token grid that Wan's tables of RoPE imply, each (1, N, 1, D); None for other attentions."""
        sines: Any = rotary[1]
        if not self.recognises(attn):
            return None
        # what the table is a view of, with an axis for each of the grid's
        laid_out = tuple(sines._base.shape[:-1]) if sines._base is not None else ()
        if laid_out in _LAID_OUT and math.prod(laid_out) == sines.shape[1]:
            return laid_out
        grid = _grid_of_sines(sines)  # all layers of a forward get the same table
        _LAID_OUT.update({grid} & {laid_out})
        return grid

    def arguments(self, *given: Any) -> Arguments:
        """Name the arguments of a processor's call after the attention, without those that are None."""
        return {name: value for name, value in zip(_PLACES, given, strict=True) if value is not None}

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int | None = None) -> AttentionInputs:
        """Interpret the arguments of a call, and project; ``tokens`` is the number on this process, None for all."""
        hidden_states, mask = arguments["hidden_states"], arguments.get("attention_mask")
        count, tokens = hidden_states.shape[1], math.prod(grid) if tokens is None else tokens
        if count != tokens:
            raise ValueError(
                f"The token grid has {tokens} tokens, but the attention got {count}; the processor was made for "
                "another resolution."
            )
        query, key, value = project_tokens(attn, hidden_states)
        lower = autocast_type(value)
        if lower is not None:  # a norm may return float32 and projections the lower type: as softmax attention casts
            query, key, value = (x.to(lower) for x in (query, key, value))
        key_mask = None if mask is None else key_padding_mask(mask, len(hidden_states), count)
        return AttentionInputs(query, key, value, hidden_states, grid, self.rotary(attn, arguments), key_mask)

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens, (cos, sin), each (1 or B, N, 1, D), or None.

        By default the model passes complex numbers (N or B, N, D / 2), tables (N, D), or tables of this shape.
        """
        rotary: Any = arguments.get("rotary_emb")
        if isinstance(rotary, torch.Tensor):
            is_double = arguments["hidden_states"].dtype == torch.float64
            return rotary_of_complex(rotary if is_double else rotary.to(torch.complex64))
        if rotary is None or rotary[0].ndim != 2:
            found: Rotary | None = rotary
            return found
        return rotary[0][None, :, None], rotary[1][None, :, None]

    def project_output(self, attn: Any, output: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Return value of the attention, from the output of its heads (B, N, H, D)."""
        output = attn.to_out[1](attn.to_out[0](output.flatten(2)))
        if getattr(attn, "residual_connection", False):
            output = output + inputs.hidden_states
        factor = getattr(attn, "rescale_output_factor", 1.0)
        output = output / factor if factor != 1 else output
        # as diffusers' own linear attention does: infinity would spread
        return output.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if output.dtype == torch.float16 else output

    def run(self, processor: Callable[..., Any], attn: Any, arguments: Arguments) -> Any:
        """Return value of the model's own processors."""
        return processor(attn, **arguments)


def key_padding_mask(attention_mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Return MHLA's mask (B, N) from an attention's; ValueError if it differs between queries or is of integers."""
    shape = tuple(attention_mask.shape)
    if shape not in ((batch, tokens), (batch, 1, tokens), (batch, 1, 1, tokens)):
        raise ValueError(
            f"MHLA supports only key masks of shape ({batch}, {tokens}), ({batch}, 1, {tokens}) or ({batch}, 1, 1, "
            f"{tokens}), got {shape}. Leave this layer unpatched with layers=[...]."
        )
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(
            f"A mask of {attention_mask.dtype} is ambiguous; give bool (True: attend) or the floating-point bias "
            "added to the scores, for example mask.bool()."
        )
    return key_weights(attention_mask.reshape(batch, tokens))


def key_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights of keys for a mask of softmax attention, (B, N): bool, or what is added to the scores."""
    if mask.dtype == torch.bool:
        return mask
    # as in softmax, only differences between the keys of a sample count; of one that is -inf throughout, none does
    mask = mask.float()
    return (mask - mask.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(mask.dtype).min)).exp()


@read_once
def _grid_of_sines(sines: torch.Tensor) -> Grid:
    """Return the token grid of Wan's sines (1, N, 1, D), whose coordinates begin with 0."""
    # an axis has a third of the channels; that of frames also the remainder
    height = 2 * (sines.shape[-1] // 6)
    frames = sines.shape[-1] - 2 * height
    # the first channel of an axis is sin(coordinate), which is 0 only for coordinate 0
    return in_line(*(sines[0, :, 0, [0, frames, frames + height]] == 0).T)


def project_tokens(attn: Any, hidden_states: torch.Tensor) -> Projected:
    """Return query, key and value, (B, N, H, D), by ``to_q``, ``to_k`` and ``to_v``, and normed."""
    projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    head_dim = int(attn.inner_dim) // int(attn.heads)  # the heads may be those of one process

    def in_heads(x: torch.Tensor, norm: Any = None) -> torch.Tensor:
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.numel() == x.shape[-1]:  # a norm across heads
            return norm(x).unflatten(-1, (-1, head_dim))
        x = x.unflatten(-1, (-1, head_dim))
        return x if norm is None else norm(x)

    query, key, value = projected
    shared = query.shape[-1] // key.shape[-1]
    key, value = in_heads(key, getattr(attn, "norm_k", None)), in_heads(value)
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=2) for x in (key, value))
    return in_heads(query, getattr(attn, "norm_q", None)), key, value


def _usual_processor(attn: Any, path: str = "") -> Any:
    own = None if path else getattr(type(attn), "_default_processor_cls", None)
    return (own or imported(path or "diffusers.models.attention_processor.AttnProcessor2_0"))()


def imported(path: str) -> Any:
    """Import what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
