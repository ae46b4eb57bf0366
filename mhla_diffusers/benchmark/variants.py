"""The same transformer with different self-attentions, all on one set of weights."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from ..families import get_family
from ..patching import apply_mhla
from .models import Model
from .softmax import SOFTMAX_BACKENDS, why_no_softmax
from .timing import Absent

HYBRID = "MHLA hybrid 2/3"
COMPILED = " + torch.compile"
"""Ends the name of a variant whose repeated blocks are compiled."""
LINEAR_KINDS = ("plain linear", "MHLA", HYBRID)
"""Patches; the hybrid keeps the model's own attention in every third layer."""


@dataclass(frozen=True)
class Choice:
    """One self-attention to measure."""

    name: str
    kind: str
    """softmax, own, or one of ``LINEAR_KINDS``."""
    baseline: bool
    blocks: int | None = None
    """M of the replaced layers; None for softmax."""
    backend: str | None = None
    """Of softmax attention: diffusers' name (Wan) or a key of ``SOFTMAX_BACKENDS``; None for the default."""
    absent: str | None = None
    """Why it cannot run here."""


def attention_choices(model: Model, transformer: Any, tokens: int, device: torch.device) -> list[Choice]:
    """All self-attentions that a transformer can be measured with; the first is its own.

    Args:
        model: which.
        transformer: of it, on any device.
        tokens: N.
        device: where it will run.
    """
    family = get_family(transformer).name
    heads = transformer.config.num_attention_heads
    softmax_is_own = family != "sana"
    choices = [] if softmax_is_own else [Choice("own linear", "own", baseline=True, blocks=1)]
    choices.append(Choice("softmax native", "softmax", softmax_is_own))
    for backend in _diffusers_backends() if family == "wan" else SOFTMAX_BACKENDS:
        # diffusers' backends reach Wan only: DiT and SANA call PyTorch's attention themselves
        absent = why_no_backend(backend) if family == "wan" else None
        absent = absent or why_no_softmax(backend.removeprefix("_native_"), device, tokens, heads)
        exact = "sage" not in backend  # which multiplies in 8 bits
        baseline = softmax_is_own and exact
        choices.append(Choice(f"softmax {backend}", "softmax", baseline, backend=backend, absent=absent))
    count = torch.Size(model.blocks).numel()
    layers = transformer.config.num_layers
    cut = f"{layers} of {model.layers} layers cannot stand for two of every three; --layers must be a multiple of 3"
    too_few = layers != model.layers and layers % 3 != 0
    return [
        *choices,
        Choice("plain linear", "plain linear", baseline=False, blocks=1),
        Choice("MHLA", "MHLA", baseline=False, blocks=count),
        Choice(HYBRID, HYBRID, baseline=False, blocks=count, absent=cut if too_few else None),
    ]


def why_no_backend(name: str) -> str | None:
    """Why one of diffusers' attention backends is not to be tried; None if it is."""
    from diffusers.models.attention_dispatch import attention_backend

    if name.endswith("_hub"):
        return "its kernels are downloaded from the Hub, and benchmarks download nothing"
    try:
        with attention_backend(name):
            return None
    except (RuntimeError, ValueError) as error:
        return str(error)


def make_variant(transformer: Any, model: Model, choice: Choice) -> Any:
    """A transformer with another self-attention that shares all weights with ``transformer``."""
    tensors = (*transformer.parameters(), *transformer.buffers())
    variant = copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})
    set_attention(variant, model, choice.kind)
    if choice.backend is not None and get_family(variant).name == "wan":
        from diffusers.models.attention_dispatch import attention_backend

        with attention_backend("native"):  # which restores what set_attention_backend changes for all models
            variant.set_attention_backend(choice.backend)
    return variant


def set_attention(transformer: Any, model: Model, kind: str) -> None:
    """Replace the self-attention, unless ``kind`` is what the transformer has."""
    family = get_family(transformer)
    if kind == "softmax" and family.name == "sana":
        for attn in family.self_attentions(transformer).values():
            attn.set_processor(family.cross_attention_processor())
    if kind in LINEAR_KINDS:
        blocks = (1,) * family.axes if kind == "plain linear" else model.blocks
        apply_mhla(transformer, blocks=blocks, layers="2/3" if kind == HYBRID else "all")


def make_context(transformer: Any, choice: Choice) -> Callable[[], AbstractContextManager[object]]:
    """What a variant must run in: for DiT and SANA the choice of PyTorch's backend."""
    if choice.backend is None or get_family(transformer).name == "wan":
        return nullcontext
    return partial(sdpa_kernel, [SOFTMAX_BACKENDS[choice.backend]])


def compile_layers(transformer: Any) -> None:
    """``torch.compile`` of the repeated blocks."""
    for block in repeated_blocks(transformer):
        block.compile(dynamic=False)


def repeated_blocks(transformer: Any) -> list[nn.Module]:
    """The layers of a transformer."""
    return [block for name in get_family(transformer).block_lists for block in getattr(transformer, name, ())]


def without_layers(transformer: Any) -> Any:
    """The rest of a transformer, which shares its weights: layers hand on what they are given."""
    tensors = (*transformer.parameters(), *transformer.buffers())
    rest = copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})
    for block in repeated_blocks(rest):
        block.forward = _hand_on  # DiT asks its first layer for the time embedding, so the layers must stay
    return rest


def _hand_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def can_compile(choice: Choice) -> Absent | None:
    """Why a variant is not compiled; None if it is."""
    if choice.absent is not None:
        return Absent(choice.absent)
    if choice.backend in SOFTMAX_BACKENDS:
        return Absent("torch.compile chooses PyTorch's backend itself")
    return None


def _diffusers_backends() -> list[str]:
    """Names but for other accelerators, packed sequences, and the default, which is measured as softmax native."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    names = [backend.value for backend in AttentionBackendName]
    return [name for name in names if not any(word in name for word in ("varlen", "npu", "xla")) and name != "native"]
