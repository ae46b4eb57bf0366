"""What a call tells its attentions: the token grid, and whether they attend as before the patch.

Hooks of the transformer note it for their own thread, and a recomputation knows it again. It belongs to the call and
not to the layers, which two threads share and which PEFT, ``deepcopy`` and checkpointing copy or run again.
"""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention import MHLAState
from ..attention.parallel.place import Parallel
from ..attention.rope import Rotary
from ..families import Family, grid_of_attention
from .compiling import allow_graphs, give_back_graphs
from .costs import attention_sizes
from .layer import MHLALayer, layer_of
from .parallel import Processes, parallel_of

logger = logging.getLogger(__name__)

Grid = tuple[int, ...]

_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute in which gradient checkpointing is switched on with what runs a block: of diffusers' transformer, or of
every block of transformers' models.
"""


class InStream(Protocol):
    """What a step of a video that is generated frame block after frame block tells its attentions."""

    keep: bool
    """Whether its tokens belong to the past of the next step."""

    def state_of(self, attn: Any, grid: Grid) -> MHLAState:
        """What the frame blocks before have left behind in an attention."""

    def rotary(self, rotary: Rotary | None, grid: Grid) -> Rotary | None:
        """RoPE of the step's place in the video, from what the model hands to its attentions."""


class _Forward:
    """What a thread's transformer is working on."""

    grid: Grid | None = None
    parallel: Parallel | None = None
    attends_as_before: bool = False
    stream: InStream | None = None


class _Thread(threading.local):
    """One :class:`_Forward` per thread, an object of its own since torch.compile follows no context variables."""

    def __init__(self) -> None:
        self.forward = _Forward()


_THREAD = _Thread()


@contextmanager
def token_grid(grid: Grid | None, parallel: Parallel | None = None) -> Iterator[None]:
    """Within the context patched attentions that this thread runs have a token grid, and processes that share it."""
    forward = _THREAD.forward
    before = forward.grid, forward.parallel
    forward.grid, forward.parallel = grid, parallel
    try:
        yield
    finally:
        forward.grid, forward.parallel = before


@contextmanager
def in_stream(step: InStream) -> Iterator[None]:
    """Within the context the transformer that this thread runs goes on with a video."""
    forward = _THREAD.forward
    before, forward.stream = forward.stream, step
    try:
        yield
    finally:
        forward.stream = before


def stream_of_call() -> InStream | None:
    """The step of a video that the call is; None of one that stands by itself."""
    return _THREAD.forward.stream


def attend_as_before(wanted: bool) -> None:
    """Until the forward of this thread's transformer ends, patched attentions run what they ran before the patch."""
    _THREAD.forward.attends_as_before = wanted


def attends_as_before() -> bool:
    """What :func:`attend_as_before` was told."""
    return _THREAD.forward.attends_as_before


def parallel_of_call(processor: Any) -> Parallel | None:
    """The processes between which the tokens of the call that an attention is in are split.

    Raises:
        ValueError: diffusers has told the processor of processes, and no transformer tells which tokens are its own.
    """
    forward = _THREAD.forward
    if forward.grid is None and parallel_of(processor._parallel_config) is not None:
        raise ValueError(
            "Under context parallelism a MHLAProcessor that diffusers' own set_attn_processor has put in place does "
            "not know its tokens; use mhla_diffusers.set_attn_processor(pipe.transformer, processor) or "
            "mhla_diffusers.apply_mhla(pipe, ...)."
        )
    return forward.parallel


def grid_of_call(attn: Any, rotary: Rotary | None) -> Grid:
    """The token grid of the call that an attention is in.

    Args:
        attn: the attention.
        rotary: the tables that the model hands to it.

    Raises:
        ValueError: nothing tells it.
    """
    grid = _THREAD.forward.grid
    if grid is None and not torch.compiler.is_compiling():  # a compiled graph reads no values
        grid = grid_of_attention(attn, rotary)
    if grid is None:
        raise ValueError(_unknown_grid(layer_of(attn)))
    return grid


def _unknown_grid(layer: MHLALayer | None) -> str:
    if layer is not None and layer.original_processor is not None:
        return (
            "The token grid is known while the transformer runs, and this attention runs outside of it. Let gradient "
            "checkpointing be done by transformer.enable_gradient_checkpointing(), which carries the grid along; or "
            "give the processor the grid of every input in tokens, MHLAProcessor(..., grid=(frames, height, width)), "
            "or (height, width) for images."
        )
    return (
        "MHLAProcessor does not know the token grid: this model, or torch.compile, does not tell it to an attention. "
        "Call mhla_diffusers.set_attn_processor(pipe.transformer, processor) or mhla_diffusers.apply_mhla(pipe, ...), "
        "which read it from every input, or give it to the processor, grid=(frames, height, width) in tokens, or "
        "(height, width) for images."
    )


