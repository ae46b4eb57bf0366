"""The running call of an engine's model: its step, its residuals, and a count of what was sparse."""

import logging
import weakref
from typing import Any

import torch

from ..attention.layout import Extra, Shape
from ..config import Step
from ..patching.call import Call, Log, Run, Tally
from ..patching.residual import BranchState
from ..patching.route import Request, attend
from .settings import EngineSettings


class Engine:
    """Sparse attention of one model in an engine, which logs with the engine's logger.

    A reason for dense attention is logged once per shape of query, as a warning unless the settings ask for it; a call
    of the model ends with a line such as "sparse in 1,160 of 1,200 attentions, 40 dense: dense steps".
    """

    backend = "auto"
    """Kernels where they can run, as of a patch."""

    def __init__(self, settings: EngineSettings, logger: logging.Logger) -> None:
        self.config, self.min_tokens = settings.config, settings.min_tokens
        self.log = Log(logger)
        self.tally = Tally(self.log)
        self.run = Run()
        self._in_forward: set[int] = set()
        self._forward = 0
        self._end: weakref.finalize[Any, Any] | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
        layer: int | None,
        request: Request,
        obstacle: str = "",
    ) -> torch.Tensor:
        """Answer an attention (B, N, H, D), after RoPE, and count it.

        ``layer`` is counted from 0; None if unknown, which has no residuals. ``obstacle`` says why this attention
        cannot be sparse, where the engine alone knows.
        """
        config, chosen = self.config, ""
        if layer is not None and layer < config.dense_layers:
            chosen = "first layers"
        elif query.shape[1] < self.min_tokens:
            chosen = f"fewer than {self.min_tokens:,} tokens"
        elif not obstacle and not call.grid:
            obstacle = "the token grid is unknown"
        elif not obstacle and call.step is None and config.has_dense_steps:
            obstacle = f"the step is unknown, on which {config.dense_words} depends"
        elif not obstacle and layer is None and config.dense_layers:
            obstacle = f"the layer has no number, on which dense_layers={config.dense_layers} depends"
        if chosen or obstacle:
            self.tally.note_dense(chosen or obstacle, query, logging.INFO if chosen else logging.WARNING)
            return request.exact(query, key, value)
        if layer is None:
            call = call._replace(branches=(), records_residual=False)
        return attend(query, key, value, request, (call, torch.tensor(layer or 0, device="cpu"), 0))

    def call(self, grid: Shape, extra: Extra, step: Step | None, owner: Any, layer: int | None) -> Call:
        """Return the call of an attention, in an engine that does not say where a forward begins.

        A forward begins when a layer attends again; branches of the guidance are distinguished by their order. ``grid``
        is empty if the engine does not give it; ``owner`` lives as long as the call of the model.
        """
        if step is None:
            return self.filled(grid, extra, None, ())
        latest, waiting = self.run.step, None if self._end is None else self._end.peek()
        if waiting is None or waiting[0] is not owner or (latest is not None and step.index < latest.index):
            if self._end is not None:
                self._end()
            self._end = weakref.finalize(owner, self.end)
        begins = self.run.begin(step)
        if begins or layer in self._in_forward:
            self._forward = 0 if begins else self._forward + 1
            self._in_forward.clear()
        if layer is not None:
            self._in_forward.add(layer)
        return self.filled(grid, extra, step, (self.run.named(self._forward),))

    def filled(self, grid: Shape, extra: Extra, step: Step | None, branches: tuple[BranchState, ...]) -> Call:
        """Return a call with what the settings say of its step; ``branches`` are parts of the batch."""
        config = self.config
        if step is None:
            return Call(self, grid, extra, tally=self.tally)
        kept = branches if config.correct and config.has_dense_steps else ()
        return Call(
            self, grid, extra, step=step, is_dense=config.is_dense(step), records_residual=bool(kept) and
            config.records_residual(step), branches=kept, run=self.run, tally=self.tally,
        )  # fmt: skip

    def end(self) -> None:
        """End a call of the model: log its line, and forget what it measured."""
        self.log.summary(self.tally)
        self.tally = Tally(self.log)
        self.run.clear()
        self._in_forward.clear()
