"""What a patch does to quality: held-out loss, digits, and how far pictures move from the unpatched pipeline's."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from ..evaluation.metrics import frechet_distance
from .examining import Yardstick
from .judging import digit_accuracy, digit_features, generate_scenes

HEADER = ("held-out loss ↓", "digits recognised ↑", "Fréchet distance ↓", "distance of the pictures ↓")


@dataclass(frozen=True)
class Fidelity:
    """What was measured of one pipeline."""

    losses: list[float]
    """Of every held-out sample."""
    right: list[float]
    """Of every scene: part of its digits that is recognised."""
    distances: list[float]
    """Of every scene: ‖picture − unpatched‖ / ‖unpatched‖ for the same noise; empty for the unpatched pipeline."""
    frechet_distance: float
    """Of the digits' features to those of the same scenes of real digits, over all scenes."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of ``HEADER``, means with their standard error."""
        distances = _mean_and_error(self.distances, ".3f") if self.distances else "–"
        right = [100 * part for part in self.right]
        return (
            _mean_and_error(self.losses, ".4f"),
            _mean_and_error(right, ".1f") + " %",
            f"{self.frechet_distance:.1f}",
            distances,
        )


def measure_fidelity(
    pipe: Any, yardstick: Yardstick, unpatched: Sequence[torch.Tensor] | None = None
) -> tuple[Fidelity, list[torch.Tensor]]:
    """Measure a pipeline, patched or not.

    Args:
        pipe: the tiny pipeline.
        yardstick: what is measured with.
        unpatched: what the unpatched pipeline generated; None where ``pipe`` is that pipeline.

    Returns:
        What was measured, and what was generated.
    """
    adaptation, scenes, classifier = yardstick.adaptation, yardstick.scenes, yardstick.classifier
    tiny = adaptation.tiny
    pictures = generate_scenes(pipe, tiny, scenes, adaptation.seed)
    features = [digit_features(some, scenes, tiny, classifier) for some in (yardstick.real, pictures)]
    found = Fidelity(
        losses=adaptation.held_out_losses(pipe),
        right=[digit_accuracy([p], [scene], tiny, classifier) for p, scene in zip(pictures, scenes, strict=True)],
        distances=[] if unpatched is None else [_distance(p, o) for p, o in zip(pictures, unpatched, strict=True)],
        frechet_distance=frechet_distance(*features),
    )
    return found, pictures


def _distance(picture: torch.Tensor, original: torch.Tensor) -> float:
    return float((picture - original).norm() / original.norm())


def _mean_and_error(values: Sequence[float], style: str) -> str:
    """Mean ± its standard error; the mean alone of a single value."""
    error = f" ± {stdev(values) / len(values) ** 0.5:{style}}" if len(values) > 1 else ""
    return f"{fmean(values):{style}}{error}"
