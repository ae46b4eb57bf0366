"""Load the attentions that ship adapted, generate the same scenes through each, and measure them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from ..analysis import attention_matrices, mean_entropy, mean_rank
from ..analysis.pictures import mean_over_heads
from ..attention import initial_mixing
from ..benchmark.timing import Budget, time_interleaved
from ..devices import threads
from ..evaluation.metrics import frechet_distance
from ..families import arguments_of, predict
from ..patching import TransformerCall, load_mhla, mhla_layers
from ..tiny import TinyPipeline, load_tiny
from ..tiny.digits import Scene, load_digits
from .adaptation import Adaptation
from .judging import DigitClassifier, digit_accuracy, digit_features, generate_scenes, load_classifier, real_scenes
from .results import Outcome, Row
from .variants import Variant

_STEADY = 0.25
"""Spread of repeated times, (80th − 20th percentile) / median, beyond which the machine was busy."""


@dataclass(frozen=True)
class Yardstick:
    """What all variants are measured with."""

    adaptation: Adaptation
    scenes: list[Scene]
    real: list[torch.Tensor]
    """The scenes composed of real digits: (F, 64, 64) each."""
    classifier: DigitClassifier

    @classmethod
    def of(cls, adaptation: Adaptation, scenes: int, seed: int) -> "Yardstick":
        """With scenes that the seed draws."""
        chance, tiny = random.Random(seed), adaptation.tiny
        drawn = [tiny.random_scene(chance) for _ in range(scenes)]
        return cls(adaptation, drawn, real_scenes(drawn, tiny, load_digits("held-out"), seed), load_classifier())


def load_variant(tiny: TinyPipeline, variant: Variant, device: str) -> Any:
    """The pipeline with an adapted patch that ships, or the control."""
    pipe = load_tiny(tiny.family, device, control=variant.patch is None)
    if variant.patch is not None:
        load_mhla(pipe, f"tiny-{tiny.family}-{variant.short}")
    return pipe


def examine(variant: Variant, pipe: Any, yardstick: Yardstick) -> Outcome:
    """Generate and measure with a pipeline of :func:`load_variant`, all but the time."""
    adaptation, scenes, classifier = yardstick.adaptation, yardstick.scenes, yardstick.classifier
    tiny = adaptation.tiny
    pictures = generate_scenes(pipe, tiny, scenes, adaptation.seed)
    features = [digit_features(some, scenes, tiny, classifier) for some in (yardstick.real, pictures)]
    call = TransformerCall((), arguments_of(pipe.transformer, _batch(pipe, adaptation, 1)))
    matrices = attention_matrices(pipe.transformer, call)
    row = Row(
        name=variant.name,
        held_out_loss=fmean(adaptation.held_out_losses(pipe)),
        digit_accuracy=digit_accuracy(pictures, scenes, tiny, classifier),
        frechet_distance=frechet_distance(*features),
        rank=mean_rank(matrices),
        entropy=mean_entropy(matrices),
    )
    return Outcome(row, pictures, _mixing(variant, pipe))


def _batch(pipe: Any, adaptation: Adaptation, samples: int) -> Any:
    """The last samples, half noised."""
    count = len(adaptation.data)
    return adaptation.batch(pipe.transformer, range(count - samples, count), torch.full((samples,), 0.5))


def _mixing(variant: Variant, pipe: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer → its mixing matrix before and after adaptation, the mean over heads where each has its own."""
    if variant.patch is None or not variant.patch.mixing_learnable:
        return {}
    before = initial_mixing(variant.patch.blocks, variant.patch.mixing_init)
    return {name: (before, mean_over_heads(layer.mixing)) for name, layer in mhla_layers(pipe).items()}


@torch.no_grad()
def time_all(pipes: Sequence[Any], outcomes: Sequence[Outcome], adaptation: Adaptation) -> list[Outcome]:
    """The outcomes with the median time of a forward with two samples: all in turns, on one thread of a CPU.

    Several threads that wait for each other would measure what else the machine does. The times stay out where their
    spread says that it was busy all the same.
    """
    names = [outcome.row.name for outcome in outcomes]
    # two samples, as classifier-free guidance has them
    batches = [_batch(pipe, adaptation, 2) for pipe in pipes]
    runs = {
        name: partial(predict, pipe.transformer, batch) for name, pipe, batch in zip(names, pipes, batches, strict=True)
    }
    with threads(1):
        timed = time_interleaved(runs, torch.device(adaptation.device), Budget(seconds=2.0, least=7))
    timings = [timed[name].timing for name in names]
    if any(timing is None or timing.p80 - timing.p20 > _STEADY * timing.median for timing in timings):
        return list(outcomes)
    return [
        replace(outcome, row=replace(outcome.row, seconds_per_step=timing.median if timing else None))
        for outcome, timing in zip(outcomes, timings, strict=True)
    ]
