"""Where a budget of exactness is worth most, by what an audit has measured: steps, layers, or pairs of tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .audit_result import LayerAudit

_CHUNKS = 256
"""Parts of a layer's pairs, heaviest first, by which its leftover error is predicted."""


@dataclass(frozen=True)
class Spending:
    """How the budget of one transformer is spent."""

    steps: int
    """First ones of those in which the transformer runs, in which all layers attend as before the patch."""
    whole: frozenset[int]
    """Layers of the audit that attend as before the patch in every step."""
    share: float
    """Of the pairs of the other layers that are exact in the other steps; 0 without exact tiles."""
    left: float
    """Squared error that is expected to be left."""


def plan_spending(layers: Sequence[LayerAudit], share: float, knows_steps: bool) -> Spending:
    """The way to spend a share of all pairs and steps that is expected to leave the least error.

    A step or a layer costs all its pairs; what they do not take is left for the pairs of the others.

    Args:
        layers: of one transformer, all with exact tiles or all without.
        share: of all pairs of these layers in all steps, in (0, 1).
        knows_steps: whether single steps can be spent on.
    """
    return min(_candidates(layers, share, knows_steps), key=lambda spending: spending.left)


def active_steps(layers: Sequence[LayerAudit]) -> list[int]:
    """Steps in which a transformer runs: with two of them, each does in a part of the steps."""
    squares = torch.stack([layer.squares.sum(dim=1) for layer in layers]).sum(dim=0)
    return squares.nonzero().flatten().tolist()


def weights_after(layer: LayerAudit, steps: Sequence[int], spent: int) -> float:
    """Part of a layer's error that lies in the steps after the first ``spent``."""
    by_step = layer.errors.sum(dim=1) if layer.tiles is None else layer.tiles.total
    return float(by_step[list(steps)][spent:].sum() / by_step.sum().clamp_min(1e-30))


def _candidates(layers: Sequence[LayerAudit], share: float, knows_steps: bool) -> Iterator[Spending]:
    steps = active_steps(layers)
    has_tiles = layers[0].tiles is not None
    curves = torch.stack([_curve(layer) for layer in layers])
    for spent in range(len(steps) if knows_steps else 1):
        rest = share - spent / len(steps)
        if rest < 0:
            return
        weights = torch.tensor([weights_after(layer, steps, spent) for layer in layers], dtype=torch.float64)
        weighted = weights[:, None] * curves
        order = weighted.sum(dim=1).argsort(descending=True).tolist()
        for whole in range(len(layers)):
            cells = (1 - spent / len(steps)) * (1 - whole / len(layers))
            part = (rest - (1 - spent / len(steps)) * whole / len(layers)) / cells
            if part < -1e-9:
                break
            others = weighted[order[whole:]].flatten()
            kept = round(part * len(others)) if has_tiles else 0
            left = float(others.sum() - others.topk(kept).values.sum())
            if not has_tiles or part >= _least_share(layers) or spent == whole == 0:
                yield Spending(spent, frozenset(order[:whole]), max(part, 0.0) if has_tiles else 0.0, left)


def _least_share(layers: Sequence[LayerAudit]) -> float:
    """One key tile for every query tile."""
    return max(1 / layer.tiles.pair_errors.shape[-1] for layer in layers if layer.tiles is not None)


def _curve(layer: LayerAudit) -> torch.Tensor:
    """Expected change of the output by equal parts of a layer's pairs, heaviest first; of a layer as one without tiles.

    float64, at most (256,).
    """
    if layer.tiles is None:
        return (layer.gain * layer.errors.sum()).reshape(1)
    scores = layer.tiles.pair_errors.sum(dim=0).flatten().sort(descending=True).values.double()
    return layer.gain * torch.stack([part.sum() for part in scores.tensor_split(min(_CHUNKS, len(scores)))])
