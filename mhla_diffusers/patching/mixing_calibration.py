"""Fit the mixing matrices of a patch without a sparse branch to the softmax attention that it replaces."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..attention.calibrate import BlockInput, fit_mixing
from ..families import get_family
from .calibration import check_reached
from .finding import find_transformers, is_patched, mhla_layers, refuse_causal, refuse_language
from .other_processors import other_processors_wanted
from .processor import attended
from .removal import mhla_disabled
from .sensitivity import TransformerCall, patched_pairs, record_calls, repeat_calls
from .sparse_calibration import fit_weights, head_projections, spread_calls

_FLOAT32 = 4
_MOST_BYTES = 16 * 2**30
"""Of the equations of one layer, M³ numbers for every matrix."""
_QUERIES = 16
"""Queries of every block in every call."""


@torch.no_grad()
def calibrate_mixing(model: Any, run: Callable[[], object]) -> None:
    """Set the mixing matrices of MHLA alone to what brings its output closest to softmax attention's.

    ``run`` is called once with the patch switched off. Then the layers are fitted one after another, on what they get
    from those before, which are patched already: see :mod:`mhla_diffusers.attention.calibrate`. In joint attention λ
    is fitted as well, to weigh the tokens of the grid beside the extra ones. Nothing else of the patch changes. Without
    training it helps much, and is still far from what adaptation reaches.

    Args:
        model: a patched pipeline or transformer with ``sparse="none"``.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Raises:
        ValueError: if the model is not patched, is patched causally, has a sparse branch or an output norm, was not
            patched in place of softmax attention or without a normaliser, has too many blocks or is run at fewer, or
            ``run`` did not reach every layer.
    """
    refuse_language(model, "calibrate_mixing()")
    transformers = {name: part for name, part in find_transformers(model).items() if is_patched(part)}
    if not transformers:
        raise ValueError("The model is not patched with MHLA; there is no mixing matrix to calibrate.")
    refuse_causal((layer.config for layer in mhla_layers(model).values()), "calibrate_mixing()")
    for transformer in transformers.values():
        _check(transformer)
    with mhla_disabled(model):
        calls = record_calls(transformers, run)
    for name, transformer in transformers.items():
        some = spread_calls(calls[name])
        _fit_layers(transformer, some)
        # where extra tokens are attended to with softmax, the rest must weigh as it did beside them
        fit_weights(transformer, {name: attn for name, (attn, _) in patched_pairs(transformer).items()}, some)


def _check(transformer: nn.Module) -> None:
    own = get_family(transformer).own_attention
    if own != "softmax":
        way_out = (
            "mixing_init='uniform' is the same as it" if own == "linear" else "the mixing matrices must be trained"
        )
        raise ValueError(f"The own attention of {type(transformer).__name__} is {own}: {way_out}.")
    for attn, _ in patched_pairs(transformer).values():
        config = attn.mhla.config
        if config.sparse != "none" or not config.normalize or config.output_norm:
            raise ValueError(
                "calibrate_mixing() fits MHLA alone, sparse='none', normalize=True and output_norm=False; got "
                f"sparse={config.sparse!r}, normalize={config.normalize}, output_norm={config.output_norm}. "
                "calibrate_sparse() fits what goes with a sparse branch, calibrate_output_norm() a norm."
            )
        size = _FLOAT32 * attn.mhla.mixing[..., 0, 0].numel() * math.prod(config.blocks) ** 3
        if size > _MOST_BYTES:
            raise ValueError(
                f"blocks={config.blocks} are too many to fit: the equations of a layer would take {size / 2**30:.0f} "
                f"GiB, and at most {_MOST_BYTES // 2**30} are allowed. Fewer blocks, or one matrix for all heads "
                "(mixing_per_head=False), take less."
            )


def _fit_layers(transformer: nn.Module, calls: list[TransformerCall]) -> None:
    pairs = patched_pairs(transformer)
    patched = {name: attn.processor for name, (attn, _) in pairs.items()}
    before = {name: attn.mhla.mixing.clone() for name, (attn, _) in pairs.items()}
    with other_processors_wanted(transformer):
        try:
            for attn, original in pairs.values():
                attn.set_processor(original)
            for name, (attn, _) in pairs.items():
                given = _inputs(transformer, attn, calls)
                check_reached([name], [name] if given else [])
                attn.mhla.mixing.copy_(fit_mixing(given, head_projections(attn), attn.mhla.mixing))
                attn.mhla.clip_mixing_()
                attn.set_processor(patched[name])
        except BaseException:
            for name, (attn, _) in pairs.items():
                attn.mhla.mixing.copy_(before[name])
            raise
        finally:
            for name, (attn, _) in pairs.items():
                attn.set_processor(patched[name])


def _inputs(transformer: nn.Module, attn: Any, calls: list[TransformerCall]) -> list[BlockInput]:
    """What one attention gets in some calls.

    Raises:
        ValueError: a grid that is cut into other blocks than the matrix is for.
    """
    found: list[BlockInput] = []

    def note(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = attn.mhla.call(attended(attn, args, kwargs).in_float32())
        if call.blocks != attn.mhla.config.blocks:
            raise ValueError(
                f"The grid {call.grid} is cut into {call.blocks} blocks, the matrix is for {attn.mhla.config.blocks}; "
                "calibrate at a size with at least as many tokens along every axis."
            )
        found.append(BlockInput.of(call, _QUERIES, len(found)))

    handle = attn.register_forward_pre_hook(note, with_kwargs=True)
    try:
        repeat_calls(transformer, calls)
    finally:
        handle.remove()
    return found
