"""Time and work of a transformer by part: self-attention, its projections, cross-attention, feed-forward, the rest.

Timing and counting use the same hooks on the same modules.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..families import get_family
from ..patching import MHLAProcessor
from ..patching.describe import sizes_of
from .shapes import Cost
from .timing import Timing, summarise, synchronize

ATTENTION = "self-attention"
"""Without its projections."""
REST = "rest"
"""Norms, modulation, residuals: what is left."""
_PROJECTIONS = "projections"
PARTS = (ATTENTION, _PROJECTIONS, "cross-attention", "feed-forward", REST)

_Mark = Any
"""A CUDA event, or seconds."""
_Begun = TypeVar("_Begun")
_Number = TypeVar("_Number", int, float)


def time_parts(transformer: Any, run: Callable[[], object], device: torch.device) -> dict[str, Timing]:
    """Part → seconds of it in a forward, of three repetitions; modules are timed by hooks."""

    def mark() -> _Mark:
        if device.type != "cuda":
            synchronize(device)
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(first: _Mark, last: _Mark) -> float:
        return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000

    found: dict[str, list[float]] = {part: [] for part in PARTS}
    spans: list[tuple[str, _Mark, _Mark]] = []

    def end(part: str, module: nn.Module, begun: _Mark, given: Any, output: Any) -> None:
        spans.append((part, begun, mark()))

    for _ in range(3):
        spans.clear()
        with _hooks(transformer, mark, end):
            synchronize(device)
            start = mark()
            run()
            stop = mark()
            synchronize(device)
        totals = dict.fromkeys(PARTS, 0.0)
        for part, first, last in spans:
            totals[part] += between(first, last)
        for part, seconds in _told_apart(totals, between(start, stop)).items():
            found[part].append(seconds)
    return {part: summarise(seconds) for part, seconds in found.items()}


def count_parts(transformer: Any, inputs: Mapping[str, Any]) -> dict[str, Cost]:
    """FLOPs of each part of one forward, and the bytes that it must move.

    FLOPs are counted operator by operator, except for a sparse branch, where they come from its sizes: eager operations
    pad short blocks, kernels do not.

    A module reads its weights and its inputs and writes its output once. Self-attention reads query, key and value and
    writes the output of its heads, and block states and pooled keys are written and read. In the rest, norms,
    modulation and residuals, every operator of PyTorch reads and writes for itself.

    The transformer and its inputs are on the meta device, where nothing is computed.
    """
    flops, moved = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    filled_up = 0
    family = get_family(transformer)
    grid = family.grid_of_arguments(transformer, inputs)

    def begin() -> tuple[int, int]:
        traffic.parts_open += 1
        return int(counter.get_total_flops()), flops[_PROJECTIONS]

    def end(part: str, module: nn.Module, begun: tuple[int, int], given: Any, output: Any) -> None:
        nonlocal filled_up
        traffic.parts_open -= 1
        counted = int(counter.get_total_flops()) - begun[0]
        flops[part] += counted
        if part != ATTENTION:
            moved[part] += tensor_bytes((given, output, list(module.parameters())))
            return
        # attentions of transformers have no processor until they are patched
        processor = getattr(module, "processor", None)
        config = processor.config if isinstance(processor, MHLAProcessor) else None
        adapter = family.adapter_of(module)
        arguments = adapter.arguments(*given)
        sizes = sizes_of(module, family, config, grid, sum(adapter.extra(arguments, math.prod(grid))))
        tokens = arguments["hidden_states"]
        if config is not None and config.sparse != "none":
            filled_up += counted - (flops[_PROJECTIONS] - begun[1]) - len(tokens) * sizes.flops
        # query, key, value and output of the heads, and what MHLA holds between them
        ends = 4 * (sizes.tokens + sizes.extra) * sizes.heads * sizes.head_dim * tokens.itemsize
        moved[part] += len(tokens) * (ends + sizes.moved_bytes)

    with torch.no_grad(), family.without_values(), _Traffic() as traffic, FlopCounterMode(display=False) as counter:
        with _hooks(transformer, begin, end):
            transformer(**inputs)
        flops = _told_apart(flops, int(counter.get_total_flops()))
    flops[ATTENTION] -= filled_up
    moved[REST] = traffic.bytes
    return {part: Cost(flops[part], moved[part]) for part in PARTS}


class _Traffic(TorchDispatchMode):
    """Bytes that operators read and write while no module of a part runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.parts_open = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = _output_of(func, args, kwargs or {})
        if not self.parts_open and not func.is_view:
            self.bytes += tensor_bytes((args, kwargs, output))
        return output


_Meta = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor of the meta device."""


def _output_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives on the meta device.

    PyTorch works out the shape of many outputs in Python, for up to milliseconds; layers are alike, so that most
    operators have been asked the same before. Views and what is written in place are left to PyTorch.
    """
    if func.is_view or func._schema.is_mutable:
        return func(*args, **kwargs)
    try:
        key = (func, _key_of(args), _key_of(tuple(kwargs.items())))
        known = _known_outputs.get(key)
    except TypeError:  # an argument that has no hash
        return func(*args, **kwargs)
    if known is not None:
        outputs = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in known
        )
        return outputs if len(outputs) > 1 else outputs[0]
    output = func(*args, **kwargs)
    outputs = output if isinstance(output, tuple) else (output,)
    if all(isinstance(x, torch.Tensor) and x.is_meta for x in outputs):
        _known_outputs[key] = tuple((x.shape, x.stride(), x.dtype) for x in outputs)
    return output


_known_outputs: dict[Any, tuple[_Meta, ...]] = {}


def _key_of(argument: Any) -> Any:
    """What an output's shape, strides and type follow from."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key_of, argument))
    return type(argument), argument


def tensor_bytes(tensors: Any) -> int:
    """Bytes of all tensors in nested lists, tuples and mappings."""
    return sum(x.numel() * x.itemsize for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))


def _told_apart(totals: Mapping[str, _Number], whole: _Number) -> dict[str, _Number]:
    """Parts that add up to the whole: projections lie inside of self-attention; the rest is what is left."""
    inside = sum(totals[part] for part in PARTS if part not in (_PROJECTIONS, REST))
    attention = totals[ATTENTION] - totals[_PROJECTIONS]
    return {**totals, ATTENTION: attention, REST: whole - inside}


@contextmanager
def _hooks(
    transformer: Any, begin: Callable[[], _Begun], end: Callable[[str, nn.Module, _Begun, Any, Any], None]
) -> Iterator[None]:
    """Within the context ``begin`` is called before every module of a part and gives a mark, and ``end`` after it.

    ``end`` takes the part, the module, its mark, its arguments (args and kwargs) and its output.
    """
    marks: list[_Begun] = []
    handles = []
    for part, module in _modules(transformer):

        def before(*_: Any) -> None:
            marks.append(begin())

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, part: str = part) -> None:
            end(part, module, marks.pop(), (args, kwargs), output)

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _modules(transformer: Any) -> Iterator[tuple[str, nn.Module]]:
    family = get_family(transformer)
    for attn in family.self_attentions(transformer).values():
        yield ATTENTION, attn
        yield from ((_PROJECTIONS, linear) for linear in family.adapter_of(attn).projections(attn))
    cross = ("attn2",) if "attn2" not in family.attentions else ()
    for block in family.blocks_of(transformer).values():
        for part, names in (("cross-attention", cross), ("feed-forward", family.feed_forwards)):
            for name in names:
                module = getattr(block, name, None)
                if isinstance(module, nn.Module):
                    yield part, module
