"""Names of the steps, in their order, and how long each may take."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SECONDS = 25 * 60
"""Of a whole run."""


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    name: str
    seconds: float
    """After which its processes are ended."""
    processes: int = 1
    """That share its attempts on a GPU; what compiles kernels waits for a processor most of the time."""


STEPS = (
    Step("device", 60),
    Step("correctness", 210, processes=6),
    Step("limits", 120),
    Step("tests", 210),
    Step("integration", 150),
    Step("kernels", 300),
    Step("rivals", 180),
    Step("models", 270),
)
"""Together they take no longer than a whole run may."""


def choose_steps(names: Sequence[str] | None) -> list[Step]:
    """Steps by name, in the order of ``STEPS``; all for None.

    Args:
        names: each one name, or several with commas between them.

    Raises:
        ValueError: an unknown name.
    """
    known = {step.name: step for step in STEPS}
    wanted = [name.strip() for text in names or () for name in text.split(",")]
    for name in wanted:
        if name not in known:
            raise ValueError(f"Unknown step {name!r}; allowed: {', '.join(known)}. Leave --steps out to run all.")
    return [step for step in STEPS if step.name in wanted or not wanted]
