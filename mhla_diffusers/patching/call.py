"""The running call: what the attentions of a forward need to know of it, per thread.

A hook on the transformer sets an immutable :class:`Call` before a forward and takes it back after it; a hook on every
patched self-attention says which layer runs. The call belongs to the forward and not to the layers, which two threads
share and which PEFT, ``deepcopy`` and gradient checkpointing copy or run again.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..attention.call import ContentRule
from ..attention.layout import Extra, Shape
from ..config import Step
from .residual import BranchState, Errors, Run

logger = logging.getLogger(__name__)

Counts = tuple[int | None, int | None]
"""Numbers of extra tokens before and after the grid's; None means as many as the sequence holds."""


class Tally:
    """Counts the attentions of a running call that were sparse and dense, and logs why some stayed dense.

    Args:
        logger: of the engine, so that the lines stand among its own.
    """

    def __init__(self, logger: logging.Logger = logger) -> None:
        self.logger = logger
        self.sparse = 0
        self.dense: Counter[str] = Counter()
        self.latest = ""
        """:meth:`summary` of the latest call that has ended."""
        self._logged: set[str] = set()

    def note_dense(self, reason: str, query: torch.Tensor, level: int = logging.INFO) -> None:
        """Count a dense attention; its reason is logged once for each shape of query."""
        self.dense[reason] += 1
        self.log_once(level, f"dense attention for query {tuple(query.shape)}: {reason}")

    def log_once(self, level: int, words: str) -> None:
        """Log a line the first time."""
        if words not in self._logged:
            self._logged.add(words)
            self.logger.log(level, "MHLA: %s.", words)

    def summary(self) -> str:
        """Return for example "sparse in 1,160 of 1,200 attentions, 40 dense: dense steps"; empty before the first."""
        count = self.sparse + self.dense.total()
        reasons = "".join(f", {number:,} dense: {reason}" for reason, number in self.dense.most_common())
        return f"sparse in {self.sparse:,} of {count:,} attentions{reasons}" if count else ""

    def end(self) -> None:
        """Log the summary of a call that has ended, and begin again."""
        if (summary := self.summary()) and summary != self.latest:
            self.logger.info("MHLA: %s", summary)
            self.latest = summary
        self.sparse = 0
        self.dense.clear()


class Seen(NamedTuple):
    """One patched attention, as it is shown while a patch is measured. Tensors are (B, N, H, D), after RoPE."""

    layer: str
    """Name of the self-attention."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grid: Shape
    extra: Extra
    """Tokens before and after the grid's."""
    key_mask: torch.Tensor | None
    exact: Callable[[], torch.Tensor]
    """Computes the output of the model's own attention."""
    reference: Callable[[], torch.Tensor]
    """Computes that of the patched one in float64."""
    output: torch.Tensor
    """That of the patched one."""


Watch = Callable[[Seen], torch.Tensor]
"""Returns what an attention goes on with."""


class Call(NamedTuple):
    """One forward of a patched model, as its attentions see it."""

    patch: Any = None
    """The patch whose forward runs."""
    grid: Shape = ()
    extra: Counts = (0, 0)
    """Extra tokens before and after the grid's, in the sequence that an attention sees."""
    rows_alike: bool = False
    """Whether a mask with a row for every query is the same for all queries of the grid."""
    pads_behind_grid: bool = False
    """Whether a mask means that the grids of samples begin at different tokens."""
    dense_layers: int = 0
    """How many attentions over the grid stay dense first, in a model whose layers are not known."""
    step: Step | None = None
    """The denoising step; None if it is unknown, or outside of sampling."""
    is_dense: bool = False
    """Whether the step runs full attention."""
    records_residual: bool = False
    """Whether it also measures what sparse attention loses."""
    branches: tuple[BranchState, ...] = ()
    """Where residuals are, for every equal part of the batch; empty if none are kept."""
    run: Run | None = None
    """The running call of a pipeline that it belongs to; None outside of sampling."""
    errors: Errors | None = None
    """Where dense steps write what they have measured."""
    split: Any = None
    """The processes over which the tokens of MHLA are split; None for one process."""
    mode: Any = None
    """What answers PyTorch's function during the forward; None in models that dispatch."""
    tally: Tally | None = None
    watch: Watch | None = None
    rule: ContentRule | None = None
    """How lists are chosen on the grid; None where it was not looked up for the whole forward."""
    outer: Any = None
    """The call in which the forward began, such as that of a student that asks a patched teacher."""


