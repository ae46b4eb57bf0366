"""Where a budget is worth most, by what an audit has measured: first steps, whole layers, or longer block lists."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .audit_result import DENSITIES, LayerAudit


@dataclass(frozen=True)
class Spending:
    """How the budget of one transformer is spent."""

    steps: int
    """First ones of those in which the transformer runs, in which all layers attend as before the patch."""
    whole: frozenset[int]
    """Layers of the audit that attend as before the patch in every step."""
    density: float
    """Of the other layers in the other steps; 0 without lists."""
    left: float
    """Squared error that is expected to be left."""


def plan_spending(layers: Sequence[LayerAudit], budget: float, knows_steps: bool) -> Spending:
    """The way to spend a budget that is expected to leave the least error.

    A step or a layer costs all its pairs; what they do not take is left for the lists of the others. The squared error
    of a layer is taken to fall with the density as the square of the softmax weight that its lists leave out.

    Args:
        layers: of one transformer, all with lists or all without.
        budget: part of all pairs of these layers in all steps, in (0, 1).
        knows_steps: whether single steps can be spent on.
    """
    return min(_candidates(layers, budget, knows_steps), key=lambda spending: spending.left)


def active_steps(layers: Sequence[LayerAudit]) -> list[int]:
    """Steps in which a transformer runs: with two of them, each does in a part of the steps."""
    squares = torch.stack([layer.squares.sum(dim=1) for layer in layers]).sum(dim=0)
    return squares.nonzero().flatten().tolist()


def _candidates(layers: Sequence[LayerAudit], budget: float, knows_steps: bool) -> Iterator[Spending]:
    steps, count = active_steps(layers), len(layers)
    has_lists = all(layer.density is not None for layer in layers)
    for spent in range(len(steps) if knows_steps else 1):
        rest = budget - spent / len(steps)
        if rest < 0:
            return
        errors = [layer.moves * _after(layer, steps, spent) for layer in layers]
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


def _after(layer: LayerAudit, steps: Sequence[int], spent: int) -> float:
    """Part of a layer's error that lies in the steps after the first ``spent``."""
    by_step = layer.errors.sum(dim=1)
    return float(by_step[list(steps)][spent:].sum() / by_step.sum().clamp_min(1e-30))


def _left_at(layer: LayerAudit, density: float) -> float:
    """Part of a layer's squared error that is left at another density."""
    known = [(0.0, 0.0), *zip(DENSITIES, layer.mass_at, strict=True)]
    held = 1.0
    for (low, mass), (high, more) in pairwise(known):
        if low <= density <= high:
            held = mass + (more - mass) * (density - low) / (high - low)
            break
    return (1 - held) ** 2 / max(1 - (layer.mass_kept or 0.0), 1e-6) ** 2
