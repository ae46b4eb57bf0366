"""Fit a fresh patch to the softmax attention that it replaces: λ and β, mixing matrices, the output norm."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from ..attention.calibrate import BlockInput, Candidates, candidate_errors, fit_mixing
from ..attention.precision import without_autocast
from .calls import TransformerCall, check_run, record_unpatched, repeat_calls
from .finding import mhla_disabled, refuse_causal, refuse_language, require_patched
from .handle import Patched
from .hooks import refuse_step_cache
from .layer import LayerInput, MHLALayer
from .processor import adapter_of, layer_input, tokens_of_grid

Item = TypeVar("Item")

_CALLS = 4
"""Out of those that ``run`` makes, that weights are fitted on."""
_QUERIES = 1024
"""Queries of every head whose softmax weights are formed to fit λ and β; each costs N of them."""
_QUERIES_OF_BLOCK = 16
"""Queries of every block in every call that mixing matrices are fitted on."""
_POOLED_BIASES = torch.linspace(-2.0, 2.0, 17)
_LINEAR_LOG_WEIGHTS = torch.linspace(-3.0, 5.0, 17)
_FLOAT32 = 4
_MOST_BYTES = 16 * 2**30
"""Of the equations of one layer's mixing matrix, M³ numbers for every matrix."""


@torch.no_grad()
def calibrate_sparse(model: Any, run: Callable[[], object]) -> None:
    """Fit λ, and β where it is a parameter, of every head to the softmax attention that is replaced.

    ``run`` is called once with the patch switched off. Of a few of its calls, and some queries of each, those λ and β
    are taken that bring the output closest to softmax attention's. Nothing else of the patch changes: the lists are
    chosen by content at every call, and β as well unless ``fit_pooled_bias=False``.

    Args:
        model: a patched pipeline or transformer with ``sparse="content"``.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Raises:
        ValueError: if the model is not patched, is patched causally or has no sparse branch, or ``run`` did not reach
            every layer.
    """
    refuse_language(model, "calibrate_sparse()")
    handles = require_patched(model)
    layers = [layer for patched in handles.values() for layer in patched.layers.values()]
    refuse_causal((layer.config for layer in layers), "calibrate_sparse()")
    if all(layer.config.sparse == "none" for layer in layers):
        raise ValueError('The model has no sparse branch to calibrate; patch it with sparse="content".')
    if any(len(patched.running_pairs()) < len(patched.layers) for patched in handles.values()):
        raise ValueError("The patch is switched off in some layers; leave mhla_disabled(), or call change_mhla(model).")
    calls = record_unpatched(model, handles, run)
    for component, patched in handles.items():
        fit_weights(patched, spread_calls(calls[component]))


