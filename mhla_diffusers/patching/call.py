"""The running call, per thread: what attentions need to know about the current forward.

A hook on the transformer sets an immutable :class:`Call` before a forward, a hook on every patched self-attention says
which layer runs, and :func:`leave` takes both back. The call belongs to the forward, because two threads share the
layers, and PEFT, ``deepcopy`` and gradient checkpointing copy them or run them again.
"""

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

from ..attention.layout import Extra, Shape
from ..config import Step
from ..families import Counts
from .residual import BranchState, Errors


class Log:
    """Lines that are logged once, with the logger of a patch or an engine."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._said: set[str] = set()
        self._summary = ""

    def once(self, level: int, line: str) -> None:
        """Log a line the first time."""
        if line not in self._said:
            self._said.add(line)
            self.logger.log(level, "%s", line)

    def summary(self, tally: "Tally") -> None:
        """Log what a call has counted, unless the call before counted the same."""
        if str(tally) not in ("", self._summary):
            self._summary = str(tally)
            self.logger.info("MHLA: %s", tally)


class Tally:
    """What one running call has counted and measured of a patch: its sparse and dense attentions, and their errors."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.sparse = 0
        self.dense: Counter[str] = Counter()
        self.errors: Errors = {}

    def note_dense(self, reason: str, query: torch.Tensor, level: int = logging.INFO) -> None:
        """Count a dense attention; its reason is logged once per shape of query."""
        self.dense[reason] += 1
        self.log.once(level, f"MHLA: dense attention for query {tuple(query.shape)}: {reason}.")

    def __str__(self) -> str:
        """For example "sparse in 1,160 of 1,200 attentions, 40 dense: dense steps"; empty before the first."""
        count = self.sparse + self.dense.total()
        reasons = "".join(f", {number:,} dense: {reason}" for reason, number in self.dense.most_common())
        return f"sparse in {self.sparse:,} of {count:,} attentions{reasons}" if count else ""


class Seen(NamedTuple):
    """One patched attention, shown while a patch is measured. Tensors are (B, N, H, D), after RoPE."""

    layer: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grid: Shape
    extra: Extra
    key_mask: torch.Tensor | None
    exact: Callable[[], torch.Tensor]
    """Computes the output of the model's own attention."""
    reference: Callable[[], torch.Tensor]
    """Computes the patched output in float64."""
    output: torch.Tensor


Watch = Callable[[Seen], torch.Tensor]


class Run:
    """One running call of a pipeline: how far it is, and its branches and tally of every patch."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.tallies: dict[Hashable, Tally] = {}
        self._timesteps: object = None
        self._first: Hashable = None
        self._branches: dict[Hashable, list[BranchState]] = {}
        """By the patch's id, or an engine's name."""
        self._used: set[BranchState] = set()

    def branch(self, owner: Hashable, step: Step, timesteps: object, conditions: Any) -> tuple[BranchState, bool]:
        """Return the branch of a forward, by its conditions or else its order, and whether it begins a step."""
        last = self.step
        if last is None or step.count != last.count or step.index < last.index or timesteps is not self._timesteps:
            self.clear()
        begins = self.begin(step)
        if begins and owner != self._first:  # another expert has taken over
            self._branches.clear()
            self._first = owner
        self._timesteps = timesteps
        branches = self._branches.setdefault(owner, [])
        free = [one for one in branches if one not in self._used]
        if not free:
            branches.append(BranchState())
            free = branches[-1:]
        found = next((one for one in free if one.conditions() is conditions), free[0])
        self._used.add(found)
        if found.conditions() is not None and found.conditions() is not conditions:  # the earlier tensors still exist
            found.residuals.clear()
        if conditions is not None:
            found.conditions = weakref.ref(conditions)
        return found, begins

    def begin(self, step: Step) -> bool:
        """Begin a forward; return whether it begins a step. A branch that a whole step did not use has ended."""
        begins = self.step != step
        if begins:
            for branches in self._branches.values():
                branches[:] = filter(self._used.__contains__, branches)
            self._used.clear()
        self.step = step
        return begins

    def named(self, name: Hashable) -> BranchState:
        """Return the branch of a name, for an engine that distinguishes its branches itself."""
        branches = self._branches.setdefault(name, [])
        if not branches:
            branches.append(BranchState())
        self._used.add(branches[0])
        return branches[0]

    def clear(self) -> None:
        """Forget everything, as after a forward that failed."""
        self._branches.clear()
        self._used.clear()
        self.step = self._timesteps = None


class Call(NamedTuple):
    """One forward of a patched model, as its attentions see it."""

    patch: Any = None
    """The :class:`Patched` whose forward runs, or an engine."""
    grid: Shape = ()
    extra: Counts = (0, 0)
    rows_alike: bool = False
    pads_behind_grid: bool = False
    dense_layers: int = 0
    """How many attentions over the grid stay dense first, in a model whose layers are not known."""
    step: Step | None = None
    is_dense: bool = False
    records_residual: bool = False
    branches: tuple[BranchState, ...] = ()
    run: Run | None = None
    split: Any = None
    mode: Any = None
    """What answers PyTorch's function during the forward; None in models that dispatch."""
    tally: Tally | None = None
    watch: Watch | None = None


