"""Fit the output norm of a fresh patch to the attention that it replaces."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..attention.call import of_grid
from ..families import get_family
from .finding import find_transformers, refuse_language
from .layer import MHLALayer
from .processor import adapter_of
from .removal import mhla_disabled
from .sensitivity import check_run
from .token_grid import grid_of_call


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
    refuse_language(model, "calibrate_output_norm()")
    layers = patched_attentions(model, "output_norm")
    if not layers:
        raise ValueError("The model has no output norm to calibrate; patch it with output_norm=True.")
    squares: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, layer: MHLALayer) -> Callable[[torch.Tensor], None]:
        def note(of_heads: torch.Tensor) -> None:
            heads = of_heads.detach().float().unflatten(-1, (layer.heads, layer.head_dim)).flatten(0, -2)
            squares[name] = squares.get(name, torch.zeros_like(heads[0])) + heads.square().sum(dim=0)
            counts[name] = counts.get(name, 0) + len(heads)

        return note

    handles = [h for name, attn in layers.items() for h in watch_heads(attn, watch(name, attn.mhla))]
    run_unpatched(model, run, handles)
    check_reached(layers, counts)
    for name, attn in layers.items():
        attn.mhla.output_norm.copy_((squares[name] / counts[name]).sqrt())


def tokens_of_grid(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Those of the grid, of what a patched self-attention computes (B, N, ...) for these arguments of its forward."""
    adapter = adapter_of(attn)
    given = adapter.read(attn, adapter.arguments(args, kwargs))
    tokens = math.prod(grid_of_call(attn, given.rotary))
    return of_grid(x, adapter.extra(given, tokens)) if x.shape[1] > tokens else x


def watch_heads(attn: Any, note: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Call ``note`` with what the heads of a patched self-attention hand on of the tokens of the grid: (B, N, H D)."""
    handed: list[torch.Tensor] = []
    projection = adapter_of(attn).output_projection(attn)

    def look(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        of_heads = handed.pop() if handed else adapter_of(attn).heads_output(returned)
        note(tokens_of_grid(attn, args, kwargs, of_heads))

    handles = [attn.register_forward_hook(look, with_kwargs=True)]
    if projection is not None:
        handles.append(projection.register_forward_pre_hook(lambda _, args: handed.append(args[0])))
    return handles


def run_unpatched(model: Any, run: Callable[[], object], handles: Sequence[RemovableHandle]) -> None:
    """Run with the patch switched off, and take the hooks away whatever happens."""
    try:
        check_run(run)
        with mhla_disabled(model):
            run()
    finally:
        for handle in handles:
            handle.remove()


def check_reached(layers: Collection[str], reached: Collection[str]) -> None:
    """Raise unless a run has reached all layers.

    Raises:
        ValueError: naming one that it has not.
    """
    missed = [name for name in layers if name not in reached]
    if missed:
        raise ValueError(f"run() did not reach {len(missed)} of {len(layers)} layers, for example {missed[0]}.")


def patched_attentions(model: Any, parameter: str) -> dict[str, Any]:
    """Patched attentions that have a parameter, by name."""
    return {
        f"{component}.{name}": attn
        for component, transformer in find_transformers(model).items()
        for name, attn in get_family(transformer).self_attentions(transformer).items()
        if getattr(attn, "mhla", None) is not None and getattr(attn.mhla, parameter) is not None
    }
