"""Turn exactness up and down in place, and spend it where an audit has found the largest error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..attention.tile_scores import spend
from ..families import get_family
from ..patching.changing import Change, as_it_is, carry_out_change, change_mhla, make_change
from ..patching.exact_calibration import FAR_LOG_WEIGHTS, fit_weights
from ..patching.finding import find_transformers, mhla_layers, refuse_causal, require_diffusion, require_layers
from ..patching.sensitivity import TransformerCall, measure_change
from .audit_result import Audit, LayerAudit
from .spending import Spending, active_steps, plan_spending, weights_after

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""

_NO_FAR_FIELD = -60.0
"""Of log λ: nothing beside any softmax weights, and yet a positive number in float32."""


def set_density(model: Model, share: float) -> Model:
    """Attend to another share of all pairs of tiles exactly, in place.

    Calibrated tiles are chosen anew from the scores that were saved, of which there are those of the heaviest fifth of
    all pairs; a larger share is spread evenly over the rest. At 1 the attention is softmax attention to rounding,
    without means and far field. Everything else stays as it is, β and λ too. It is :func:`change_mhla` with
    ``density``; layers have new parameters afterwards.

    Args:
        model: patched pipeline or transformer with ``sparse="calibrated"`` or ``"content"``.
        share: part of all pairs of tiles of the patched layers, in (0, 1].

    Returns:
        ``model``.

    Raises:
        ValueError: if the patch is causal, has no such tiles or rests in all steps, or the share is not allowed. The
            model is unchanged then.
    """
    if not isinstance(share, int | float) or isinstance(share, bool):
        raise ValueError(f"share={share!r} must be a part of all pairs of tiles, a number in (0, 1] such as 0.05.")
    find_transformers(model)
    _check_order(model, "set_density()")
    for layer in require_layers(model).values():
        if layer.config.sparse not in ("calibrated", "content"):
            raise ValueError(
                f'sparse={layer.config.sparse!r} has no share to set; change_mhla(model, sparse="content") gives softmax '
                "attention's patches one. Of SANA, whose own attention is linear, densify(model, audit, share) brings "
                "layers and steps back."
            )
        if layer.config.softmax_steps == 1.0 and isinstance(layer.config.softmax_steps, float):
            raise ValueError(
                "softmax_steps=1.0 leaves the patch no step in which a share would matter; "
                "change_mhla(model, softmax_steps=0) gives them back."
            )
    return change_mhla(model, density=share)


def densify(model: Model, audit: Audit, share: float) -> Model:
    """Spend a budget of exactness where an audit has found the largest error, in place.

    The budget is a share of all pairs of tiles of the layers that the audit has seen, in all denoising steps. Out of it
    come whole first steps (``softmax_steps``) and whole layers (``layers``) that attend as before the patch, and for
    the rest lists of exact tiles, chosen by what leaving a pair out did in the audit and by how much its layer moves
    the output; as many of each as are expected to leave the least error. Tiles that are chosen by content become
    calibrated ones where these change the output less on the calls that the audit has kept. Where the own attention is
    linear, or there are no tiles, there are steps and layers alone. Each transformer of a pipeline spends on its own.
    At 1 the model attends as before the patch in all steps, and nothing of the patch is computed. β and λ are fitted to
    the new tiles as :func:`calibrate_sparse` does it, but that heads can be left without a far field, which
    training would not bring back. A layer that gets its attention of before forgets what its patch has learned.

    Args:
        model: the pipeline or transformer that was audited.
        audit: what :func:`audit` found.
        share: part of all pairs in all steps, in (0, 1].

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched or patched causally, the audit is of another one, or the share is not
            allowed. The model is unchanged then.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share={share!r} must be in (0, 1], a part of all pairs of tiles in all steps such as 0.1.")
    if not isinstance(audit, Audit):
        raise ValueError(f"audit={audit!r} must be what audit(model, run) gives.")
    _check_order(model, "densify()")
    transformers = {name: part for name, part in find_transformers(model).items() if mhla_layers(part)}
    found = {name: [layer for layer in audit.layers if layer.component == name] for name in transformers}
    for name, part in transformers.items():
        _check_audit(part, found[name])
    if share == 1:
        return change_mhla(model, softmax_steps=1.0)
    ways = [
        _Way.plan(part, found[name], plan_spending(found[name], share, audit.knows_steps), len(audit.rests))
        for name, part in transformers.items()
    ]
    before = [as_it_is(part) for part in transformers.values()]
    try:
        for name, way in zip(transformers, ways, strict=True):
            _carry_out(way, audit.calls[name], audit.halves[name])
    except BaseException:  # no memory, or interrupted
        for change in before:
            carry_out_change(change, model)
        raise
    return model


def _check_order(model: Any, what: str) -> None:
    require_diffusion(model, what)
    refuse_causal((layer.config for layer in require_layers(model).values()), what)


