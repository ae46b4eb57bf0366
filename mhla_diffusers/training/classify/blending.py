"""Soft labels: smoothed, and of pictures that are blended (mixup) or pasted into each other (cutmix)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .digits import Sample


@dataclass(frozen=True)
class SoftLabels:
    """Makes batches of samples; every picture is blended with one from the other end of the batch.

    mixup (Zhang et al., 2018) takes λ of a picture and 1 - λ of the other, cutmix (Yun et al., 2019) a rectangle of
    1 - λ of the area from the other, λ drawn per batch from Beta(α, α); labels are shared alike.

    Args:
        classes: of the labels.
        smoothing: part of a label that all classes share.
        mixup: α; 0 for none.
        cutmix: α; 0 for none. With both, one of them is drawn per batch.
    """

    classes: int
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """``pixel_values`` (B, 3, H, W) and ``labels``, probabilities (B, classes)."""
        pictures = torch.stack([sample["pixel_values"] for sample in samples])
        hard = torch.nn.functional.one_hot(torch.stack([sample["labels"] for sample in samples]), self.classes)
        labels = hard * (1 - self.smoothing) + self.smoothing / self.classes
        kinds = [kind for kind in (self.mixup and _mixup, self.cutmix and _cutmix) if kind]
        if kinds:
            blend: Any = kinds[int(torch.randint(len(kinds), ()))]
            alpha = torch.tensor(self.mixup if blend is _mixup else self.cutmix)
            pictures, share = blend(pictures, float(torch.distributions.Beta(alpha, alpha).sample()))
            labels = share * labels + (1 - share) * labels.flip(0)
        return {"pixel_values": pictures, "labels": labels}


def _mixup(pictures: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
    """The blended pictures, and the part that is a picture's own."""
    return share * pictures + (1 - share) * pictures.flip(0), share


def _cutmix(pictures: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
    """Like :func:`_mixup`; a rectangle that reaches beyond the picture is cut there."""
    height, width = pictures.shape[-2:]
    part = (1 - share) ** 0.5
    ends = []
    for length in (height, width):
        middle, half = float(torch.rand(())) * length, part * length / 2
        ends.append((round(max(0.0, middle - half)), round(min(float(length), middle + half))))
    (top, bottom), (left, right) = ends
    pasted = pictures.clone()
    pasted[..., top:bottom, left:right] = pictures.flip(0)[..., top:bottom, left:right]
    return pasted, 1 - (bottom - top) * (right - left) / (height * width)


def soft_cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
    """Mean over the pictures of an optimizer step, as ``Trainer`` asks for it (``compute_loss_func``).

    Args:
        outputs: of a classifier, logits (B, classes).
        labels: probabilities, (B, classes).
        num_items_in_batch: labels of the whole step, each class of a picture counted; None for those of this batch.
    """
    pictures = len(labels) if num_items_in_batch is None else num_items_in_batch / labels.shape[-1]
    loss: torch.Tensor = torch.nn.functional.cross_entropy(outputs.logits.float(), labels, reduction="sum")
    return loss / pictures
