"""Block-sparse attention for an engine: query, key and value in, output or a reason for dense attention out.

Engines hand over what their models attend with after RoPE, so no weights are needed: the key blocks of every query are
chosen by content in every call, and the others take part through their pooled keys
(:mod:`mhla_diffusers.attention.sparse`). What is adapted, λ and mixing matrices, belongs to the modules of a diffusers
model, where ``load_mhla`` puts it.
"""

import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention import mhla_attention
from ..attention.layout import Extra
from ..config import MHLAConfig, Step, check, check_names, load_patch

_VARIABLES = {
    "MHLA_DENSITY": "density",
    "MHLA_ORDER": "order",
    "MHLA_BLOCK_SIZE": "block_size",
    "MHLA_KEY_BLOCK_SIZE": "key_block_size",
    "MHLA_SOFTMAX_STEPS": "softmax_steps",
}
"""Environment variables and the settings of :class:`MHLAConfig` that they stand for."""
_OTHER_VARIABLES = ("MHLA_PATCH", "MHLA_SOFTMAX_LAYERS", "MHLA_MIN_TOKENS")
_OF_WEIGHTS = {
    "linear_branch": False,
    "pooled": True,
    "output_norm": False,
    "output_gate": False,
    "convolution": None,
    "rope": "before",
}
"""Settings of a patch that an engine cannot run otherwise: they need weights, or query and key before RoPE."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine's attention does.

    Raises:
        ValueError: the settings need weights that only a patched diffusers model has, or a value is not allowed.
    """

    config: MHLAConfig = field(default_factory=lambda: MHLAConfig(blocks=(1,), sparse="content"))
    """Density, order, block sizes and ``softmax_steps``, the first steps in which attention stays dense."""
    softmax_layers: tuple[int, ...] = ()
    """Layers whose attention stays dense, from 0."""
    min_tokens: int = 4096
    """Sequences of fewer tokens stay dense, since there sparse attention gains next to nothing."""

    def __post_init__(self) -> None:
        check(
            isinstance(self.config, MHLAConfig),
            f"config={self.config!r} must be settings, such as MHLAConfig(blocks=(1,), sparse='content', density=0.1).",
        )
        found = {"sparse": self.config.sparse, "layers": self.config.layers}
        found |= {name: getattr(self.config, name) for name in _OF_WEIGHTS}
        wanted = {"sparse": "content", "layers": "all", **_OF_WEIGHTS}
        differing = ", ".join(f"{name}={value!r}" for name, value in found.items() if value != wanted[name])
        check(
            not differing and self.config.fit_pooled_bias is not False,
            f"An engine hands over query, key and value alone, so a patch with {differing or 'fit_pooled_bias=False'} "
            "cannot run there. Run it in diffusers with load_mhla(pipe, ...), or give the engine sparse='content' "
            "settings such as density, order and block_size; layers that stay dense are softmax_layers.",
        )
        layers: Any = self.softmax_layers
        check(
            isinstance(layers, tuple | list) and all(type(layer) is int and layer >= 0 for layer in layers),
            f"softmax_layers={layers!r} must be numbers of layers from 0, such as (0, 1).",
        )
        check(
            type(self.min_tokens) is int and self.min_tokens >= 0,
            f"min_tokens={self.min_tokens!r} must be a number of tokens such as 4096, or 0 for any sequence.",
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "EngineSettings":
        """Read settings from variables such as ``MHLA_DENSITY=0.1``.

        ``MHLA_PATCH`` is a preset or the path of its YAML file, whose settings the other variables change.
        ``MHLA_SOFTMAX_LAYERS`` is a list such as ``0,1``.

        Raises:
            ValueError: an unknown variable that begins with ``MHLA_``, or a value that is not allowed.
        """
        given = {name: text for name, text in environment.items() if name.startswith("MHLA_") and text}
        check_names(given, (*_VARIABLES, *_OTHER_VARIABLES), "environment variable")
        config = load_patch(given["MHLA_PATCH"]).config if "MHLA_PATCH" in given else cls().config
        changes = {setting: _value(name, given[name]) for name, setting in _VARIABLES.items() if name in given}
        others: dict[str, Any] = {}
        if "MHLA_SOFTMAX_LAYERS" in given:
            layers = filter(None, map(str.strip, given["MHLA_SOFTMAX_LAYERS"].split(",")))
            others["softmax_layers"] = tuple(_value("MHLA_SOFTMAX_LAYERS", layer) for layer in layers)
        if "MHLA_MIN_TOKENS" in given:
            others["min_tokens"] = _value("MHLA_MIN_TOKENS", given["MHLA_MIN_TOKENS"])
        try:
            return cls(config.replace(**changes), **others)
        except ValueError as error:
            said = ", ".join(f"{name}={text}" for name, text in sorted(given.items()))
            raise ValueError(f"{said} in the environment: {error}") from None


def _value(name: str, text: str) -> Any:
    """Return a variable's number, which is a count if it has no point, or a word."""
    if name == "MHLA_ORDER":
        return text
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number.") from None


class EngineAttention:
    """Sparse attention in the place of an engine's own, and a count of what stayed dense and why.

    One object for each patched model. Every reason is logged once for each shape of query, as a warning unless the
    settings ask for it, and every call of the model ends with a line such as "sparse in 1,160 of 1,200 attentions,
    40 dense: first steps".

    Args:
        settings: what to do.
        logger: of the engine, so that the lines stand among its own.
    """

    def __init__(self, settings: EngineSettings, logger: logging.Logger) -> None:
        self.settings = settings
        self.logger = logger
        self._sparse = 0
        self._dense: Counter[str] = Counter()
        self._logged: set[tuple[str, tuple[int, ...]]] = set()
        self._step = -1
        self._in_step = 0
        """Attentions in the present step."""
        self._per_step = 0
        """Attentions in a whole step; 0 while none has ended."""
        self._end: weakref.finalize[Any, Any] | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: Sequence[int] | None,
        *,
        extra: Extra = (0, 0),
        layer: int | None = None,
        step: Step | None = None,
        obstacle: str = "",
    ) -> torch.Tensor | None:
        """Attend, or return None where the engine is to attend itself.

        Queries of the grid attend sparsely, and to all extra tokens; extra tokens attend to everything.

        Args:
            query: (B, N, H, D) floating point after RoPE, the grid's tokens in raster order.
            key: like ``query``.
            value: like ``query``.
            grid: token grid, 1 to 3 axes; None if the engine does not tell it.
            extra: tokens before and after those of the grid, such as text.
            layer: number of the layer, from 0; None if it is unknown.
            step: the denoising step; None if it is unknown, which counts as none of the first.
            obstacle: why this attention cannot be sparse, such as a mask; empty for nothing.

        Returns:
            (B, N, H, D) in the type of ``query``; None for dense attention, which is counted and logged.

        Raises:
            ValueError: an axis of the grid has no tokens.
        """
        if step is not None and step.index < self._step:
            self.end_of_call()
        asked_for = self._asked_for(query, layer, step)
        reason = asked_for or obstacle or _obstacle(query, key, value, grid, extra)
        output = None
        if reason:
            self._dense[reason] += 1
            if (reason, tuple(query.shape)) not in self._logged:
                self._logged.add((reason, tuple(query.shape)))
                level = logging.INFO if asked_for else logging.WARNING
                self.logger.log(level, "MHLA: dense attention for query %s: %s", tuple(query.shape), reason)
        else:
            assert grid is not None
            output = mhla_attention(
                query,
                key,
                value,
                query.new_ones(1, 1),
                tuple(grid),
                (1,) * len(grid),
                rope="before",
                sparse=self.settings.config.rule_on(grid),
                extra=extra,
            )
            self._sparse += 1
        if step is not None:
            self._count_in_step(step)
        return output

    def _asked_for(self, query: torch.Tensor, layer: int | None, step: Step | None) -> str:
        """Return the setting by which an attention stays dense; empty if there is none."""
        settings = self.settings
        if step is not None and step.is_among_first(settings.config.softmax_steps):
            return "first steps"
        if layer in settings.softmax_layers:
            return f"layers {', '.join(map(str, settings.softmax_layers))}"
        return f"fewer than {settings.min_tokens:,} tokens" if query.shape[1] < settings.min_tokens else ""

    def _count_in_step(self, step: Step) -> None:
        """End the call of the model behind its last step, which has as many attentions as the one before."""
        if step.index != self._step:
            self._per_step, self._in_step, self._step = self._in_step, 0, step.index
        self._in_step += 1
        if step.index == step.count - 1 and self._in_step == self._per_step:
            self.end_of_call()

    def end_with(self, owner: object) -> None:
        """Log the line of the present call when an object is gone, or the next call comes with another.

        For calls whose last step cannot be told: of one step, or of a number of steps that is unknown.
        """
        waiting = self._end.peek() if self._end is not None else None
        if waiting is None or waiting[0] is not owner:
            if self._end is not None:
                self._end()
            self._end = weakref.finalize(owner, self.end_of_call)

    def end_of_call(self) -> None:
        """Log how many attentions were sparse since the last call of the model, and why the others were not."""
        count = self._sparse + self._dense.total()
        if count:
            reasons = "".join(f", {number:,} dense: {reason}" for reason, number in self._dense.most_common())
            self.logger.info("MHLA: sparse in %s of %s attentions%s", f"{self._sparse:,}", f"{count:,}", reasons)
        self._sparse, self._step, self._in_step, self._per_step = 0, -1, 0, 0
        self._dense.clear()


def _obstacle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grid: Sequence[int] | None, extra: Extra
) -> str:
    """Return why tensors cannot be attended to by blocks of a grid; empty if they can."""
    if grid is None:
        return "the token grid is unknown"
    if not query.shape == key.shape == value.shape:
        return f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in shape from query"
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value differ in type: {query.dtype}, {key.dtype}, {value.dtype}"
    if math.prod(grid) + sum(extra) != query.shape[1]:
        size = "x".join(map(str, grid))
        return f"{query.shape[1]:,} tokens are not those of the grid {size} and {sum(extra)} others"
    return ""
