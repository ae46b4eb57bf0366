"""Where a patch can pay: FLOPs of a forward by resolution, the share of attention in them, and what is left of it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..families import Model
from .forecast import Question, count_forwards
from .models import choose_sizes, family_of_model
from .parts import ATTENTION

HEADER = ("model", "size", "tokens", "forward, TFLOP", "attention", "patched, TFLOP", "at most")


@dataclass(frozen=True)
class Ceiling:
    """One model at one size, one forward of one sample without and with the family's default patch in every layer."""

    question: Question
    flops: int
    """Of a forward, unpatched."""
    attention_flops: int
    """Of its self-attentions without their projections."""
    patched_flops: int

    @property
    def share(self) -> float:
        """Part of the arithmetic that is self-attention."""
        return self.attention_flops / self.flops

    @property
    def ceiling(self) -> float:
        """How many times less arithmetic the patch leaves: the speed-up where arithmetic is all that takes time."""
        return self.flops / self.patched_flops

    def cells(self) -> tuple[str, ...]:
        """Texts for a table, in the order of ``HEADER``."""
        question = self.question
        return (
            question.model.name,
            str(question.size),
            f"{question.tokens:,}",
            _tera(self.flops),
            f"{self.share:.0%}",
            _tera(self.patched_flops),
            f"{self.ceiling:.2f} x",
        )


def ceilings(models: Iterable[Model]) -> list[Ceiling]:
    """Count every model at all of its sizes, on the meta device.

    Args:
        models: those whose own attention is linear are left out, since a patch saves nothing there.
    """
    softmax = [model for model in models if family_of_model(model).own_attention == "softmax"]
    return [_ceiling(question) for model in softmax for question in _questions(model)]


def _questions(model: Model) -> Iterable[Question]:
    """Every size with the patch that ``apply_mhla(pipe)`` makes, as ``mhla info --model`` forecasts it."""
    config = family_of_model(model).default_config.replace(blocks=model.blocks)
    return [Question(model, size, config) for size in choose_sizes(model, None, None, "cuda")]


def _ceiling(question: Question) -> Ceiling:
    counts = count_forwards(question, torch.bfloat16)
    flops, patched = (sum(cost.flops for cost in costs.values()) for costs in (counts.unpatched, counts.patched))
    return Ceiling(question, flops, counts.unpatched[ATTENTION].flops, patched)


def _tera(flops: int) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"
