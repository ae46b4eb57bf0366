"""Turn exactness up and down in place, and spend it where an audit has found the largest error."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention.tile_scores import spend
from ..families import get_family
from .audit_result import Audit, LayerAudit
from .changing import Change, carry_out_change, change_mhla, make_change
from .exact_calibration import _fit_weights
from .finding import find_transformers, mhla_layers, require_layers
from .sensitivity import TransformerCall, measure_change
from .spending import Spending, active_steps, plan_spending, weights_after

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


def set_exact_share(model: Model, share: float) -> Model:
    """Attend to another share of all pairs of tiles exactly, in place.

    Calibrated tiles are chosen anew from the scores that were saved, of which there are those of the heaviest fifth of
    all pairs; a larger share is spread evenly over the rest. The share of before brings its lists back. At 1 the
    attention is softmax attention to rounding, without means and far field. Everything else stays as it is, β and λ
    too. It is :func:`change_mhla` with ``exact_share``; layers have new parameters afterwards.

    Args:
        model: patched pipeline or transformer with ``exact="calibrated"`` or ``"content"``.
        share: part of all pairs of tiles of the patched layers, in (0, 1].

    Returns:
        ``model``.

    Raises:
        ValueError: if the patch has no such tiles, or the share is not allowed. The model is unchanged then.
    """
    for layer in require_layers(model).values():
        if layer.config.exact not in ("calibrated", "content"):
            raise ValueError(
                f'exact={layer.config.exact!r} has no share to set; change_mhla(model, exact="content") gives softmax '
                "attention's patches one. Of SANA, whose own attention is linear, densify(model, audit, share) brings "
                "layers and steps back."
            )
    return change_mhla(model, exact_share=share)


def densify(model: Model, audit: Audit, share: float) -> Model:
    """Spend a budget of exactness where an audit has found the largest error, in place.

    The budget is a share of all pairs of tiles of the layers that the audit has seen, in all denoising steps. Out of it
    come whole first steps (``softmax_steps``) and whole layers (``layers``) that attend as before the patch, and for
    the rest lists of exact tiles, chosen by what leaving a pair out did in the audit and by how much its layer moves
    the output; as many of each as are expected to leave the least error. Tiles that are chosen by content become
    calibrated ones where these change the output less on the calls that the audit has kept. Where the own attention is
    linear, or there are no tiles, there are steps and layers alone. Each transformer of a pipeline spends on its own.
    At 1 the model attends as before the patch in all steps, and nothing of the patch is computed. β and λ are fitted to
    the new tiles as :func:`calibrate_exact_tiles` does it. A layer that gets its attention of before forgets what its
    patch has learned.

    Args:
        model: the pipeline or transformer that was audited.
        audit: what :func:`audit` found.
        share: part of all pairs in all steps, in (0, 1].

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched, the audit is of another one, or the share is not allowed. The model is
            unchanged then.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share={share!r} must be in (0, 1], a part of all pairs of tiles in all steps such as 0.1.")
    require_layers(model)
    transformers = {name: part for name, part in find_transformers(model).items() if mhla_layers(part)}
    found = {name: [layer for layer in audit.layers if layer.component == name] for name in transformers}
    for name, part in transformers.items():
        _check_audit(part, found[name])
    if share == 1:
        return change_mhla(model, softmax_steps=1.0)
    choices = {
        name: _changes(part, found[name], plan_spending(found[name], share, audit.knows_steps), len(audit.rests))
        for name, part in transformers.items()
    }
    for name, changes in choices.items():
        _carry_out_best(changes, audit.calls[name])
    return model


def _check_audit(transformer: nn.Module, layers: Sequence[LayerAudit]) -> None:
    attentions = get_family(transformer).self_attentions(transformer)
    fits = [
        layer.attention in attentions and layer.errors.shape[1] == attentions[layer.attention].heads for layer in layers
    ]
    if not layers or not all(fits):
        raise ValueError("The audit is of another model; audit(model, run) audits this one.")


def _changes(transformer: nn.Module, layers: Sequence[LayerAudit], spending: Spending, steps: int) -> list[Change]:
    """Ways to spend as planned, each with its lists of tiles: calibrated ones and, if there are, those by content."""
    names = list(get_family(transformer).self_attentions(transformer))
    some = layers[0].tiles
    others = [layer for index, layer in enumerate(layers) if index not in spending.whole]
    active = active_steps(layers)
    resting = (active[spending.steps - 1] + 1) / steps if spending.steps else 0.0
    settings = {"layers": [names.index(layer.attention) for layer in others], "softmax_steps": resting}
    if some is None:
        return [make_change(transformer, None, settings)]
    settings |= {"exact_tiles": some.counts}
    tiles = math.prod(some.counts)
    calibrated = make_change(transformer, None, {**settings, "exact": "calibrated", "exact_share": spending.share})
    _choose(calibrated, others, [layer.gain * weights_after(layer, active, spending.steps) for layer in others])
    if some.kind != "content":
        return [calibrated]
    by_content = max(1, math.floor(spending.share * tiles + 1e-9)) / tiles
    return [calibrated, make_change(transformer, None, {**settings, "exact": "content", "exact_share": by_content})]


def _choose(change: Change, layers: Sequence[LayerAudit], factors: Sequence[float]) -> None:
    """Give new layers their lists of exact tiles."""
    errors = [layer.tiles.pair_errors.sum(dim=0) for layer in layers if layer.tiles is not None]
    scores = [factor * found for factor, found in zip(factors, errors, strict=True)]
    largest = max(1e-30, *(float(score.max()) for score in scores))
    for layer, score, mask in zip(layers, scores, spend(scores, change.processor.config.share), strict=True):
        choice: Any = change.layers[layer.attention].exact
        device = choice.pairs.device
        choice.keep_scores((score / largest).to(device))
        choice.choose(mask.to(device))


@torch.no_grad()
def _carry_out_best(changes: Sequence[Change], calls: Sequence[TransformerCall]) -> None:
    """Carry changes of one transformer out one after another, fit β and λ, and stay with that which changes least."""
    measured = []
    for change in changes:
        carry_out_change(change, change.transformer)
        attentions = get_family(change.transformer).self_attentions(change.transformer)
        patched = {name: attentions[name] for name, layer in change.layers.items() if layer.exact is not None}
        if patched and change.processor.config.share < 1:
            _fit_weights(change.transformer, patched, list(calls))
        measured.append(measure_change(change.transformer, calls) if len(changes) > 1 else 0.0)
    best = changes[min(range(len(changes)), key=measured.__getitem__)]
    carry_out_change(best, best.transformer)
