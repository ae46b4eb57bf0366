"""Find out which tiles every head needs exactly, and how much the means and the far field should weigh beside them."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention.eager import eager_attention, without_autocast
from ..attention.merge import linear_branch
from ..attention.tile_errors import Candidates, TiledInput, candidate_errors, pair_errors
from ..attention.tile_scores import spend
from ..attention.tiles import Cut, in_tiles, square_tiles, tokens_of_tiles
from ..reporting import text_table
from .attended import Attended
from .calibration import check_reached, patched_attentions, run_unpatched
from .finding import find_transformers, mhla_layers, refuse_causal, refuse_language
from .layer import MHLALayer
from .processor import MHLAProcessor, attended, form_of
from .removal import mhla_disabled
from .sensitivity import TransformerCall, measure_sensitivity, patched_pairs, record_calls, repeat_calls
from .tile_choice import TileChoice

Item = TypeVar("Item")

QUERIES = 8
"""Queries of every tile whose softmax weights are formed; each costs N of them."""
_FITTING_QUERIES = 4
"""Queries of every tile that β and λ are fitted on."""
_FITTING_CALLS = 4
"""Calls, out of those that ``run`` makes, that weights of layers and β and λ are fitted on."""
_MEAN_BIASES = torch.linspace(-2.0, 2.0, 17)
FAR_LOG_WEIGHTS = torch.linspace(-3.0, 5.0, 17)


@dataclass(frozen=True)
class LayerCalibration:
    """What calibration found for one self-attention."""

    name: str
    share: float
    """Part of its pairs of tiles that is exact."""
    mass: float
    """Part of softmax attention's weight that these pairs hold, averaged over heads and queries."""
    error: float
    """Expected relative error of the attention's output, ‖o − softmax‖ / ‖softmax‖."""


class Calibration(list[LayerCalibration]):
    """The layers of a model; printed, it is a table."""

    def __str__(self) -> str:
        rows = [(found.name, f"{found.share:.1%}", f"{found.mass:.1%}", f"{found.error:.1%}") for found in self]
        return text_table(("layer", "exact pairs", "weight that they hold", "expected error"), rows)


@torch.no_grad()
def calibrate_sparse(model: Any, run: Callable[[], object]) -> Calibration:
    """Choose the exact tiles of every head, layer by layer, and fit β and λ to the attention that is replaced.

    ``run`` is called once with the patch switched off. On some queries of every tile it is measured what leaving each
    pair of tiles inexact does to the output (:mod:`mhla_diffusers.attention.tile_errors`); a layer counts by how much
    its replacement alone moves the transformer's output. The budget of the configuration's ``density`` goes to the
    pairs of all heads and layers of a transformer where it is worth most, each query tile getting at least half as many
    as the average and at most twice as many. Then β and λ of every head are those that bring the output closest to
    softmax attention's. With ``sparse="own"`` and ``"content"`` only the latter is done.

    Args:
        model: a patched pipeline or transformer with exact tiles.
        run: runs the model on typical inputs, for example ``lambda: pipe("a cat", num_inference_steps=4)``.

    Returns:
        What the chosen pairs hold and what error is to be expected, for every layer with calibrated tiles; print it.

    Raises:
        ValueError: if the model is not patched, is patched causally or has no exact tiles, or ``run`` did not reach
            every layer.
    """
    refuse_language(model, "calibrate_sparse()")
    refuse_causal((layer.config for layer in mhla_layers(model).values()), "calibrate_sparse()")
    layers = patched_attentions(model, "exact")
    if not layers:
        raise ValueError(
            'The model has no exact tiles to calibrate; patch it with sparse="calibrated", "content" or "own".'
        )
    if not all(isinstance(attn.processor, MHLAProcessor) for attn in layers.values()):
        raise ValueError("The patch is switched off in some layers; leave mhla_disabled(), or call change_mhla(model).")
    transformers = find_transformers(model)
    measured, calls = measure_tiles(model, run)
    found = Calibration()
    for component, transformer in transformers.items():
        some = spread_calls(calls[component])
        prefix = f"{component}."
        attentions = {name.removeprefix(prefix): attn for name, attn in layers.items() if name.startswith(prefix)}
        here = {name.removeprefix(prefix): m for name, m in measured.items() if name.startswith(prefix)}
        if here:
            choices: dict[str, TileChoice] = {name: attentions[name].mhla.exact for name in here}
            _choose(transformer, choices, here, some)
            shown = prefix if len(transformers) > 1 else ""
            found.extend(_report(shown + name, here[name], choice.mask) for name, choice in choices.items())
        fit_weights(transformer, attentions, some)
    return found


