"""How a patch samples that was distilled to a few steps."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from ..settings import Settings, allow, check
from .steps import step_cache

MOST_STEPS = 8


def _fall_from_one(times: Sequence[float]) -> bool:
    falls = all(earlier > later > 0 for earlier, later in pairwise(times))
    return 1 <= len(times) <= MOST_STEPS and times[0] == 1 and falls


TIMES = allow(
    words=f"a list of 1 to {MOST_STEPS} values of σ that begin at 1.0 and fall, above 0, such as [1.0, 0.9, 0.75, 0.5]",
    test=_fall_from_one,
)
GUIDANCE = allow(at_least=1, words="a number: 1.0, which is none, or more")


@dataclass(frozen=True)
class FewSteps(Settings):
    """How a distilled model samples: from noise, each step predicts the latents and adds fresh noise for the next.

    Raises:
        ValueError: times that do not begin at 1.0, rise or are too many, or a guidance below 1.
    """

    times: tuple[float, ...] = field(metadata=TIMES)
    """σ of flow matching at which the model runs: from 1.0, pure noise, downwards; as many as there are steps."""
    guidance: float = field(default=1.0, metadata=GUIDANCE)
    """Scale of classifier-free guidance that was distilled in; the pipeline itself is called with 1.0, without it."""

    def __str__(self) -> str:
        count, times = len(self.times), ", ".join(f"{time:.3g}" for time in self.times)
        plural = "s" if count > 1 else ""
        guided = f"; guidance {self.guidance:g} is distilled in" if self.guidance > 1 else ""
        return f"samples in {count} step{plural}, at σ = {times}, without guidance{guided}"

    def check_call(self, settings: Mapping[str, Any]) -> None:
        """Raise unless arguments of a pipeline's call agree with how its model was distilled.

        Args:
            settings: arguments of the call that a user has chosen.

        Raises:
            ValueError: another number of steps, or guidance.
        """
        steps, count = settings.get("num_inference_steps"), len(self.times)
        check(
            steps in (None, count),
            f"num_inference_steps={steps} contradicts the patch, which was distilled to {count} steps; allowed: "
            f"{count}, or leave it out. remove_mhla() restores the original model, which accepts any number.",
        )
        guidance = settings.get("guidance_scale")
        check(
            guidance in (None, 1),
            f"guidance_scale={guidance} contradicts the patch, into which guidance of {self.guidance:g} was "
            "distilled; allowed: 1.0, or leave it out.",
        )

    def warn_of_call(self, transformer: nn.Module, pipe: Any) -> None:
        """Warn of what spoils the samples of a forward that begins: guidance, and a cache that extrapolates.

        Args:
            transformer: the distilled model.
            pipe: pipeline that calls it; None where that is not known.
        """
        cache = step_cache(transformer)
        if cache is not None and cache[0] == "TaylorSeer":
            warnings.warn(
                "TaylorSeer extrapolates from step to step, and this model was distilled to a few steps with fresh "
                f"noise between them, so its samples are spoilt; call {cache[1]}.",
                stacklevel=3,
            )
        if self.guidance > 1 and getattr(pipe, "do_classifier_free_guidance", False):
            warnings.warn(
                f"guidance_scale={getattr(pipe, 'guidance_scale', 'unknown')}: guidance of {self.guidance:g} was "
                "distilled into this model, which is now guided twice and slower; call the pipeline with "
                "guidance_scale=1.0.",
                stacklevel=3,
            )
