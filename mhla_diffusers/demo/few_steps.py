"""What the patch that was distilled to four steps generates of the demo's scenes."""

from dataclasses import dataclass

import torch

from ..config import adapted_patch_names
from ..patching import load_mhla
from ..tiny import TinyPipeline, load_tiny
from .judging import Yardstick, digit_accuracy


@dataclass(frozen=True)
class FewStepClips:
    """Its clips, and how many of their digits are recognised."""

    name: str
    pictures: list[torch.Tensor]
    """For every scene (F, 64, 64) in [0, 1]."""
    digit_accuracy: float
    steps: str
    """How it samples."""

    @property
    def remark(self) -> str:
        """A sentence for the page."""
        return (
            f"{self.name} {self.steps}; {self.digit_accuracy:.0%} of its digits are recognised. The attentions above "
            "run twice in each of their steps, for guidance."
        )


def judge_few_steps(tiny: TinyPipeline, yardstick: Yardstick, device: str = "cpu") -> FewStepClips | None:
    """All scenes by the distilled patch; None for a pipeline for which none ships."""
    name = f"tiny-{tiny.family}-4-steps"
    if name not in adapted_patch_names():
        return None
    pipe = load_mhla(load_tiny(tiny.family, device), name)
    pictures = yardstick.generate(pipe)
    accuracy = digit_accuracy(pictures, yardstick.scenes, tiny, yardstick.classifier)
    return FewStepClips(name, pictures, accuracy, str(pipe.scheduler.few_steps))
