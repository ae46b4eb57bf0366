"""Fit how much the linear branch and the pooled keys weigh beside the listed blocks."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention.calibrate import Candidates, candidate_errors
from ..attention.precision import without_autocast
from .attended import Attended
from .calibration import check_reached, patched_attentions, run_unpatched
from .finding import find_transformers, mhla_layers, refuse_causal, refuse_language
from .layer import MHLALayer
from .processor import MHLAProcessor, adapter_of, attended
from .removal import mhla_disabled
from .sensitivity import TransformerCall, record_calls, repeat_calls

Item = TypeVar("Item")

_QUERIES = 1024
"""Queries of every head whose softmax weights are formed; each costs N of them."""
_CALLS = 4
"""Out of those that ``run`` makes, that weights are fitted on."""
_POOLED_BIASES = torch.linspace(-2.0, 2.0, 17)
_LINEAR_LOG_WEIGHTS = torch.linspace(-3.0, 5.0, 17)


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
    layers = mhla_layers(model)
    refuse_causal((layer.config for layer in layers.values()), "calibrate_sparse()")
    if all(layer.config.sparse == "none" for layer in layers.values()):
        raise ValueError('The model has no sparse branch to calibrate; patch it with sparse="content".')
    attentions = patched_attentions(model, "linear_log_weight")
    if not all(isinstance(attn.processor, MHLAProcessor) for attn in attentions.values()):
        raise ValueError("The patch is switched off in some layers; leave mhla_disabled(), or call change_mhla(model).")
    transformers = find_transformers(model)
    with mhla_disabled(model):
        calls = record_calls(transformers, run)
    for component, transformer in transformers.items():
        prefix = f"{component}."
        here = {name.removeprefix(prefix): attn for name, attn in attentions.items() if name.startswith(prefix)}
        fit_weights(transformer, here, spread_calls(calls[component]))


def head_projections(attn: Any) -> torch.Tensor:
    """The output projection of every head as far as lengths go: (H, D, D), ‖W_h v‖ = ‖v @ projection‖.

    Read off what the projection does, since its weights may be quantised or have an adapter.
    """
    adapter, weight = adapter_of(attn), next(attn.parameters())
    heads, head_dim = adapter.heads(attn)
    dtype = weight.dtype if weight.is_floating_point() and weight.dtype.itemsize > 1 else torch.float32
    unit = torch.eye(heads * head_dim, dtype=dtype, device=weight.device)
    projection = adapter.output_projection(attn)
    if projection is None:  # a layer of the block projects the heads together with other things
        projection = torch.nn.Identity()
    columns = (projection(unit) - projection(torch.zeros_like(unit[:1]))).float()
    return torch.linalg.qr(columns.unflatten(0, (heads, -1)).mT).R.mT


def spread_calls(calls: list[Item]) -> list[Item]:
    """Some calls, evenly spread over all."""
    count = min(len(calls), _CALLS)
    return [calls[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]


def fit_weights(transformer: nn.Module, attentions: Mapping[str, Any], calls: list[TransformerCall]) -> None:
    """Set λ, and β where it is a parameter, of every head to what brings its output closest to softmax attention's."""
    open_ones = {name: attn for name, attn in attentions.items() if attn.mhla.linear_log_weight is not None}
    errors: dict[str, list[torch.Tensor]] = defaultdict(list)

    def watch(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def note(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = attended(attn, args, kwargs)
            with without_autocast(given.query.device):
                # other queries in every call: what fits some places within the blocks need not fit the others
                errors[name].append(_try_candidates(attn, given, len(errors[name])))

        return note

    handles = [attn.register_forward_pre_hook(watch(name), with_kwargs=True) for name, attn in open_ones.items()]
    run_unpatched(transformer, partial(repeat_calls, transformer, calls), handles)
    check_reached(open_ones, errors)
    for name, attn in open_ones.items():
        best = torch.stack(errors[name]).sum(dim=0).flatten(1).argmin(dim=1).cpu()
        count = len(_LINEAR_LOG_WEIGHTS)
        attn.mhla.linear_log_weight.copy_(_LINEAR_LOG_WEIGHTS[best % count])
        if attn.mhla.pooled_bias is not None:
            attn.mhla.pooled_bias.copy_(_POOLED_BIASES[best // count])


def _try_candidates(attn: Any, given: Attended, shift: int) -> torch.Tensor:
    layer: MHLALayer = attn.mhla
    call = layer.call(given.in_float32())
    biases = torch.tensor([-torch.inf])
    if layer.pooled_bias is not None:
        biases = _POOLED_BIASES
    elif call.pooled_bias is not None:  # λ is fitted beside the β of this call
        biases = call.pooled_bias.mean(dim=0)[:, None]
    candidates = Candidates(biases, _LINEAR_LOG_WEIGHTS)
    return candidate_errors(call, layer.config.block_size, _QUERIES, shift, head_projections(attn), candidates)
