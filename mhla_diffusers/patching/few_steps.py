"""How a patch that was distilled to a few steps samples: what its record says, and what a pipeline needs for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..config import check, check_names

MOST_STEPS = 8


@dataclass(frozen=True)
class FewSteps:
    """Sampling in a few steps: from noise, each step predicts the latents and adds fresh noise for the next.

    Raises:
        ValueError: times that do not begin at 1.0, rise or are too many, or a guidance below 1.
    """

    times: tuple[float, ...]
    """σ of flow matching at which the model runs: from 1.0, pure noise, downwards; as many as there are steps."""
    guidance: float = 1.0
    """Scale of classifier-free guidance that was distilled in; the pipeline itself is called with 1.0, without it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", check_times(self.times))
        guided = _is_number(self.guidance) and self.guidance >= 1
        check(guided, f"guidance={self.guidance!r} must be a number: 1.0, which is none, or more.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"times": list(self.times), "guidance": self.guidance}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "FewSteps":
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: unknown names, or values that are not allowed.
        """
        check_names(content, ["times", "guidance"], "key", "few_steps.")
        return cls(content.get("times", ()), content.get("guidance", 1.0))

    def __str__(self) -> str:
        count, times = len(self.times), ", ".join(f"{time:.3g}" for time in self.times)
        plural = "s" if count > 1 else ""
        guided = f"; guidance {self.guidance:g} is distilled in" if self.guidance > 1 else ""
        return f"samples in {count} step{plural}, at σ = {times}, without guidance{guided}"


def check_times(times: Any) -> tuple[float, ...]:
    """The times of a few steps; raises ValueError if they cannot be."""
    check(
        isinstance(times, list | tuple)
        and all(_is_number(time) for time in times)
        and 1 <= len(times) <= MOST_STEPS
        and times[0] == 1
        and all(earlier > later > 0 for earlier, later in pairwise(times)),
        f"times={list(times) if isinstance(times, tuple) else times!r} must be a list of 1 to {MOST_STEPS} values of σ "
        "that begin at 1.0 and fall, above 0, such as [1.0, 0.9, 0.75, 0.5].",
    )
    return tuple(float(time) for time in times)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_sampling(few_steps: FewSteps | None, settings: Mapping[str, Any]) -> None:
    """Raise unless arguments of a pipeline's call agree with how its patch was distilled.

    Args:
        few_steps: None of a patch that was not.
        settings: arguments of the call that a user has chosen.

    Raises:
        ValueError: another number of steps, or guidance.
    """
    if few_steps is None:
        return
    steps, count = settings.get("num_inference_steps"), len(few_steps.times)
    check(
        steps in (None, count),
        f"num_inference_steps={steps} contradicts the patch, which was distilled to {count} steps; allowed: {count}, "
        "or leave it out. remove_mhla() brings the model of before back, which takes any number.",
    )
    guidance = settings.get("guidance_scale")
    check(
        guidance in (None, 1),
        f"guidance_scale={guidance} contradicts the patch, into which guidance of {few_steps.guidance:g} was "
        "distilled; allowed: 1.0, or leave it out.",
    )
