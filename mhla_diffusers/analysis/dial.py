"""Change the density in place, and spend a compute budget where an audit found the largest error."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch

from ..patching.finding import find_transformers, refuse_causal, require_diffusion, require_layers, require_patched
from ..patching.patch import Change, change_mhla, plan_change
from .audit import DENSITIES, Audit, LayerAudit

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


def set_density(model: Model, density: float) -> Model:
    """Change the fraction of block pairs that the lists hold, in place.

    At 1 the attention equals softmax attention up to rounding, without pooled keys and linear branch. Everything else
    is unchanged, including λ and β. This is :func:`change_mhla` with ``density``, and keeps all parameters.

    Args:
        model: patched pipeline or transformer with ``sparse="content"``.
        density: fraction of all pairs of uniform blocks, in (0, 1]; every query block lists at least one.

    Returns:
        ``model``.

    Raises:
        ValueError: if the patch is causal, has no such lists or is disabled in all steps, or the density is not
            allowed. The model is then unchanged.
    """
    if not isinstance(density, int | float) or isinstance(density, bool):
        raise ValueError(f"density={density!r} must be a fraction of all pairs of blocks in (0, 1], such as 0.05.")
    find_transformers(model)
    _check_order(model, "set_density()")
    for layer in require_layers(model).values():
        if layer.config.sparse != "content":
            raise ValueError(
                f'sparse={layer.config.sparse!r} has no density to set; change_mhla(model, sparse="content") gives '
                "softmax attention's patches one. Of SANA, whose own attention is linear, densify(model, audit, "
                "density) brings layers and steps back."
            )
        if layer.config.softmax_steps == 1.0 and isinstance(layer.config.softmax_steps, float):
            raise ValueError(
                "softmax_steps=1.0 disables the patch in every step, so a density has no effect; "
                "change_mhla(model, softmax_steps=0) enables it in all steps."
            )
    return change_mhla(model, density=density)


def densify(model: Model, audit: Audit, density: float) -> Model:
    """Spend a budget where an audit found the largest error, in place.

    The budget is a fraction of all token pairs of the audited layers in all denoising steps. It pays for whole first
    steps (``softmax_steps``) and whole layers (``layers``) that use the original attention, and otherwise for the
    density of the content-chosen lists, split to leave the least expected error. If the original attention is linear,
    or there is no sparse branch, only steps and layers are chosen. Each transformer of a pipeline has its own budget.
    At 1 the model uses its original attention in all steps, and nothing of the patch is computed. λ and β are
    unchanged; :func:`calibrate_sparse` fits them again. A layer that gets its original attention back loses what its
    patch has learned.

    Args:
        model: the pipeline or transformer that was audited.
        audit: what :func:`audit` found.
        density: fraction of all pairs in all steps, in (0, 1].

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched or patched causally, the audit is of another one, or the density is not
            allowed. The model is then unchanged.
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} must be in (0, 1], a fraction of all pairs in all steps such as 0.1.")
    if not isinstance(audit, Audit):
        raise ValueError(f"audit={audit!r} must be the result of audit(model, run).")
    _check_order(model, "densify()")
    handles = {name: patched for name, patched in require_patched(model).items() if patched.layers}
    found = {name: [layer for layer in audit.layers if layer.component == name] for name in handles}
    for name, patched in handles.items():
        attentions = patched.attentions
        fits = [
            layer.attention in attentions and layer.errors.shape[1] == attentions[layer.attention].heads
            for layer in found[name]
        ]
        if not fits or not all(fits):
            raise ValueError("The audit is of another model; audit(model, run) audits this one.")
    if density == 1:
        return change_mhla(model, softmax_steps=1.0)
    changes: list[Change] = []
    for name, patched in handles.items():
        layers = found[name]
        spending = plan_spending(layers, density, audit.knows_steps)
        names, active = list(patched.attentions), active_steps(layers)
        settings: dict[str, Any] = {
            "layers": [names.index(layer.attention) for i, layer in enumerate(layers) if i not in spending.whole],
            "softmax_steps": (active[spending.steps - 1] + 1) / len(audit.rests) if spending.steps else 0,
        }
        if spending.density:
            settings["density"] = spending.density
        changes.append(plan_change(patched, None, settings))
    for change in changes:
        change.carry_out(model)
    return model


def _check_order(model: Any, what: str) -> None:
    require_diffusion(model, what)
    refuse_causal((layer.config for layer in require_layers(model).values()), what)


@dataclass(frozen=True)
class Spending:
    """How the budget of one transformer is spent."""

    steps: int
    """Number of first steps of the transformer in which all layers use the original attention."""
    whole: frozenset[int]
    """Layers of the audit that use the original attention in every step."""
    density: float
    """Density of the other layers in the other steps; 0 without lists."""
    left: float
    """Expected remaining squared error."""


def plan_spending(layers: Sequence[LayerAudit], budget: float, knows_steps: bool) -> Spending:
    """Find how to spend a budget for the least expected error.

    A step or a layer costs all its pairs; the remaining budget goes to the lists of the others. Assumes that a layer's
    squared error is proportional to the square of the softmax weight that its lists leave out.

    Args:
        layers: of one transformer, all with lists or all without.
        budget: fraction of all pairs of these layers in all steps, in (0, 1).
        knows_steps: whether the budget can be spent on single steps.
    """
    return min(_candidates(layers, budget, knows_steps), key=lambda spending: spending.left)


def active_steps(layers: Sequence[LayerAudit]) -> list[int]:
    """Steps in which a transformer runs; two transformers share the steps."""
    squares = torch.stack([layer.squares.sum(dim=1) for layer in layers]).sum(dim=0)
    return squares.nonzero().flatten().tolist()


def _candidates(layers: Sequence[LayerAudit], budget: float, knows_steps: bool) -> Iterator[Spending]:
    steps, count = active_steps(layers), len(layers)
    has_lists = all(layer.density is not None for layer in layers)
    for spent in range(len(steps) if knows_steps else 1):
        rest = budget - spent / len(steps)
        if rest < 0:
            return
        by_step = [layer.errors.sum(dim=1) for layer in layers]
        # the fraction of a layer's error in the steps after those
        after = [float(some[steps][spent:].sum() / some.sum().clamp_min(1e-30)) for some in by_step]
        errors = [layer.moves * part for layer, part in zip(layers, after, strict=True)]
        order = sorted(range(count), key=errors.__getitem__, reverse=True)
        for whole in range(count):
            others = order[whole:]
            density = (rest / (1 - spent / len(steps)) - whole / count) * count / len(others)
            if density < -1e-9:
                break
            if not has_lists:
                yield Spending(spent, frozenset(order[:whole]), 0.0, sum(errors[index] for index in others))
            elif density > 0:
                left = sum(errors[index] * _left_at(layers[index], density) for index in others)
                yield Spending(spent, frozenset(order[:whole]), min(density, 1.0), left)


def _left_at(layer: LayerAudit, density: float) -> float:
    """Fraction of a layer's squared error that remains at another density."""
    known = [(0.0, 0.0), *zip(DENSITIES, layer.mass_at, strict=True)]
    held = 1.0
    for (low, mass), (high, more) in pairwise(known):
        if low <= density <= high:
            held = mass + (more - mass) * (density - low) / (high - low)
            break
    return (1 - held) ** 2 / max(1 - (layer.mass_kept or 0.0), 1e-6) ** 2
