"""Turn the density up and down in place, and spend a budget where an audit has found the largest error."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from ..families import get_family
from ..patching.changing import Change, carry_out_change, change_mhla, make_change
from ..patching.finding import find_transformers, mhla_layers, refuse_causal, require_diffusion, require_layers
from .audit_result import Audit, LayerAudit
from .spending import active_steps, plan_spending

Model = TypeVar("Model")
"""A diffusers pipeline or a transformer."""


def set_density(model: Model, density: float) -> Model:
    """List another part of all pairs of blocks, in place.

    At 1 the attention is softmax attention to rounding, without pooled keys and linear branch. Everything else stays as
    it is, λ and β too. It is :func:`change_mhla` with ``density``; layers have new parameters afterwards.

    Args:
        model: patched pipeline or transformer with ``sparse="content"``.
        density: part of all pairs of uniform blocks, in (0, 1]; every query block lists at least one.

    Returns:
        ``model``.

    Raises:
        ValueError: if the patch is causal, has no such lists or is off in all steps, or the density is not allowed. The
            model is unchanged then.
    """
    if not isinstance(density, int | float) or isinstance(density, bool):
        raise ValueError(f"density={density!r} must be a part of all pairs of blocks, a number in (0, 1] such as 0.05.")
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
                "softmax_steps=1.0 leaves the patch no step in which a density would matter; "
                "change_mhla(model, softmax_steps=0) gives them back."
            )
    return change_mhla(model, density=density)


def densify(model: Model, audit: Audit, density: float) -> Model:
    """Spend a budget where an audit has found the largest error, in place.

    The budget is a part of all pairs of tokens of the layers that the audit has seen, in all denoising steps. Out of it
    come whole first steps (``softmax_steps``) and whole layers (``layers``) that attend as before the patch, and for
    the rest the density of the lists that are chosen by content; as many of each as are expected to leave the least
    error. Where the own attention is linear, or there is no sparse branch, there are steps and layers alone. Each
    transformer of a pipeline spends on its own. At 1 the model attends as before the patch in all steps, and nothing of
    the patch is computed. λ and β stay as they are; :func:`calibrate_sparse` fits them anew. A layer that gets its
    attention of before forgets what its patch has learned.

    Args:
        model: the pipeline or transformer that was audited.
        audit: what :func:`audit` found.
        density: part of all pairs in all steps, in (0, 1].

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not patched or patched causally, the audit is of another one, or the density is not
            allowed. The model is unchanged then.
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ValueError(f"density={density!r} must be in (0, 1], a part of all pairs in all steps such as 0.1.")
    if not isinstance(audit, Audit):
        raise ValueError(f"audit={audit!r} must be what audit(model, run) gives.")
    _check_order(model, "densify()")
    transformers = {name: part for name, part in find_transformers(model).items() if mhla_layers(part)}
    found = {name: [layer for layer in audit.layers if layer.component == name] for name in transformers}
    for name, part in transformers.items():
        _check_audit(part, found[name])
    if density == 1:
        return change_mhla(model, softmax_steps=1.0)
    changes = [_make_change(part, found[name], density, audit) for name, part in transformers.items()]
    for change in changes:
        carry_out_change(change, model)
    return model


def _make_change(transformer: nn.Module, layers: Sequence[LayerAudit], budget: float, audit: Audit) -> Change:
    spending = plan_spending(layers, budget, audit.knows_steps)
    names, active = list(get_family(transformer).self_attentions(transformer)), active_steps(layers)
    settings: dict[str, Any] = {
        "layers": [names.index(layer.attention) for index, layer in enumerate(layers) if index not in spending.whole],
        "softmax_steps": (active[spending.steps - 1] + 1) / len(audit.rests) if spending.steps else 0,
    }
    if spending.density:
        settings["density"] = spending.density
    return make_change(transformer, None, settings)


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
