"""``mhla bench plan``: where the time of one forward would go on many GPUs. Arithmetic of counts, not a measurement."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...config import MHLAConfig
from ...families import Model
from ...reporting import write_table
from ..forecast import Question, count_forwards
from ..models import Size, build_transformer
from ..parts import ATTENTION
from ..shapes import Shape
from .counting import MHLA, SOFTMAX, sent, shape_of
from .world import Layout

_HEADER = (
    "model",
    "frames",
    "GPUs",
    "attention",
    "shared by",
    "computing, s",
    "sending, s",
    "sending",
    "weights, GB",
    "one attention, GB",
)
_ITEMSIZE = 2
"""Bytes of a bfloat16 number."""


@dataclass(frozen=True)
class Machines:
    """Numbers that are stated and not measured.

    Raises:
        ValueError: a number that is not allowed.
    """

    tflops: float = 989.0
    """TFLOP/s of a GPU; the default is dense bfloat16 in NVIDIA's data sheet of the H100 SXM."""
    utilisation: float = 0.4
    """Part of it that is reached, arithmetic of all kinds taken together; the default is near the 38 to 43 % that "The
    Llama 3 Herd of Models" (2024), Table 4, tells of training on H100s."""
    nvlink: float = 450.0
    """GB/s that a GPU sends within its machine; the default is one direction of the data sheet's 900 GB/s."""
    infiniband: float = 50.0
    """GB/s that a GPU sends to other machines; the default is one NDR port of 400 Gbit/s for each GPU."""
    gpus_per_machine: int = 8

    def __post_init__(self) -> None:
        for name in ("tflops", "utilisation", "nvlink", "infiniband", "gpus_per_machine"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        if self.utilisation > 1:
            raise ValueError(f"utilisation={self.utilisation} is a part of tflops, so at most 1.")

    def __str__(self) -> str:
        return (
            f"Stated, not measured: a GPU computes at {self.utilisation:.0%} of {self.tflops:g} TFLOP/s and sends "
            f"{self.nvlink:g} GB/s within a machine of {self.gpus_per_machine}, {self.infiniband:g} GB/s to others; "
            "it does not send while it computes."
        )

    def compute_seconds(self, flops: float) -> float:
        """Of one GPU."""
        return flops / (self.tflops * 1e12 * self.utilisation)

    def sending_seconds(self, layout: Layout, ring_bytes: int, ulysses_bytes: int) -> float:
        """Of one GPU; a group of processes of which one is in another machine is as slow as what joins the machines.

        Processes that exchange heads are neighbours, so they are in one machine where it holds a multiple of them.
        """
        beside = layout.ulysses <= self.gpus_per_machine and self.gpus_per_machine % layout.ulysses == 0
        ring_rate = self.nvlink if layout.processes <= self.gpus_per_machine else self.infiniband
        heads_rate = self.nvlink if beside else self.infiniband
        return ring_bytes / (ring_rate * 1e9) + ulysses_bytes / (heads_rate * 1e9)


@dataclass(frozen=True)
class Planned:
    """One forward of one sample of all layers, on so many GPUs."""

    question: Question
    attention: str
    layout: Layout
    """Of those that diffusers allows the one that sends for the least time."""
    compute: float
    """Seconds."""
    sending: float
    """Seconds, as if nothing were computed meanwhile."""
    weight_bytes: int
    """All weights, which every GPU holds."""
    attention_bytes: int
    """Query, key, value and output of one attention, and what collectives deliver to it."""

    @property
    def seconds(self) -> float:
        """Of the forward."""
        return self.compute + self.sending


def plan(
    models: Iterable[Model],
    sizes: Sequence[Size],
    gpus: Sequence[int],
    machines: Machines,
    config: MHLAConfig | None = None,
) -> list[Planned]:
    """Softmax and a patch on every number of GPUs.

    Args:
        models: which.
        sizes: that they make.
        gpus: how many.
        machines: what they are taken to reach.
        config: of the patch; MHLA in all layers with the model's block counts for None.

    Raises:
        ValueError: a number that is not allowed, or a patch that does not fit.
    """
    for count in gpus:
        if count < 1:
            raise ValueError(f"gpus={count} must be at least 1.")
    cases = [_case(model, size, config or _all_layers(model)) for model in models for size in sizes]
    return [
        _best(case, attention, count, machines) for case in cases for count in gpus for attention in (SOFTMAX, MHLA)
    ]


@dataclass(frozen=True)
class _Case:
    """What all numbers of GPUs have in common."""

    question: Question
    shape: Shape
    flops: dict[str, float]
    """Attention → of a forward, all parts of all layers."""
    weight_bytes: int


def _case(model: Model, size: Size, config: MHLAConfig) -> _Case:
    for name, none in (("sparse", "none"), ("convolution", None)):
        if getattr(config, name) != none:
            raise ValueError(
                f"What a patch with {name}={getattr(config, name)!r} sends is not counted; the plan takes patches with "
                f"{name}={none!r}."
            )
    question = Question(model, size, config)
    counts, part = count_forwards(question, torch.bfloat16), question.layers / model.layers
    softmax, patched = counts.unpatched[ATTENTION].flops, counts.patched[ATTENTION].flops
    others = sum(cost.flops for name, cost in counts.unpatched.items() if name != ATTENTION)
    flops = {SOFTMAX: float(others + softmax), MHLA: others + part * patched + (1 - part) * softmax}
    shape = replace(shape_of(model, size), blocks=config.blocks_on(question.grid))
    transformer = build_transformer(model, size, None, torch.device("meta"), torch.bfloat16)
    return _Case(question, shape, flops, sum(x.numel() * x.itemsize for x in transformer.parameters()))


def _all_layers(model: Model) -> MHLAConfig:
    return MHLAConfig(blocks=model.blocks, mixing_per_head=True, layers="all", sparse="none", clamp_blocks=True)


def _best(case: _Case, attention: str, gpus: int, machines: Machines) -> Planned:
    layouts = layouts_of(gpus, case.question.tokens, case.shape.heads, machines.gpus_per_machine)
    return min((_on(case, attention, layout, machines) for layout in layouts), key=lambda one: one.sending)


def layouts_of(gpus: int, tokens: int, heads: int, gpus_per_machine: int) -> list[Layout]:
    """Degrees that diffusers allows, exchanging heads within a machine alone.

    Tokens that the GPUs do not divide take a ring (``ring_anything=True``), which allows no other degree beside it.
    """
    if tokens % gpus:
        return [Layout(ring=gpus)]
    degrees = (degree for degree in range(1, gpus + 1) if gpus % degree == 0 and heads % degree == 0)
    return [Layout(gpus // degree, degree) for degree in degrees if degree <= gpus_per_machine]


def _on(case: _Case, attention: str, layout: Layout, machines: Machines) -> Planned:
    """The layers that are patched as the attention has it, and all others with softmax."""
    question, shape = case.question, case.shape
    layers = {SOFTMAX: question.model.layers}
    if attention != SOFTMAX:
        layers = {attention: question.layers, SOFTMAX: question.model.layers - question.layers}
    ring = ulysses = delivered = 0
    for name, count in layers.items():
        if count and layout.processes > 1:
            one = sent(name, shape, layout, False)
            ring, ulysses, delivered = (
                ring + count * one.ring,
                ulysses + count * one.ulysses,
                max(delivered, one.delivered),
            )
    own = -(-question.tokens // layout.processes)
    return Planned(
        question,
        attention,
        layout,
        compute=machines.compute_seconds(case.flops[attention] * own / question.tokens),
        sending=machines.sending_seconds(layout, ring, ulysses),
        weight_bytes=case.weight_bytes,
        attention_bytes=4 * own * shape.heads * shape.head_dim * _ITEMSIZE + delivered,
    )


def write_plan(found: Iterable[Planned], folder: Path) -> str:
    """Seconds of one forward and what a GPU holds, as ``plan.md`` and ``plan.csv``."""
    rows = [
        (
            one.question.model.name,
            str(one.question.size.frames or 1),
            str(one.layout.processes),
            one.attention,
            str(one.layout),
            _seconds(one.compute),
            _seconds(one.sending),
            f"{one.sending / one.seconds:.0%}",
            f"{one.weight_bytes / 1e9:.1f}",
            f"{one.attention_bytes / 1e9:.2f}",
        )
        for one in found
    ]
    return write_table(_HEADER, rows, folder, "plan")


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