def fit_weights(patched: Patched, calls: list[TransformerCall]) -> None:
    """Set λ, and β where it is a parameter, of every head to what brings its output closest to softmax attention's."""
    layers = {name: layer for name, layer in patched.layers.items() if layer.linear_log_weight is not None}
    errors: dict[str, list[torch.Tensor]] = defaultdict(list)

    def watch(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def note(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = layer_input(attn, args, kwargs)
            with without_autocast(given.query.device):
                # other queries in every call: what fits some places within the blocks need not fit the others
                errors[name].append(_try_candidates(attn, layers[name], given, len(errors[name])))

        return note

    hooks = [patched.attentions[name].register_forward_pre_hook(watch(name), with_kwargs=True) for name in layers]
    with _removed_after(hooks), patched.disabled():
        repeat_calls(patched.transformer, calls)
    check_reached(layers, errors)
    for name, layer in layers.items():
        best = torch.stack(errors[name]).sum(dim=0).flatten(1).argmin(dim=1).cpu()
        count = len(_LINEAR_LOG_WEIGHTS)
        if layer.linear_log_weight is not None:
            layer.linear_log_weight.copy_(_LINEAR_LOG_WEIGHTS[best % count])
        if layer.pooled_bias is not None:
            layer.pooled_bias.copy_(_POOLED_BIASES[best // count])


def _try_candidates(attn: Any, layer: MHLALayer, given: LayerInput, shift: int) -> torch.Tensor:
    call = layer.call(given.in_float32())
    biases = torch.tensor([-torch.inf])
    if layer.pooled_bias is not None:
        biases = _POOLED_BIASES
    elif call.pooled_bias is not None:  # λ is fitted beside the β of this call
        biases = call.pooled_bias.mean(dim=0)[:, None]
    candidates = Candidates(biases, _LINEAR_LOG_WEIGHTS)
    return candidate_errors(call, layer.config.block_size, _QUERIES, shift, head_projections(attn), candidates)


def head_projections(attn: Any) -> torch.Tensor:
    """The output projection of every head as far as lengths go: (H, D, D), ‖W_h v‖ = ‖v @ projection‖.

    Read off what the projection does, since its weights may be quantised or have an adapter.
    """
    adapter, weight = adapter_of(attn), next(attn.parameters())
    heads, head_dim = adapter.heads(attn)
    dtype = weight.dtype if weight.is_floating_point() and weight.dtype.itemsize > 1 else torch.float32
    projection = adapter.output_projection(attn)
    if projection is None:  # a layer of the block projects the heads together with other things
        projection = torch.nn.Identity()
    channels = getattr(projection, "in_features", heads * head_dim)  # more, if it also takes those of a feed-forward
    unit = torch.eye(heads * head_dim, channels, dtype=dtype, device=weight.device)
    columns = (projection(unit) - projection(torch.zeros_like(unit[:1]))).float()
    return torch.linalg.qr(columns.unflatten(0, (heads, -1)).mT).R.mT


def spread_calls(calls: list[Item]) -> list[Item]:
    """Some calls, evenly spread over all."""
    count = min(len(calls), _CALLS)
    return [calls[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]


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
    handles = require_patched(model)
    refuse_causal((patched.config for patched in handles.values()), "calibrate_mixing()")
    for patched in handles.values():
        _check_mixing_can_be_fitted(patched)
    calls = record_unpatched(model, handles, run)
    for component, patched in handles.items():
        some = spread_calls(calls[component])
        _fit_mixing_of_layers(patched, some)
        # where extra tokens are attended to with softmax, the rest must weigh as it did beside them
        fit_weights(patched, some)


def _check_mixing_can_be_fitted(patched: Patched) -> None:
    own = patched.family.own_attention
    if own != "softmax":
        way_out = (
            "mixing_init='uniform' is the same as it" if own == "linear" else "the mixing matrices must be trained"
        )
        raise ValueError(f"The own attention of {type(patched.transformer).__name__} is {own}: {way_out}.")
    for layer in patched.layers.values():
        config = layer.config
        if config.sparse != "none" or not config.normalize or config.output_norm:
            raise ValueError(
                "calibrate_mixing() fits MHLA alone, sparse='none', normalize=True and output_norm=False; got "
                f"sparse={config.sparse!r}, normalize={config.normalize}, output_norm={config.output_norm}. "
                "calibrate_sparse() fits what goes with a sparse branch, calibrate_output_norm() a norm."
            )
        size = _FLOAT32 * layer.mixing[..., 0, 0].numel() * math.prod(config.blocks) ** 3
        if size > _MOST_BYTES:
            raise ValueError(
                f"blocks={config.blocks} are too many to fit: the equations of a layer would take {size / 2**30:.0f} "
                f"GiB, and at most {_MOST_BYTES // 2**30} are allowed. Fewer blocks, or one matrix for all heads "
                "(mixing_per_head=False), take less."
            )


def _fit_mixing_of_layers(patched: Patched, calls: list[TransformerCall]) -> None:
    pairs, layers = patched.running_pairs(), patched.layers
    processors = {name: attn.processor for name, (attn, _) in pairs.items()}
    before = {name: layers[name].mixing.clone() for name in pairs}
    with patched.pause():
        try:
            for attn, original in pairs.values():
                attn.set_processor(original)
            for name, (attn, _) in pairs.items():
                given, layer = _block_inputs(patched, attn, layers[name], calls), layers[name]
                check_reached([name], [name] if given else [])
                layer.mixing.copy_(fit_mixing(given, head_projections(attn), layer.mixing))
                layer.clip_mixing_()
                attn.set_processor(processors[name])
        except BaseException:
            for name in pairs:
                layers[name].mixing.copy_(before[name])
            raise
        finally:
            for name, (attn, _) in pairs.items():
                attn.set_processor(processors[name])


def _block_inputs(patched: Patched, attn: Any, layer: MHLALayer, calls: list[TransformerCall]) -> list[BlockInput]:
    """What one attention gets in some calls."""
    found: list[BlockInput] = []

    def note(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = layer.call(layer_input(attn, args, kwargs).in_float32())
        if call.blocks != layer.config.blocks:
            raise ValueError(
                f"The grid {call.grid} is cut into {call.blocks} blocks, the matrix is for {layer.config.blocks}; "
                "calibrate at a size with at least as many tokens along every axis."
            )
        found.append(BlockInput.of(call, _QUERIES_OF_BLOCK, len(found)))

    with _removed_after([attn.register_forward_pre_hook(note, with_kwargs=True)]):
        repeat_calls(patched.transformer, calls)
    return found


@torch.no_grad()
def calibrate_output_norm(model: Any, run: Callable[[], object]) -> None:
    """Set every output norm so that MHLA's output has the scale of the replaced attention's.

    ``run`` is called once with the patch switched off; the root mean square of every head channel that the original
    attention passes to its output projection, over all tokens and heads, becomes the weight of the output RMSNorm.

    Args:
        model: a patched pipeline or transformer whose configuration has ``output_norm=True``.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Raises:
        ValueError: if the model is not patched or has no output norm, or ``run`` did not reach every layer.
    """
    refuse_language(model, "calibrate_output_norm()")
    check_run(run)
    layers: dict[str, tuple[Any, MHLALayer]] = {
        f"{component}.{name}": (patched.attentions[name], layer)
        for component, patched in require_patched(model).items()
        for name, layer in patched.layers.items()
        if layer.output_norm is not None
    }
    if not layers:
        raise ValueError("The model has no output norm to calibrate; patch it with output_norm=True.")
    for patched in require_patched(model).values():
        refuse_step_cache(patched.transformer, "calibrate_output_norm()")
    squares: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, layer: MHLALayer) -> Callable[[torch.Tensor], None]:
        def note(of_heads: torch.Tensor) -> None:
            heads = of_heads.detach().float().unflatten(-1, (layer.heads, layer.head_dim)).flatten(0, -2)
            squares[name] = squares.get(name, torch.zeros_like(heads[0])) + heads.square().sum(dim=0)
            counts[name] = counts.get(name, 0) + len(heads)

        return note

    hooks = [hook for name, (attn, layer) in layers.items() for hook in _watch_heads(attn, watch(name, layer))]
    with _removed_after(hooks), mhla_disabled(model):
        run()
    check_reached(layers, counts)
    for name, (_, layer) in layers.items():
        if layer.output_norm is not None:
            layer.output_norm.copy_((squares[name] / counts[name]).sqrt())


def _watch_heads(attn: Any, note: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
    """Call ``note`` with the output of a patched self-attention's heads for the tokens of the grid: (B, N, H D)."""
    outputs: list[torch.Tensor] = []
    projection = adapter_of(attn).output_projection(attn)

    def look(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        of_heads = adapter_of(attn).heads_output(attn, outputs.pop() if outputs else returned)
        note(tokens_of_grid(attn, args, kwargs, of_heads))

    hooks = [attn.register_forward_hook(look, with_kwargs=True)]
    if projection is not None:
        hooks.append(projection.register_forward_pre_hook(lambda _, args: outputs.append(args[0])))
    return hooks


@contextmanager
def _removed_after(hooks: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_reached(layers: Collection[str], reached: Collection[str]) -> None:
    """Raise unless a run has reached all layers.

    Raises:
        ValueError: naming one that it has not.
    """
    missed = [name for name in layers if name not in reached]
    if missed:
        raise ValueError(f"run() did not reach {len(missed)} of {len(layers)} layers, for example {missed[0]}.")
