"""``mhla bench parallel``, the counted part: bytes that one process sends for one self-attention of one layer."""

import warnings
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache

import torch

from ...families import Model
from ..forecast import Question
from ..models import Size, family_of_model
from ..shapes import Shape
from ..shapes import shape_of as shape_on
from .attentions import MHLA, SOFTMAX, attend, make_share
from .traffic import Traffic
from .world import Layout, pretended

Variant = tuple[str, bool]
"""One of ``ATTENTIONS``, and whether by heads (Ulysses), not round a ring."""
VARIANTS: tuple[Variant, ...] = tuple((name, by_heads) for name in (SOFTMAX, MHLA) for by_heads in (False, True))
"""Of which tables have a column."""
_MOST_TOKENS = 2**20


@dataclass(frozen=True)
class Count:
    """What one process of several sends for one attention, in its forward and in forward and backward."""

    forward: int
    with_backward: int


@dataclass(frozen=True)
class Counts:
    """Of one attention and number of processes."""

    model: str
    processes: int
    shape: Shape
    sent: dict[Variant, Count]
    """Variants that the processes can share; heads that they do not divide they cannot exchange."""


def name_of(variant: Variant) -> str:
    """As tables and figures call it."""
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
    fitting = [variant for variant in VARIANTS if is_looked_at(variant, shape, processes)]
    found = {
        variant: Count(
            *(sent(variant[0], shape, layout_of(variant, processes), again).bytes for again in (False, True))
        )
        for variant in fitting
    }
    return Counts(model.name, processes, shape, found)


def is_looked_at(variant: Variant, shape: Shape, processes: int) -> bool:
    """Whether so many processes can share an attention so."""
    return not variant[1] or shape.heads % processes == 0


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