@dataclass
class TileMeasurement:
    """Of one self-attention: sums over the calls of a run, see :func:`pair_errors`."""

    errors: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """(H, T, T)."""
    masses: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """(H, T, T)."""
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """(H,)."""
    calls: int = 0


def measure_tiles(
    model: Any, run: Callable[[], object]
) -> tuple[dict[str, TileMeasurement], dict[str, list[TransformerCall]]]:
    """Run with the patch switched off, and measure every pair of tiles of every layer with calibrated tiles.

    Returns:
        Name of the attention, with the component's name before it → what was measured; and the calls of every
        transformer.

    Raises:
        ValueError: if ``run`` did not reach every layer.
    """
    layers = patched_attentions(model, "exact")
    layers = {name: attn for name, attn in layers.items() if attn.mhla.config.sparse == "calibrated"}
    measured = {name: TileMeasurement() for name in layers}
    handles = [
        attn.register_forward_pre_hook(_measuring(measured[name]), with_kwargs=True) for name, attn in layers.items()
    ]
    with mhla_disabled(model):
        try:
            calls = record_calls(find_transformers(model), run)
        finally:
            for handle in handles:
                handle.remove()
    check_reached(layers, [name for name, found in measured.items() if found.calls])
    return measured, calls


def _measuring(measured: TileMeasurement) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    def note(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = attended(attn, args, kwargs)
        with without_autocast(found.query.device):  # errors are measured in float32, whatever the model runs in
            given = tiled_input(attn, found)
            samples = given.samples(QUERIES, measured.calls)
            errors, masses, squares = pair_errors(given, samples, head_projections(attn), attn.mhla.config.pooled)
        measured.errors = measured.errors.to(errors.device) + errors
        measured.masses = measured.masses.to(errors.device) + masses
        measured.squares = measured.squares.to(errors.device) + squares
        measured.calls += 1

    return note


def tiled_input(attn: Any, given: Attended) -> TiledInput:
    """What a patched self-attention with exact tiles attends with, tile by tile."""
    here, counts = given.of_grid().in_float32().turned(), _tile_counts(attn, given.grid)
    return TiledInput.of(
        here.query, here.key, here.value, here.grid, counts, here.key_mask, given.in_float32().others()
    )


def head_projections(attn: Any) -> torch.Tensor:
    """The output projection of every head as far as lengths go: (H, D, D), ‖W_h v‖ = ‖v @ projection‖.

    Read off what the projection does, since its weights may be quantised or have an adapter.
    """
    form, weight = form_of(attn), next(attn.parameters())
    heads, head_dim = form.heads(attn)
    dtype = weight.dtype if weight.is_floating_point() and weight.dtype.itemsize > 1 else torch.float32
    unit = torch.eye(heads * head_dim, dtype=dtype, device=weight.device)
    projection = form.output_projection(attn)
    if projection is None:  # a layer of the block projects the heads together with other things
        projection = torch.nn.Identity()
    columns = (projection(unit) - projection(torch.zeros_like(unit[:1]))).float()
    return torch.linalg.qr(columns.unflatten(0, (heads, -1)).mT).R.mT


def spread_calls(calls: list[Item]) -> list[Item]:
    """Some calls, or what belongs to them, evenly spread over all."""
    count = min(len(calls), _FITTING_CALLS)
    return [calls[(2 * index + 1) * len(calls) // (2 * count)] for index in range(count)]


def _choose(
    transformer: nn.Module,
    choices: Mapping[str, TileChoice],
    measured: Mapping[str, TileMeasurement],
    calls: list[TransformerCall],
) -> None:
    """Spend the budget of a transformer's layers."""
    share = next(iter(choices.values())).config.share
    # to find out how much an error of each layer matters, every layer has its own share of the budget at first
    left = {}
    for name, choice in choices.items():
        (mask,) = spend([measured[name].errors], share)
        choice.choose(mask)
        left[name] = float((measured[name].errors * ~mask).sum()) / measured[name].calls
    pairs = {name: pair for name, pair in patched_pairs(transformer).items() if name in choices}
    moved = measure_sensitivity(transformer, pairs, calls)
    scores = [found.errors * (moved[name] / max(left[name], 1e-30)) for name, found in measured.items()]
    largest = max(1e-30, *(float(score.max()) for score in scores))
    for choice, score, mask in zip(choices.values(), scores, spend(scores, share), strict=True):
        choice.keep_scores(score / largest)
        choice.choose(mask)


def _report(name: str, found: TileMeasurement, mask: torch.Tensor) -> LayerCalibration:
    # extra tokens hold the rest of a query's weights, and are exact
    mass = 1 - float((found.masses * ~mask).sum(dim=-1).mean()) / found.calls
    tiles = mask.shape[-1]
    # every head's error passes through its own part of the projection; their squares add up where they are independent
    error = float((found.errors * ~mask).sum() / tiles / found.squares.sum()) ** 0.5
    return LayerCalibration(name, float(mask.float().mean()), mass, error)


def fit_weights(transformer: nn.Module, attentions: Mapping[str, Any], calls: list[TransformerCall]) -> None:
    """Set β and λ of every head to what brings its output closest to softmax attention's."""
    open_ones = {name: attn for name, attn in attentions.items() if attn.mhla.linear_log_weight is not None}
    errors: dict[str, list[torch.Tensor]] = defaultdict(list)

    def watch(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def note(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # other queries in every call: what fits some places within the tiles need not fit the others
            given = attended(attn, args, kwargs)
            with without_autocast(given.query.device):
                errors[name].append(_try_candidates(attn, given, len(errors[name])))

        return note

    handles = [attn.register_forward_pre_hook(watch(name), with_kwargs=True) for name, attn in open_ones.items()]
    run_unpatched(transformer, partial(repeat_calls, transformer, calls), handles)
    check_reached(open_ones, errors)
    for name, attn in open_ones.items():
        candidates = _candidates(attn.mhla)
        best = torch.stack(errors[name]).sum(dim=0).flatten(1).argmin(dim=1).cpu()
        count = len(candidates.far_log_weight)
        attn.mhla.linear_log_weight.copy_(candidates.far_log_weight[best % count])
        if attn.mhla.pooled_bias is not None:
            attn.mhla.pooled_bias.copy_(candidates.pooled_bias[best // count])


def _candidates(layer: MHLALayer) -> Candidates:
    return Candidates(_MEAN_BIASES if layer.pooled_bias is not None else torch.tensor([-torch.inf]), FAR_LOG_WEIGHTS)


def _try_candidates(attn: Any, given: Attended, shift: int) -> torch.Tensor:
    layer, tiled = attn.mhla, tiled_input(attn, given)
    call = layer.call(given.in_float32())
    far, normaliser = eager_attention(linear_branch(call))
    tokens = tokens_of_tiles(given.grid, _tile_counts(attn, given.grid))[0].to(far.device)
    far_in_tiles = in_tiles(far, tokens), in_tiles(normaliser.log(), tokens).squeeze(-1)
    samples, candidates = tiled.samples(_FITTING_QUERIES, shift), _candidates(layer)
    if layer.config.fits_pooled_bias and call.pooled_bias is not None:  # λ is fitted beside the β of this call
        candidates = replace(candidates, pooled_bias=call.pooled_bias.mean(dim=0)[:, None])
    none = torch.zeros(1, layer.heads, len(tokens), len(tokens), dtype=torch.bool, device=far.device)
    mask = none if call.lists is None else call.lists.mask()
    return candidate_errors(tiled, samples, head_projections(attn), mask, far_in_tiles, candidates)


def _tile_counts(attn: Any, grid: tuple[int, ...]) -> Cut:
    """Of exact tiles; without them, tiles of which some queries are looked at."""
    choice: TileChoice | None = attn.mhla.sparse
    return choice.counts(grid) if choice is not None else square_tiles(grid)