@dataclass(eq=False)
class _Held:
    """The calls of a thread; an object, because torch.compile does not support context variables."""

    call: Call | None = None
    layer: torch.Tensor | None = None
    """Number of the self-attention that runs, on the CPU; None outside of a patched one."""
    part: int = 0
    """How many calls of attention it has made so far."""
    over_grid: int = 0
    """How many attentions over the grid its forward has made, in a model whose layers are not known."""
    backend: str | None = None
    """Backend that the user has chosen for the attention that runs; None for diffusers' active one."""
    in_every_step: bool = False
    off: tuple[Any, ...] = ()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = _Held()


_THREAD = _Thread()


def held() -> _Held:
    """Return the calls of this thread."""
    return _THREAD.held


@_disable_dynamo
def enter(call: Call | None = None) -> tuple[Any, ...]:
    """Set the call of this thread; return what :func:`leave` brings back."""
    state = held()
    before = state.call, state.layer, state.part, state.over_grid, state.backend, torch._C._len_torch_function_stack()
    state.call, state.layer, state.part, state.over_grid, state.backend = call, None, 0, 0, None
    return before


@_disable_dynamo
def leave(before: tuple[Any, ...]) -> None:
    """Restore what this thread held before :func:`enter`, modes included, even after an interrupt."""
    state = held()
    state.call, state.layer, state.part, state.over_grid, state.backend, modes = before
    while torch._C._len_torch_function_stack() > modes:
        torch._C._pop_torch_function_stack()


@contextmanager
def within(call: Call | None) -> Iterator[None]:
    """Set the call of this thread, and bring back at the end what it held before."""
    before = enter(call)
    try:
        yield
    finally:
        leave(before)


@contextmanager
def in_every_step() -> Iterator[None]:
    """Context in which patches run in every step, for forwards outside of sampling such as a validation loss."""
    state = held()
    before, state.in_every_step = state.in_every_step, True
    try:
        yield
    finally:
        state.in_every_step = before


class LayerHook:
    """Records which self-attention is running, before and after its forward."""

    KEY = "mhla"
    CHOSEN_BACKEND = "_backend_before_mhla"
    """Attribute of a processor that keeps the attention backend which the user has chosen."""

    def __init__(self, number: int) -> None:
        self.number = torch.tensor(number, device="cpu")  # a tensor, so that compiled blocks share a graph

    def attach(self, attn: torch.nn.Module) -> None:
        """Hook an attention. Fixed keys in place of PyTorch's running numbers, which would be guards of every graph."""
        attn._forward_pre_hooks[self.KEY] = self.begin  # type: ignore[index]
        attn._forward_hooks[self.KEY] = self.end  # type: ignore[index]
        attn._forward_hooks_always_called[self.KEY] = True  # type: ignore[index]

    @classmethod
    def detach(cls, attn: torch.nn.Module) -> None:
        """Undo :meth:`attach`."""
        for hooks in (attn._forward_pre_hooks, attn._forward_hooks, attn._forward_hooks_always_called):
            hooks.pop(cls.KEY, None)  # type: ignore[call-overload]

    def begin(self, module: Any, args: Any) -> None:
        """Before the forward."""
        state = held()
        state.layer, state.part = self.number, 0
        state.backend = getattr(getattr(module, "processor", None), self.CHOSEN_BACKEND, None)

    def end(self, module: Any, args: Any, output: Any) -> None:
        """After the forward, also one that failed."""
        held().layer = None


class CarryingCheckpoint:
    """Carries the call through diffusers' gradient checkpointing, which may recompute a block in another thread."""

    ATTRIBUTE = "_gradient_checkpointing_func"

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
            with within(call), (None if call is None else call.mode) or nullcontext():
                return block(*again)

        return self.checkpoint(run, *args)
