"""The context of a call: what the attentions of a forward need to know of it.

One immutable object per call. The hooks of a patched transformer set it before a forward, per thread, and take it back
after it; it is restored while gradient checkpointing runs a block again. It belongs to the call and not to the layers,
which two threads share and which PEFT, ``deepcopy`` and checkpointing copy or run again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Optional, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroup

from ..config import Step

Grid = tuple[int, ...]
T = TypeVar("T")


class Carried(Protocol):
    """One forward of a denoising run, as its attentions see it (:mod:`mhla_diffusers.patching.carry`)."""

    def show(self, dense: torch.Tensor, patched: torch.Tensor, number: int, part: int) -> None:
        """Keep what an attention loses in a dense step."""

    def add(self, output: torch.Tensor, number: int, part: int) -> torch.Tensor:
        """Add what a dense step before has shown to the output of an attention, in place, and return it."""


class CallContext(NamedTuple):
    """What a thread's transformer is working on."""

    grid: Grid | None = None
    """Token grid of the forward that runs; None outside of one."""
    tables: dict[Any, Any] | None = None
    """Tables of RoPE that its attentions have made, by what the model passed; None outside of one, and in graphs."""
    split: ProcessGroup | None = None
    """The processes over which its tokens are split; None for one process."""
    disabled: bool = False
    """Whether patched attentions run what they ran before the patch."""
    step: Step | None = None
    """The denoising step, where the pipeline passes it to ``cache_context``."""
    step_disabled: bool = False
    """Whether the patch is disabled in that step. Worked out outside of the transformer: a compiled one that compared
    numbers of steps would be compiled again for each."""
    half: str | None = None
    """Name that the pipeline gives to ``cache_context`` for the half of the guidance."""
    shows: bool = False
    """Whether patched attentions run besides what they ran before the patch, to show what they lose."""
    step_shows: bool = False
    """The same, as ``step_disabled``."""
    carried: Carried | None = None
    """The place of a forward in its denoising run, where dense steps show what the others carry."""
    in_every_step: bool = False
    """Whether patches run in every step, for forwards outside a denoising loop."""
    off: tuple[object, ...] = ()
    """Processors whose attentions run what they ran before the patch: of models within ``mhla_disabled``."""
    of: object = None
    """Handle of the transformer whose forward runs; None outside of one."""
    outer: Optional["CallContext"] = None
    """Context in which the forward began, such as that of a student that asks a patched teacher."""


class _Held:
    """Holds a thread's context: an object of its own, because torch.compile follows no context variables."""

    context = CallContext()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = _Held()


_THREAD = _Thread()


def current() -> CallContext:
    """Return the context of this thread."""
    return _THREAD.held.context


def enter(context: CallContext) -> None:
    """Set the context of this thread. Prefer :func:`within`, which restores the previous one."""
    _THREAD.held.context = context


@contextmanager
def within(context: CallContext) -> Iterator[None]:
    """Give this thread another context, and restore the previous one at the end."""
    before = current()
    enter(context)
    try:
        yield
    finally:
        enter(before)


def of_this_thread(held: dict[int, T], make: Callable[[], T]) -> T:
    """Return what this thread holds, made at its first call; what threads that have ended held is dropped."""
    own = threading.get_ident()
    if own not in held:
        for ended in held.keys() - {thread.ident for thread in threading.enumerate()}:
            held.pop(ended, None)
        held[own] = make()
    return held[own]


def is_off(owner: object) -> bool:
    """Whether an owner of attentions is within :func:`switched_off` in this thread."""
    return any(one is owner for one in current().off)


@contextmanager
def switched_off(owners: Sequence[object]) -> Iterator[None]:
    """Let the attentions of processors or patches run what they ran before, in this thread, within the context."""
    enter(current()._replace(off=(*current().off, *owners)))
    try:
        yield
    finally:  # takes out its own alone, as contexts of generators may end in any order
        off = list(current().off)
        for owner in owners:
            if owner in off:
                off.remove(owner)
        enter(current()._replace(off=tuple(off)))


def split_of(transformer: Any) -> ProcessGroup | None:
    """Return the processes over which diffusers' context parallelism splits a transformer's tokens; None for one."""
    config = getattr(getattr(transformer, "_parallel_config", None), "context_parallel_config", None)
    return None if config is None else config._flattened_mesh.get_group()


def call_context(**fields: Any) -> AbstractContextManager[None]:
    """Change fields of this thread's :class:`CallContext` within the context.

    Raises:
        ValueError: an unknown field.
    """
    return within(current()._replace(**fields))


class CarryingCheckpoint:
    """diffusers' function that runs a block under gradient checkpointing; it carries the call's context along.

    The block runs again during the backward pass, possibly in another thread and after other forwards.
    """

    ATTRIBUTE = "_gradient_checkpointing_func"
    """Switches gradient checkpointing on: of diffusers' transformer, or of every block of transformers' models."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def __call__(self, block: Any, *args: Any) -> Any:
        """Run a block; when it runs again, it has the context of now."""
        if torch.compiler.is_compiling():  # recomputes its graph, which contains the grid
            return self.checkpoint(block, *args)
        context = current()

        def run(*again: Any) -> Any:
            with within(context):
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
