"""Sparse attention on query, key and value alone: output, or a reason for dense attention.

Engines and models without a family hand over query, key and value after RoPE, which is all that
:func:`mhla_diffusers.attention.sparse_attention` needs. MHLA's mixing matrices are weights of a patched diffusers
model, so MHLA runs there alone.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ..attention import sparse_attention
from ..attention.layout import Extra, check_grid
from ..config import SparseConfig, Step
from ..settings import Settings, allow, check
from .carry import CarriedForward, Half

_DENSE_STEP = "dense steps"


@dataclass(frozen=True)
class EngineSettings(Settings):
    """What an engine's attention does.

    Raises:
        ValueError: the settings are not of sparse attention in all layers, or a value is not allowed.
    """

    config: SparseConfig = SparseConfig()
    """Density, block sizes, order, the steps in which attention stays dense, and what these show the others."""
    softmax_layers: tuple[int, ...] = field(default=(), metadata=allow(at_least=0))
    """Layers whose attention stays dense, from 0."""
    min_tokens: int = field(default=4096, metadata=allow(at_least=0))
    """Sequences of fewer tokens stay dense, since there sparse attention gains next to nothing."""

    def __post_init__(self) -> None:
        config: Any = self.config
        attention, layers = getattr(config, "attention", repr(config)), getattr(config, "layers", "all")
        check(
            isinstance(config, SparseConfig) and layers == "all",
            f"An engine runs sparse attention with layers='all', and these settings are {attention} with "
            f"layers={layers!r}. Give a preset such as 'wan2.1-t2v-1.3b-sparse' or settings such as "
            "SparseConfig(density=0.05), with softmax_layers for layers that stay dense. Other patches run in "
            "diffusers, with apply_mhla() or load_mhla().",
        )
        super().__post_init__()


def read_layers(text: str) -> tuple[int, ...]:
    """Return the numbers of layers that a text lists, such as "0, 1, 28-29"; none for an empty text.

    Raises:
        ValueError: another text.
    """
    layers: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = map(str.strip, part.partition("-"))
        is_range = first.isdecimal() and (last.isdecimal() and int(first) <= int(last) if dash else not last)
        check(is_range, f"softmax_layers={text!r} must list layers from 0, such as '0,1' or '0-3', or be empty.")
        layers += range(int(first), int(last or first) + 1)
    return tuple(layers)


class EngineAttention:
    """Sparse attention in the place of an engine's own, and a count of what stayed dense and why.

    One object for each patched model. Every reason is logged once for each shape of query, as a warning unless the
    settings ask for it, and every call of the model ends with a line such as "sparse in 1,160 of 1,200 attentions,
    40 dense: dense steps".

    Args:
        settings: what to do.
        logger: of the engine, so that the lines stand among its own.
        finds_ends: whether a call of the model ends with its last step, or where a step goes back; False for an engine
            that knows, and calls :meth:`end_of_call`.
    """

    def __init__(self, settings: EngineSettings, logger: logging.Logger, *, finds_ends: bool = True) -> None:
        self.settings = settings
        self.logger = logger
        self._finds_ends = finds_ends
        self._sparse = 0
        self._dense: Counter[str] = Counter()
        self._logged: set[tuple[str, tuple[int, ...]]] = set()
        self._step = -1
        self._in_step = 0
        """Attentions in the present step."""
        self._per_step = 0
        """Attentions in a whole step; 0 while none has ended."""
        self._layers: set[int] = set()
        """Those that have attended in the present call."""
        self._halves: dict[tuple[Hashable, int], Half] = {}
        """What dense steps of the present call have shown, by the part of the batch and its order within a step."""
        self._shown: set[tuple[Hashable, int]] = set()
        """Which of them the present step has shown."""
        self._calls_in_step: Counter[tuple[Hashable, int]] = Counter()
        """How often each layer has attended to each part in the present step."""
        self._end: weakref.finalize[Any, Any] | None = None
        self.latest = ""
        """:meth:`summary` of the latest call of the model that has ended."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: Sequence[int] | None,
        *,
        extra: Extra = (0, 0),
        key_mask: torch.Tensor | None = None,
        layer: int | None = None,
        step: Step | None = None,
        obstacle: str = "",
        other: str = "",
        parts: Sequence[Hashable] = ("",),
        dense: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Attend, or return None where the engine is to attend itself.

        Queries of the grid attend sparsely, and to all extra tokens; extra tokens attend to everything.

        Args:
            query: (B, N, H, D) floating point after RoPE, the grid's tokens in raster order; of the grid's tokens alone
                where the extra ones have keys and no queries, as in a cache.
            key: (B, N, H, D) of all tokens.
            value: like ``key``.
            grid: token grid, 1 to 3 axes; None if the engine does not give it.
            extra: tokens before and after those of the grid, such as text.
            key_mask: (B, N), which tokens take part, as :func:`mhla_diffusers.attention.sparse_attention` takes it.
            layer: number of the layer, from 0; None if it is unknown.
            step: the denoising step; None if it is unknown, which counts as none of the first.
            obstacle: why this attention cannot be sparse, such as a mask; empty for nothing.
            other: what this attention is if it is not self-attention over the grid, such as cross-attention. It stays
                dense, which is logged as information and not as a warning.
            parts: names of the equal parts of the batch, such as the halves of the guidance. A part carries what
                dense steps showed of that part, in whichever batch; parts of one name are known by their order within
                a step.
            dense: makes (B, N, H, D) by the engine's own attention. With it and a layer, what sparse attention loses
                at a dense step is added at the steps that follow (:mod:`mhla_diffusers.patching.carry`).

        Returns:
            Like ``query``; None for dense attention, which is counted and logged.

        Raises:
            ValueError: the grid is not 1 to 3 positive integers.
        """
        grid = None if grid is None else check_grid(grid)
        if step is not None and step.index != self._step:
            self._enter(step)
        if layer is not None:
            self._layers.add(layer)
        carried = self._carried(step, layer, parts) if dense is not None else []
        asked_for = other or self._asked_for(query, layer, step)
        obstacle = obstacle or _obstacle(query, key, value, grid, extra)
        reason = asked_for or obstacle
        output = None
        if reason:
            self._stay_dense(reason, query.shape, logging.INFO if asked_for else logging.WARNING)
            shows = reason == _DENSE_STEP and step is not None and self.settings.config.records_residual(step)
            if shows and carried and not obstacle:
                assert dense is not None
                output, sparse = dense(), self._attend_sparsely(query, key, value, grid, extra, key_mask)
                of_parts = (x.flatten(2).chunk(len(carried)) for x in (output, sparse))
                for one, *both in zip(carried, *of_parts, strict=True):
                    one.show(*both, layer or 0, 0)
        else:
            output = self._attend_sparsely(query, key, value, grid, extra, key_mask)
            if carried:
                flat = output.flatten(2)
                for one, part in zip(carried, flat.chunk(len(carried)), strict=True):
                    one.add(part, layer or 0, 0)
                output = flat.view(output.shape)
            self._sparse += 1
        if step is not None:
            self._in_step += 1
            if self._finds_ends and step.index == step.count - 1 and self._in_step == self._per_step:
                self.end_of_call()
        return output

    def _stay_dense(self, reason: str, shape: Sequence[int], level: int) -> None:
        """Count an attention that stays dense, and log its reason once for each shape of query."""
        self._dense[reason] += 1
        if (reason, tuple(shape)) not in self._logged:
            self._logged.add((reason, tuple(shape)))
            self.logger.log(level, "MHLA: dense attention for query %s: %s", tuple(shape), reason)

    def _attend_sparsely(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: Sequence[int] | None,
        extra: Extra,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        assert grid is not None
        config, tokens = self.settings.config, query.shape[1]
        is_grid_alone = tokens != key.shape[1]
        if is_grid_alone:  # the others attend to everything, as the operator has it, and nobody looks at the result
            query = functional.pad(query, (0, 0, 0, 0, *extra))
        output = sparse_attention(
            query,
            key,
            value,
            grid,
            density=config.density,
            block_size=config.block_size,
            key_block_size=config.key_block_size,
            order=config.order,
            far=config.far,
            key_mask=key_mask,
            extra=extra,
        )
        return output[:, extra[0] : extra[0] + tokens] if is_grid_alone else output

    def _enter(self, step: Step) -> None:
        """Begin a step; the model has as many attentions in each, and what an old dense step alone showed is over."""
        if self._finds_ends and step.index < self._step:
            self.end_of_call()
        if self._shown:
            self._halves = {name: half for name, half in self._halves.items() if name in self._shown}
        self._shown.clear()
        self._calls_in_step.clear()
        self._per_step, self._in_step, self._step = self._in_step, 0, step.index

    def _carried(self, step: Step | None, layer: int | None, parts: Sequence[Hashable]) -> list[CarriedForward]:
        """Return what a layer carries in a step, for every part of the batch; empty if nothing."""
        config, found = self.settings.config, []
        if step is None or layer is None or not (config.carry and config.has_dense_steps):
            return []
        for part in parts:
            name = part, self._calls_in_step[part, layer]
            self._calls_in_step[part, layer] += 1
            if config.records_residual(step):
                self._shown.add(name)
            elif part and name not in self._halves:  # a solver that evaluates this step once more
                name = part, 0
            found.append(CarriedForward(self._halves.setdefault(name, Half()), step, config))
        return found

    def _asked_for(self, query: torch.Tensor, layer: int | None, step: Step | None) -> str:
        """Return the setting by which an attention stays dense; empty if there is none."""
        settings = self.settings
        if step is not None and settings.config.is_dense(step):
            return _DENSE_STEP
        if layer in settings.softmax_layers:
            return f"layers {', '.join(map(str, settings.softmax_layers))}"
        return f"fewer than {settings.min_tokens:,} tokens" if query.shape[1] < settings.min_tokens else ""

    def end_with(self, owner: object) -> None:
        """Log the line of the present call when an object is gone, or the next call comes with another.

        For calls whose last step is unknown: of one step, or of a number of steps that is unknown.
        """
        waiting = self._end.peek() if self._end is not None else None
        if waiting is None or waiting[0] is not owner:
            if self._end is not None:
                self._end()
            self._end = weakref.finalize(owner, self.end_of_call)

    def warn_once(self, words: str) -> None:
        """Log a warning the first time."""
        if (words, ()) not in self._logged:
            self._logged.add((words, ()))
            self.logger.warning("MHLA: %s.", words)

    @property
    def is_all_dense(self) -> bool:
        """Whether no attention of the present call was sparse, and some might have been."""
        return not self._sparse and bool(self._dense)

    def summary(self) -> str:
        """Return how many attentions of the present call were sparse, and why the others were not; empty for none."""
        count = self._sparse + self._dense.total()
        reasons = "".join(f", {number:,} dense: {reason}" for reason, number in self._dense.most_common())
        return f"sparse in {self._sparse:,} of {count:,} attentions{reasons}" if count else ""

    def end_of_call(self) -> None:
        """Log how many attentions were sparse since the last call of the model, and why the others were not."""
        if summary := self.summary():
            self.logger.info("MHLA: %s", summary)
            self.latest = summary
        absent = set(self.settings.softmax_layers) - self._layers
        if self._per_step and self._layers and absent:
            there = f"the model has 0 to {max(self._layers)}"
            self.warn_once(f"softmax_layers names {', '.join(map(str, sorted(absent)))}, and {there}")
        self._sparse, self._step, self._in_step, self._per_step = 0, -1, 0, 0
        for kept in (self._dense, self._halves, self._shown, self._calls_in_step, self._layers):
            kept.clear()


def _obstacle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: Sequence[int] | None, extra: Extra
) -> str:
    """Return why tensors cannot be attended to by blocks of a grid; empty if they can."""
    if grid is None:
        return "the token grid is unknown"
    tokens = math.prod(grid)
    has_keys_alone = query.shape[1] == tokens and key.shape[1] == tokens + sum(extra)
    like_query = (len(query), key.shape[1], *query.shape[2:]) if has_keys_alone else query.shape
    if key.shape != like_query or value.shape != key.shape:
        return f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in shape from query"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value differ in type: {query.dtype}, {key.dtype}, {value.dtype}"
    if tokens + sum(extra) != key.shape[1]:
        size = "x".join(map(str, grid))
        return f"{query.shape[1]:,} tokens are not those of the grid {size} and {sum(extra)} others"
    return ""
