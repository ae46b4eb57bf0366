"""``mhla bench parallel``: bytes that one process sends for one self-attention of one layer, counted by shapes."""

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...attention import initial_mixing, mhla_attention
from ...families import Model
from ...reporting import write_table
from ..forecast import Question
from ..models import Size, family_of_model
from ..problems import random_rotary
from ..shapes import Shape
from ..shapes import shape_of as shape_on
from .traffic import Traffic
from .world import Layout, World, pretended

SOFTMAX, MHLA = "softmax", "MHLA"
Variant = tuple[str, bool]
"""One of the two, and whether by heads (Ulysses), not round a ring."""
VARIANTS: tuple[Variant, ...] = tuple((name, by_heads) for name in (SOFTMAX, MHLA) for by_heads in (False, True))
"""Of which tables have a column."""
_MOST_TOKENS = 2**20
_PASSES = ("forward", "forward+backward")
_SENT = ("model", "processes", "tokens", "pass")
_FROM = ("model", "processes", "softmax", "less from, forward", "less from, forward+backward")


@dataclass(frozen=True)
class OwnShare:
    """What one process has of an attention."""

    shape: Shape
    world: World
    tensors: dict[str, torch.Tensor]
    """Query, key and value, each (1, own tokens, H, D), and the mixing matrices (H, M, M) float32."""
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    """(cos, sin), each (1, own tokens, 1, D), where the model has RoPE."""


def make_share(shape: Shape, world: World, device: torch.device, dtype: torch.dtype, backward: bool) -> OwnShare:
    """Random values of this process's tokens, a mixing matrix per head as patches have it, and RoPE.

    Args:
        shape: the whole attention.
        world: the processes, which divide its tokens.
        device: where; "meta" for shapes alone.
        dtype: of query, key and value.
        backward: whether they take gradients.

    Raises:
        ValueError: the processes do not divide the tokens, or the heads.
    """
    first, count = world.parallel.own_share(shape.tokens)
    world.parallel.head_counts(shape.heads)
    size = (1, count, shape.heads, shape.head_dim)
    tensors = {name: torch.randn(size, device=device, dtype=dtype) for name in ("query", "key", "value")}
    tensors["mixing"] = initial_mixing(shape.blocks).to(device).repeat(shape.heads, 1, 1)
    rotary = None
    if shape.rotary_axes is not None:
        cos, sin = random_rotary(shape, device)
        rotary = cos[:, first : first + count], sin[:, first : first + count]
    return OwnShare(shape, world, {name: x.requires_grad_(backward) for name, x in tensors.items()}, rotary)


def attend(attention: str, share: OwnShare) -> torch.Tensor:
    """The output of softmax, by diffusers, or of MHLA for this process's tokens, (1, own tokens, H, D)."""
    if attention == MHLA:
        shape = share.shape
        given: dict[str, Any] = {**share.tensors, "grid": shape.grid, "blocks": shape.blocks}
        if share.rotary is not None:
            given |= {"rotary": share.rotary, "rotary_axes": shape.rotary_axes}
        return mhla_attention(**given, parallel=share.world.parallel)
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    inputs = [share.tensors[name] for name in ("query", "key", "value")]
    # the backend with a log-sum-exp, which a ring needs, that has shapes without a GPU
    backend = "native" if inputs[0].device.type == "cpu" else "_native_flash"
    return dispatch_attention_fn(*inputs, backend=backend, parallel_config=share.world.config)


@dataclass(frozen=True)
class Counts:
    """Of one attention and number of processes."""

    model: str
    processes: int
    shape: Shape
    sent: dict[Variant, tuple[int, int]]
    """Bytes of a forward, and of forward and backward, by the variants that the processes can share; heads that they do
    not divide they cannot exchange."""


def name_of(variant: Variant) -> str:
    """As tables call it."""
    attention, by_heads = variant
    return f"{attention}, {'Ulysses' if by_heads else 'ring'}"


def layout_of(variant: Variant, processes: int) -> Layout:
    """Of so many processes."""
    return Layout(ulysses=processes) if variant[1] else Layout(ring=processes)


def shape_of(model: Model, size: Size) -> Shape:
    """The self-attention of a model at a size, with the block counts that it is measured with."""
    question = Question(model, size, family_of_model(model).default_config)
    return shape_on(model, question.grid, f"{model.name}-{size}")


@dataclass(frozen=True)
class Sent:
    """Bytes of one attention, of one process."""

    ring: int
    """That it sends to processes of its ring."""
    ulysses: int
    """That it sends to processes with which it exchanges tokens for heads."""
    delivered: int
    """Of what collectives deliver to it."""

    @property
    def bytes(self) -> int:
        """All that it sends."""
        return self.ring + self.ulysses


