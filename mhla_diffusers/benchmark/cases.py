"""A model at one size: what is built of it, counted, checked, and timed with one self-attention beside another."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..families import Model, get_family
from .candidates import Candidate, Choice, attention_choices, make_variant, why_not_compiled
from .conditions import Rates
from .correctness import check_operation, check_patched
from .models import Size, build_transformer, make_forward_inputs, small_size
from .operation import fastest_backend
from .parts import count_parts, time_parts
from .results import Row, make_row
from .shapes import Cost, shape_of
from .timing import Absent, Outcome, Timing


@dataclass(frozen=True)
class Counts:
    """What is told by the shapes of a case alone."""

    tokens: int
    weight_bytes: int
    choices: list[Choice]
    costs: dict[str, dict[str, Cost]]
    """Kind of attention → cost of every part of a forward."""

    def flops(self, kind: str) -> int | None:
        """Of a forward with a kind of attention; None where it cannot run."""
        return sum(cost.flops for cost in self.costs[kind].values()) if kind in self.costs else None


@dataclass(frozen=True)
class Case(ABC):
    """A model at one size.

    Raises:
        ValueError: no layers, more than the model has, or any number of a model that is measured whole.
    """

    model: Any
    """Which, by its ``name``."""
    size: Size
    layers: int | None
    """Build only so many; None for all."""
    device: torch.device
    dtype: torch.dtype

    can_be_cut: ClassVar[bool] = True
    """Whether the layers are all alike, so that the times of some tell the time of all."""

    def __post_init__(self) -> None:
        if self.layers is None:
            return
        if not self.can_be_cut:
            raise ValueError(
                f"layers={self.layers}: the layers of {self.model.name} differ, so it is measured whole; leave "
                "--layers out."
            )
        if not 1 <= self.layers <= self.all_layers:
            raise ValueError(
                f"layers={self.layers} must be from 1 to {self.all_layers}, the layers of {self.model.name}."
            )

    @property
    def is_cut(self) -> bool:
        """Whether times must be extrapolated to the whole model."""
        return self.layers is not None and self.layers < self.all_layers

    @property
    def layers_built(self) -> int:
        """How many layers are timed."""
        return self.layers or self.all_layers

    @property
    @abstractmethod
    def all_layers(self) -> int:
        """Layers of the real model."""

    @abstractmethod
    def build(self, device: torch.device | None = None) -> Any:
        """The model, on the device of the case or on another."""

    @abstractmethod
    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Of the forward, on the model's device."""

    @abstractmethod
    def count(self, only: Collection[str] | None = None) -> Counts:
        """Build the model on the meta device, where it costs nothing, and count.

        Args:
            only: names of self-attentions; all for None.
        """

    @abstractmethod
    def check(self, model: Any) -> None:
        """Compare MHLA in the model, and the sparse branch where it is measured, with the reference on a small input.

        Raises:
            IncorrectAttentionError: it is wrong here.
        """

    @abstractmethod
    def variant(self, model: Any, choice: Choice) -> Any:
        """The model with another self-attention; what weights both have, they share."""

    @abstractmethod
    def repeated(self, variant: Any) -> Iterable[Any]:
        """The layers, which are compiled one by one."""

    def time_parts(self, candidate: Candidate) -> dict[str, Timing]:
        """Part → time of a candidate that was measured; empty where parts are not told apart."""
        return {}

    def candidate(self, model: Any, choice: Choice, *, compiled: bool = False) -> Candidate:
        """A choice with the model that has it, or with the reason why there is none.

        Args:
            model: of :meth:`build`.
            choice: the self-attention.
            compiled: whether the layers are compiled.
        """
        absent = choice.absent or (why_not_compiled(choice) if compiled else None)
        if absent is not None:
            return Candidate(choice, compiled, None, Absent(absent))
        variant = self.variant(model, choice)
        if compiled:
            for layer in self.repeated(variant):
                layer.compile(dynamic=False)
        return Candidate(choice, compiled, variant, Absent("given no inputs"))

    def row(self, outcome: Outcome, rates: Rates, **what: Any) -> Row:
        """A row of this case."""
        layers = {"layers": self.layers_built, "all_layers": self.all_layers} | what
        return make_row(
            outcome,
            rates,
            case=f"{self.model.name} {self.size}",
            model=self.model.name,
            frames=self.size.frames,
            height=self.size.height,
            width=self.size.width,
            batch=self.size.batch,
            dtype=str(self.dtype).removeprefix("torch."),
            **layers,
        )


@dataclass(frozen=True)
class TransformerCase(Case):
    """A transformer of a family, which a patch gives another self-attention."""

    model: Model

    @property
    def all_layers(self) -> int:
        """Layers of the real model."""
        return self.model.layers

    def build(self, device: torch.device | None = None) -> Any:
        """The transformer, on the device of the case or on another."""
        return build_transformer(self.model, self.size, self.layers, device or self.device, self.dtype)

    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Of the forward, on the transformer's device."""
        return make_forward_inputs(self.model, model, size or self.size, model.device, self.dtype)

    def count(self, only: Collection[str] | None = None) -> Counts:
        """Count part by part, see :func:`count_parts`."""
        transformer = self.build(torch.device("meta"))
        inputs, family = self.inputs(transformer), get_family(transformer)
        grid = family.grid_of_arguments(transformer, inputs)
        choices = attention_choices(family, self.model, self.layers_built, grid, self.size.batch, self.device)
        choices = [choice for choice in choices if only is None or choice.name in only]
        costs: dict[str, dict[str, Cost]] = {}
        for choice in choices:
            if choice.absent is None and choice.kind not in costs:
                costs[choice.kind] = count_parts(self.variant(transformer, choice), inputs)
        weights = sum(parameter.numel() * parameter.itemsize for parameter in transformer.parameters())
        return Counts(math.prod(grid), weights, choices, costs)

    def check(self, model: Any) -> None:
        """Compare MHLA in a patched transformer, and the sparse branch with lists given, with the reference."""
        check_patched(
            self.variant(model, Choice("MHLA", "MHLA", baseline=False)), self.inputs(model, small_size(self.model))
        )
        shape = shape_of(self.model, self.model.blocks, self.model.name)
        if shape.block_size is not None:
            backend = fastest_backend(shape, self.device, self.dtype)
            check_operation(shape, self.device, self.dtype, backend, sparse=True)

    def variant(self, model: Any, choice: Choice) -> Any:
        """A copy that shares all weights."""
        return make_variant(model, self.model, choice)

    def repeated(self, variant: Any) -> Iterable[Any]:
        """The transformer blocks."""
        return get_family(variant).blocks_of(variant).values()

    def time_parts(self, candidate: Candidate) -> dict[str, Timing]:
        """By hooks on the modules of each part."""
        return {} if isinstance(candidate.run, Absent) else time_parts(candidate.model, candidate.run, self.device)