def _check_audit(transformer: nn.Module, layers: Sequence[LayerAudit]) -> None:
    attentions = get_family(transformer).self_attentions(transformer)
    fits = [
        layer.attention in attentions and layer.errors.shape[1] == attentions[layer.attention].heads for layer in layers
    ]
    if not layers or not all(fits):
        raise ValueError("The audit is of another model; audit(model, run) audits this one.")


@dataclass(frozen=True)
class _Way:
    """A checked way to spend the budget of one transformer."""

    transformer: nn.Module
    layers: list[LayerAudit]
    """Those that stay patched."""
    factors: list[float]
    """What an error of each counts, in the steps that are left."""
    change: Change
    """With calibrated tiles, whose lists are to be chosen, if there are tiles."""
    by_content: Change | None
    """With tiles by content instead, where they were so before."""

    @classmethod
    def plan(cls, transformer: nn.Module, layers: Sequence[LayerAudit], spending: Spending, steps: int) -> "_Way":
        names, active = list(get_family(transformer).self_attentions(transformer)), active_steps(layers)
        others = [layer for index, layer in enumerate(layers) if index not in spending.whole]
        factors = [layer.gain * weights_after(layer, active, spending.steps) for layer in others]
        settings: dict[str, Any] = {
            "layers": [names.index(layer.attention) for layer in others],
            "softmax_steps": (active[spending.steps - 1] + 1) / steps if spending.steps else 0,
        }
        some = layers[0].tiles
        if some is None:
            return cls(transformer, others, factors, make_change(transformer, None, settings), None)
        if isinstance(some.counts, int):  # along the curve, where every list is equally long
            rule = settings | {"density": spending.share}
            return cls(transformer, others, factors, make_change(transformer, None, rule), None)
        lists = {"sparse": "calibrated", "density": spending.share, "exact_tiles": some.counts}
        calibrated, by_content = make_change(transformer, None, settings | lists), None
        if some.kind == "content":
            tiles = math.prod(some.counts)
            length = max(1, math.floor(spending.share * tiles + 1e-9))  # of every list, within the budget
            rule = {"sparse": "content", "density": length / tiles}
            by_content = make_change(transformer, None, settings | rule)
        return cls(transformer, others, factors, calibrated, by_content)

    def choose(self, halves: Sequence[int]) -> None:
        """Choose the lists of calibrated tiles by what some halves of the run have shown."""
        errors = [layer.tiles.pair_errors[list(halves)].sum(dim=0) for layer in self.layers if layer.tiles is not None]
        if not errors or self.change.processor.config.sparse != "calibrated":
            return
        scores = [factor * found for factor, found in zip(self.factors, errors, strict=True)]
        largest, share = max(1e-30, *(float(score.max()) for score in scores)), self.change.processor.config.share
        for layer, score, mask in zip(self.layers, scores, spend(scores, share), strict=True):
            choice: Any = self.change.layers[layer.attention].exact
            choice.keep_scores((score / largest).to(choice.pairs.device))
            choice.choose(mask.to(choice.pairs.device))


@torch.no_grad()
def _carry_out(way: _Way, calls: Sequence[TransformerCall], halves: Sequence[int]) -> None:
    """Change a transformer in the better way of those that there are, and fit β and λ."""
    if way.by_content is not None:
        _put_on(way.by_content, calls)
        by_content = measure_change(way.transformer, calls)
        if _judge_lists(way, calls, halves) >= by_content:
            carry_out_change(way.by_content, way.transformer)
            return
    way.choose([0, 1])
    _put_on(way.change, calls)


def _judge_lists(way: _Way, calls: Sequence[TransformerCall], halves: Sequence[int]) -> float:
    """How much calibrated tiles change the output on calls of the half of the run that they were not chosen on."""
    changes = 0.0
    for half in set(halves):
        judged = [call for call, own in zip(calls, halves, strict=True) if own == half]
        way.choose([1 - half] if len(set(halves)) > 1 else [half])
        _put_on(way.change, calls)
        changes += measure_change(way.transformer, judged) * len(judged)
    return changes / len(calls)


def _put_on(change: Change, calls: Sequence[TransformerCall]) -> None:
    """Change a transformer, and fit β and λ, without which no way shows what it is worth."""
    carry_out_change(change, change.transformer)
    attentions = get_family(change.transformer).self_attentions(change.transformer)
    patched = {name: attentions[name] for name, layer in change.layers.items() if layer.sparse is not None}
    if patched:
        fit_weights(change.transformer, patched, list(calls))
    for layer in change.layers.values():
        if layer.linear_log_weight is not None:
            _leave_out_linear_branchs(layer.linear_log_weight)


def _leave_out_linear_branchs(log_weight: torch.Tensor) -> None:
    """Give heads that are best with the least far field none, which is better still where most pairs are exact.

    A calibration leaves it to them, since training could not bring it back. It does not fade by itself: the sum of
    softmax weights that it stands beside depends on how large a query's logits are.
    """
    log_weight[log_weight <= float(FAR_LOG_WEIGHTS.min())] = _NO_FAR_FIELD
