"""What denoising will take before anything is patched or downloaded: counted on the meta device, times from speeds."""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import torch

from ..config import MHLAConfig
from ..families import Model
from ..patching import apply_mhla
from ..patching.denoising_steps import Step
from ..patching.plan import choose_layers
from .candidates import CONTENT, PLAIN
from .models import Size, build_transformer, make_forward_inputs
from .parts import PARTS, count_parts
from .shapes import Cost
from .speeds import Speeds

_MOST_TOKENS = 2**20
"""A break-even size is looked for up to here."""


@dataclass(frozen=True)
class Question:
    """What is asked: the denoising of one call of a pipeline.

    Raises:
        ValueError: a number of steps or passes that is not allowed.
    """

    model: Model
    size: Size
    config: MHLAConfig
    """Of the patch."""
    steps: int = 50
    """Of the sampler."""
    passes: int = 2
    """Forwards per step: two with classifier-free guidance, with and without the prompt."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("passes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")

    @property
    def grid(self) -> tuple[int, ...]:
        """Token grid, of a single frame where frames attend by themselves."""
        model, size = self.model, self.size
        step = model.stride * model.patch
        latents = [] if size.frames is None else [(size.frames - 1) // model.temporal_stride + 1]
        frames = [count // model.temporal_patch for count in latents]
        return (*frames, size.height // step, size.width // step)[-len(model.blocks) :]

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)

    @property
    def kind(self) -> str:
        """Of the patch, as ``mhla bench`` names it."""
        if self.config.sparse != "none":
            return CONTENT if self.config.sparse == "content" else "MHLA, sparse, own blocks"
        return PLAIN if math.prod(self.config.blocks) == 1 else "MHLA"

    @property
    def layers(self) -> int:
        """How many are replaced."""
        return len(choose_layers(self.config.layers, self.model.layers))

    @property
    def softmax_steps(self) -> int:
        """First steps in which the patch is disabled."""
        steps = [Step(index, self.steps) for index in range(self.steps)]
        return sum(step.is_among_first(self.config.softmax_steps) for step in steps)

    @property
    def patched(self) -> float:
        """Part of all layers of all steps that are patched."""
        return self.layers / self.model.layers * (1 - self.softmax_steps / self.steps)


@dataclass(frozen=True)
class Counts:
    """Cost of every part of one forward of one sample."""

    unpatched: dict[str, Cost]
    patched: dict[str, Cost]
    """With every layer replaced."""
    layers: int


@dataclass(frozen=True)
class Forecast:
    """The answer: of a whole call's denoising, without text encoder and VAE."""

    question: Question
    unpatched: dict[str, Cost]
    patched: dict[str, Cost]
    unpatched_seconds: dict[str, float] | None = None
    """None where nothing is known of speeds."""
    patched_seconds: dict[str, float] | None = None
    break_even: Question | None = None
    """The same at the smallest size of this aspect ratio and length from which the patch is faster; None for none."""

    @property
    def speed_up(self) -> float | None:
        """How many times less time the patched call takes."""
        if self.unpatched_seconds is None or self.patched_seconds is None:
            return None
        return sum(self.unpatched_seconds.values()) / sum(self.patched_seconds.values())


def make_forecast(question: Question, dtype: torch.dtype, speeds: Speeds | None = None) -> Forecast:
    """Count, and where speeds are known tell times.

    Args:
        question: what is asked.
        dtype: of the weights, for bytes.
        speeds: of the parts; None for counts alone.

    Raises:
        ValueError: a patch that does not fit the model or the size.
    """
    counts = count_forwards(question, dtype)
    forwards, patched = question.steps * question.passes, question.patched
    found = Forecast(
        question,
        {part: cost.times(forwards) for part, cost in counts.unpatched.items()},
        {
            part: counts.patched[part].times(forwards * patched) + cost.times(forwards * (1 - patched))
            for part, cost in counts.unpatched.items()
        },
    )
    if speeds is None:
        return found
    one, other = forward_seconds(counts, speeds)
    return replace(
        found,
        unpatched_seconds={part: forwards * one[part] for part in PARTS},
        patched_seconds={part: forwards * (patched * other[part] + (1 - patched) * one[part]) for part in PARTS},
        break_even=_break_even(question, dtype, speeds),
    )


def count_forwards(question: Question, dtype: torch.dtype, layers: int | None = None) -> Counts:
    """Count a forward without and with the patch; from one layer and from two, since all are alike.

    Args:
        question: model, size and patch.
        dtype: of the weights.
        layers: of the model; all for None.
    """
    count = (layers or question.model.layers) - 1
    one = _count(question, dtype, 1)
    if not count:
        return one
    two = _count(question, dtype, 2)
    unpatched, patched = (
        {part: first[part].times(1 - count) + second[part].times(count) for part in first}
        for first, second in ((one.unpatched, two.unpatched), (one.patched, two.patched))
    )
    return Counts(unpatched, patched, count + 1)


def _count(question: Question, dtype: torch.dtype, layers: int) -> Counts:
    model, size, meta = question.model, question.size, torch.device("meta")
    transformer = build_transformer(model, size, layers, meta, dtype)
    inputs = make_forward_inputs(model, transformer, size, meta, dtype)
    unpatched = count_parts(transformer, inputs)
    apply_mhla(transformer, question.config.replace(layers="all", softmax_steps=0))
    return Counts(unpatched, count_parts(transformer, inputs), layers)


def forward_seconds(counts: Counts, speeds: Speeds) -> tuple[dict[str, float], dict[str, float]]:
    """Of one forward without and with the patch."""
    layers = counts.layers
    return (
        speeds.seconds(counts.unpatched, layers, patched=False),
        speeds.seconds(counts.patched, layers, patched=True),
    )


def _break_even(question: Question, dtype: torch.dtype, speeds: Speeds) -> Question | None:
    """By halving: as soon as the patched forward is the faster one, it is so at every larger size."""
    model = question.model
    step, (*frames, height, width) = model.stride * model.patch, question.grid

    def at(rows: int) -> Question:
        columns = max(1, round(rows * width / height))
        return replace(question, size=replace(question.size, height=rows * step, width=columns * step))

    def gains(rows: int) -> bool:
        one, other = forward_seconds(count_forwards(at(rows), dtype, 1), speeds)
        return sum(other.values()) < sum(one.values())

    def fits(rows: int) -> bool:
        grid = at(rows).grid
        return all(count <= size for count, size in zip(question.config.blocks_on(grid), grid, strict=True))

    most = math.isqrt(int(_MOST_TOKENS / math.prod(frames) * height / width))
    tried = range(bisect_left(range(height), True, key=fits), max(most, height) + 1)
    rows = bisect_left(tried, True, key=gains)
    return at(tried[rows]) if rows < len(tried) else None