class TokenGridHooks:
    """Hooks of a patched transformer: before a forward they note the token grid of its input, after it they forget it.

    Under gradient checkpointing a block runs again during the backward pass, in whatever thread and after whatever
    other forwards; :class:`_Carrying` gives it the grid of the forward that it belongs to.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.latest: Grid | None = None
        """Grid of the latest input, to be shown; no attention reads it."""
        self._has_told = False
        self._handles: list[RemovableHandle] = []
        self.processes: Processes | None = None
        allow_graphs(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copied or unpickled transformer."""
        vars(self).update(state)
        allow_graphs(self)

    def install(self, transformer: nn.Module) -> None:
        """Put the hooks on a transformer."""
        self.processes = Processes(transformer, self.family)
        trunk = self.family.trunk(transformer)
        self._handles = [
            trunk.register_forward_pre_hook(self, with_kwargs=True),
            trunk.register_forward_hook(self.forget, always_call=True),
        ]

    def remove(self, transformer: nn.Module) -> None:
        """Take them away."""
        for handle in self._handles:
            handle.remove()
        for module in self._that_checkpoint(transformer):
            carrying = getattr(module, _CHECKPOINT, None)
            if isinstance(carrying, _Carrying):
                setattr(module, _CHECKPOINT, carrying.checkpoint)
        give_back_graphs(self)

    def __call__(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the grid off the arguments of the trunk."""
        arguments = self.family.named_arguments(args, kwargs)
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        name = self.family.forward_names[0]
        latents = arguments.get(name)
        if latents is None:
            raise ValueError(
                f"{type(transformer).__name__} was called without {name}, of which it reads the token grid."
            )
        for tensor in [latents] if isinstance(latents, torch.Tensor) else latents:
            for axis in range(1, tensor.ndim) if isinstance(tensor, torch.Tensor) else ():
                torch._dynamo.mark_static(tensor, axis)
        grid = tuple(int(size) for size in self.family.grid_of_arguments(transformer, arguments))
        _THREAD.forward.parallel = None
        if self.processes is not None:
            self.processes.meet()
            self.processes.check(arguments, grid)
            _THREAD.forward.parallel = self.processes.parallel
        if not torch.compiler.is_compiling() and not self._has_told and grid != self.latest:
            self._tell_if_nothing_is_gained(transformer, grid)
        _THREAD.forward.grid = self.latest = grid
        for module in self._that_checkpoint(transformer):
            checkpoint = getattr(module, _CHECKPOINT, None)
            if checkpoint is not None and not isinstance(checkpoint, _Carrying):
                setattr(module, _CHECKPOINT, _Carrying(checkpoint))

    def _tell_if_nothing_is_gained(self, transformer: nn.Module, grid: Grid) -> None:
        """Warn, once, of a grid on which the patch computes no less than the softmax attention that it replaces."""
        layers = (layer_of(module) for module in transformer.modules() if hasattr(module, "mhla"))
        layer = next((layer for layer in layers if layer is not None), None)
        if layer is None or self.family.own_attention != "softmax" or layer.config.causal is not None:
            return
        sizes = attention_sizes(layer.config, grid, layer.heads, layer.head_dim, self.family.extra_tokens)
        if layer.config.listed < 1 and sizes.flops >= sizes.softmax_flops:
            self._has_told = True
            logger.warning(
                "On a grid of %d tokens this patch computes %.0f%% of what softmax attention does, so it gains nothing "
                "here. Fewer MHLA blocks (blocks), a lower density or larger uniform blocks (block_size) cost less; "
                "softmax attention costs more at larger sizes.",
                math.prod(grid),
                100 * sizes.flops / sizes.softmax_flops,
            )

    def _that_checkpoint(self, transformer: nn.Module) -> list[Any]:
        """Modules that may be told to run a block, or themselves, under gradient checkpointing."""
        return [transformer] if self.family.is_diffusion else list(self.family.blocks_of(transformer).values())

    def forget(self, *_: Any) -> None:
        """The forward is over."""
        _THREAD.forward.grid = _THREAD.forward.parallel = None
        _THREAD.forward.attends_as_before = False


class _Carrying:
    """diffusers' function that runs a block under gradient checkpointing, with the token grid carried along."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def __call__(self, block: Any, *args: Any) -> Any:
        """Run a block; when it runs again, it has the grid of now."""
        if torch.compiler.is_compiling():  # recomputes its graph, of which the grid is a part
            return self.checkpoint(block, *args)
        forward = _THREAD.forward
        run = partial(_run_on, forward.grid, forward.parallel, forward.attends_as_before, block)
        return self.checkpoint(run, *args)


def _run_on(grid: Grid | None, parallel: Parallel | None, as_before: bool, block: Any, *args: Any) -> Any:
    forward = _THREAD.forward
    before, forward.attends_as_before = forward.attends_as_before, as_before
    try:
        with token_grid(grid, parallel):
            return block(*args)
    finally:
        forward.attends_as_before = before