class _Held:
    """The calls of a thread; an object, because torch.compile does not support context variables."""

    call: Call | None = None
    layer: torch.Tensor | None = None
    """Number of the self-attention that runs, on the CPU; None outside of a patched one."""
    part = 0
    """How many calls of attention it has made so far."""
    over_grid = 0
    """How many attentions over the grid its forward has made, in a model whose layers are not known."""
    backend: str | None = None
    """Backend that the user has chosen for the attention that runs; None for diffusers' active one."""
    in_every_step = False
    """Whether patches run in every step, for forwards outside of sampling."""
    off: tuple[Any, ...] = ()
    """Patches that are switched off."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = _Held()


_THREAD = _Thread()


def held() -> _Held:
    """Return what this thread works on."""
    return _THREAD.held


@contextmanager
def within(call: Call | None) -> Iterator[None]:
    """Set the call of this thread, and restore the previous one at the end."""
    state = held()
    before, state.call = state.call, call
    try:
        yield
    finally:
        state.call = before


@contextmanager
def in_every_step() -> Iterator[None]:
    """Run patches in every step within the context, for forwards outside of sampling such as a validation loss."""
    state = held()
    before, state.in_every_step = state.in_every_step, True
    try:
        yield
    finally:
        state.in_every_step = before


@contextmanager
def switched_off(*patches: Any) -> Iterator[None]:
    """Let models attend as before their patches, in this thread, within the context."""
    state = held()
    state.off = (*state.off, *patches)
    try:
        yield
    finally:  # takes out its own alone, as contexts of generators may end in any order
        off = list(state.off)
        for patch in patches:
            off.remove(patch)
        state.off = tuple(off)


def is_off(patch: Any) -> bool:
    """Whether a patch is switched off in this thread."""
    return patch in held().off


class LayerHook:
    """Says which self-attention runs, before and after its forward.

    Args:
        number: of the layer.
    """

    def __init__(self, number: int) -> None:
        self.number = torch.tensor(number, device="cpu")
        """A tensor, so that compiled blocks share a graph."""

    def attach(self, attn: torch.nn.Module) -> None:
        """Hook an attention. Fixed keys in place of PyTorch's running numbers, which would be guards of every graph."""
        attn._forward_pre_hooks[KEY] = self.begin  # type: ignore[index]
        attn._forward_hooks[KEY] = self.end  # type: ignore[index]
        attn._forward_hooks_always_called[KEY] = True  # type: ignore[index]

    @staticmethod
    def detach(attn: torch.nn.Module) -> None:
        """Undo :meth:`attach`."""
        for hooks in (attn._forward_pre_hooks, attn._forward_hooks, attn._forward_hooks_always_called):
            hooks.pop(KEY, None)  # type: ignore[call-overload]

    def begin(self, module: Any, args: Any) -> None:
        """Before the forward."""
        state = held()
        state.layer, state.part = self.number, 0
        state.backend = getattr(getattr(module, "processor", None), CHOSEN_BACKEND, None)

    def end(self, module: Any, args: Any, output: Any) -> None:
        """After the forward, also one that failed."""
        held().layer = None


KEY = "mhla"
"""Under which hooks are registered with a module."""
CHOSEN_BACKEND = "_backend_before_mhla"
"""Attribute of a processor that keeps the attention backend which the user has chosen."""


class CarryingCheckpoint:
    """diffusers' function that runs a block under gradient checkpointing; the call goes along.

    The block runs again during the backward pass, possibly in another thread and after other forwards.
    """

    ATTRIBUTE = "_gradient_checkpointing_func"
    """Attribute of a diffusers transformer."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, block: Any, *args: Any) -> Any:
        """Run a block; when it runs again, the thread has the call and the mode of now."""
        if torch.compiler.is_compiling():  # recomputes its graph, which contains the grid
            return self.checkpoint(block, *args)
        call = held().call

        def run(*again: Any) -> Any:
            if held().call is call:  # the forward itself
                return block(*again)
            mode = None if call is None else call.mode
            with within(call), mode or nullcontext():
                return block(*again)

        return self.checkpoint(run, *args)

    @classmethod
    def put_on(cls, module: Any) -> None:
        """Wrap the function of a module that has one."""
        checkpoint = getattr(module, cls.ATTRIBUTE, None)
        if checkpoint is not None and not isinstance(checkpoint, cls):
            setattr(module, cls.ATTRIBUTE, cls(checkpoint))

    @classmethod
    def take_off(cls, module: Any) -> None:
        """Undo :meth:`put_on`."""
        carrying = getattr(module, cls.ATTRIBUTE, None)
        if isinstance(carrying, cls):
            setattr(module, cls.ATTRIBUTE, carrying.checkpoint)