@cache
def sent(attention: str, shape: Shape, layout: Layout, backward: bool) -> Sent:
    """What the process in the middle sends for one attention, of which shapes alone are computed; all send the same.

    Query, key and value are bfloat16.

    Args:
        attention: softmax or MHLA.
        shape: of the whole.
        layout: at least two processes.
        backward: forward and backward.

    Raises:
        ValueError: the processes do not divide the tokens and both degrees are more than one, or not the heads.
    """
    with warnings.catch_warnings(), pretended(layout, layout.processes // 2) as world:
        # diffusers' ring calls a collective by a name that PyTorch has deprecated
        warnings.filterwarnings("ignore", message=".*all_gather_tensor.*is deprecated", category=FutureWarning)
        if shape.tokens % layout.processes and layout.ulysses == 1:
            # shares differ by a token, as with ring_anything=True, and softmax is given as many as the longest has
            world = replace(world, parallel=replace(world.parallel, anything=True))
        share = make_share(shape, world, torch.device("meta"), torch.bfloat16, backward)
        with Traffic() as traffic:
            output = attend(attention, share)
            if backward:
                output.backward(torch.empty_like(output))
        of_ring, of_heads = (
            traffic.bytes_of(group.name) if group.size > 1 else 0
            for group in (world.parallel.ring, world.parallel.ulysses)
        )
    return Sent(of_ring, of_heads, sum(one.delivered for one in traffic.sent))


def count(model: Model, shape: Shape, processes: int) -> Counts:
    """Count every variant that the processes can share.

    Raises:
        ValueError: the processes do not divide the tokens.
    """
    found = {}
    for variant in VARIANTS:
        if not variant[1] or shape.heads % processes == 0:
            layout = layout_of(variant, processes)
            one, both = (sent(variant[0], shape, layout, backward).bytes for backward in (False, True))
            found[variant] = one, both
    return Counts(model.name, processes, shape, found)


@dataclass(frozen=True)
class Crossing:
    """From how many tokens on MHLA round a ring sends less than softmax."""

    model: str
    processes: int
    rival: Variant
    tokens: int | None
    """None for no number of frames that was looked at."""
    with_backward: int | None
    """The same for forward and backward."""


def crossings(model: Model, size: Size, processes: int) -> list[Crossing]:
    """Found by halving over the frames of the token grid, up to about 2^20 tokens; MHLA's bytes do not grow with them.

    Args:
        model: of videos.
        size: its height and width, of which the processes divide the tokens of a frame.
        processes: how many.
    """
    base = shape_of(model, size)

    def at(frames: int) -> Shape:
        return replace(base, grid=(frames, *base.grid[1:]))

    def first(rival: Variant, backward: bool) -> int | None:
        def less(frames: int) -> bool:
            shape = at(frames)
            own = sent(MHLA, shape, Layout(ring=processes), backward).bytes
            return own < sent(rival[0], shape, layout_of(rival, processes), backward).bytes

        low = high = model.blocks[0]
        while not less(high):  # sizes far beyond the crossing take long to count
            if at(high).tokens > _MOST_TOKENS:
                return None
            low, high = high + 1, 2 * high
        return at(low + bisect_left(range(low, high), True, key=less)).tokens

    rivals = [variant for variant in VARIANTS if variant[0] == SOFTMAX]
    fitting = [variant for variant in rivals if not variant[1] or model.heads % processes == 0]
    return [Crossing(model.name, processes, rival, first(rival, False), first(rival, True)) for rival in fitting]


def write_sent(found: Sequence[Counts], folder: Path) -> str:
    """Bytes that one process sends, as ``sent.md`` and ``sent.csv``; the Markdown is returned."""
    rows = []
    for one in found:
        for index, name in enumerate(_PASSES):
            cells = (f"{one.sent[variant][index] / 1e6:,.1f}" if variant in one.sent else "-" for variant in VARIANTS)
            rows.append((one.model, str(one.processes), f"{one.shape.tokens:,}", name, *cells))
    return write_table((*_SENT, *(f"{name_of(variant)}, MB" for variant in VARIANTS)), rows, folder, "sent")


def write_crossings(found: Iterable[Crossing], folder: Path) -> str:
    """From which N on MHLA round a ring sends less, as ``crossings.md`` and ``crossings.csv``."""
    rows = []
    for one in found:
        cells = ("none looked at" if tokens is None else f"{tokens:,}" for tokens in (one.tokens, one.with_backward))
        rows.append((one.model, str(one.processes), name_of(one.rival), *cells))
    return write_table(_FROM, rows, folder, "crossings")
