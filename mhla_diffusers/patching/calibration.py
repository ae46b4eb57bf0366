"""Fit the output norm, or the far field's weight, of a fresh patch to the attention that it replaces."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..attention.blocks import block_index
from ..attention.eager import eager_attention
from ..attention.near_field import far_field
from ..attention.rotary import rotated
from ..families import get_family
from .finding import find_transformers
from .layer import MHLALayer
from .processor import AttentionInput, attention_input, project
from .removal import mhla_disabled

_QUERIES = 256
"""Queries of a sample whose softmax weights are formed; each costs N of them."""


@torch.no_grad()
def calibrate_output_norm(model: Any, run: Callable[[], object]) -> None:
    """Set every output norm so that MHLA's output has the scale of the replaced attention's.

    ``run`` is called once with the patch switched off; the root mean square of every head channel that the original
    attention hands to its output projection, over all tokens and heads, becomes the weight of the output RMSNorm.

    Args:
        model: a patched pipeline or transformer whose configuration has ``output_norm=True``.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Raises:
        ValueError: if the model is not patched or has no output norm, or ``run`` did not reach every layer.
    """
    layers = _layers_with(model, "output_norm")
    if not layers:
        raise ValueError("The model has no output norm to calibrate; patch it with output_norm=True.")
    squares: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, layer: MHLALayer) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def note(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            heads = args[0].detach().float().unflatten(-1, (layer.heads, layer.head_dim)).flatten(0, -2)
            squares[name] = squares.get(name, torch.zeros_like(heads[0])) + heads.square().sum(dim=0)
            counts[name] = counts.get(name, 0) + len(heads)

        return note

    handles = [attn.to_out[0].register_forward_pre_hook(watch(name, attn.mhla)) for name, attn in layers.items()]
    _run_unpatched(model, run, handles)
    _check_reached(layers, counts)
    for name, attn in layers.items():
        attn.mhla.output_norm.copy_((squares[name] / counts[name]).sqrt())


@torch.no_grad()
def calibrate_far_field(model: Any, run: Callable[[], object]) -> None:
    """Set λ of every head so that the far field weighs as much as the other blocks did under softmax attention.

    ``run`` is called once with the patch switched off. For some queries of every sample, softmax attention's sum of
    weights over the other blocks is compared with the far field's; λ is the geometric mean of their ratio.

    Args:
        model: a patched pipeline or transformer whose configuration has ``near_field="softmax"``.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Raises:
        ValueError: if the model is not patched or has no far field weight, or ``run`` did not reach every layer.
    """
    layers = _layers_with(model, "far_field_log_weight")
    if not layers:
        raise ValueError(
            'The model has no far field weight to calibrate; patch it with near_field="softmax" and several blocks.'
        )
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, attn: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ratios = _log_ratios(attn, attention_input(args, kwargs))
            sums[name] = sums.get(name, torch.zeros_like(ratios[0])) + ratios.sum(dim=0)
            counts[name] = counts.get(name, 0) + len(ratios)

        return note

    handles = [attn.register_forward_pre_hook(watch(name, attn), with_kwargs=True) for name, attn in layers.items()]
    _run_unpatched(model, run, handles)
    _check_reached(layers, counts)
    for name, attn in layers.items():
        attn.mhla.far_field_log_weight.copy_(sums[name] / counts[name])


def _log_ratios(attn: Any, given: AttentionInput) -> torch.Tensor:
    """Log of softmax attention's sum of weights over the other blocks by the far field's: (queries, H)."""
    layer: MHLALayer = attn.mhla
    grid = layer.token_grid.shape if layer.token_grid is not None else None
    if grid is None:
        raise ValueError("The token grid is not known; patch with apply_mhla() or mhla_diffusers.set_attn_processor().")
    query, key, value = (x.float() for x in project(attn, given.hidden_states))
    call = layer.call(query, key, value, grid, given.rotary)
    _, normaliser = eager_attention(far_field(call))
    query, key = rotated(query, call.rotary), rotated(key, call.rotary)
    chosen = torch.linspace(0, query.shape[1] - 1, min(_QUERIES, query.shape[1]), device=query.device).long()
    block_of = block_index(grid, call.blocks).to(query.device)
    own = block_of[chosen][:, None] == block_of[None, :]
    scores = torch.einsum("bqhd,bkhd->bqhk", query[:, chosen], key) / layer.head_dim**0.5
    softmax = scores.masked_fill(own[:, None, :], float("-inf")).logsumexp(dim=-1)
    return (softmax - normaliser[:, chosen].squeeze(-1).log()).flatten(0, 1)


def _run_unpatched(model: Any, run: Callable[[], object], handles: Sequence[RemovableHandle]) -> None:
    """Run with the patch switched off, and take the hooks away whatever happens."""
    try:
        with mhla_disabled(model):
            run()
    finally:
        for handle in handles:
            handle.remove()


def _check_reached(layers: dict[str, Any], counts: dict[str, int]) -> None:
    missed = [name for name in layers if name not in counts]
    if missed:
        raise ValueError(f"run() did not reach {len(missed)} of {len(layers)} layers, for example {missed[0]}.")


def _layers_with(model: Any, parameter: str) -> dict[str, Any]:
    """Patched attentions that have a parameter, by name."""
    return {
        f"{component}.{name}": attn
        for component, transformer in find_transformers(model).items()
        for name, attn in get_family(transformer).self_attentions(transformer).items()
        if getattr(attn, "mhla", None) is not None and getattr(attn.mhla, parameter) is not None
    }
