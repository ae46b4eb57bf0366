"""The arguments of one attention: a :class:`Call` of MHLA or of sparse attention.

In sparse attention every query block of every head attends with softmax to the key blocks (:mod:`.layout`) of its list,
which a rule finds. Extra tokens (text in one sequence with an image, class and register tokens) have no place on the
token grid, so they are in no block of it. They are few, so every query attends to them with softmax, and they attend to
everything with softmax.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal, get_args

import torch

from ..errors import check_choice
from .blocks import list_length, mask_of_lists
from .layout import Extra, Shape, block_count, blocks_of_range
from .rope import Rotary

Order = Literal["content", "curve"]
"""Order of the keys in blocks."""
Far = Literal["second-order", "means"]
"""How blocks that are not listed take part; see :mod:`mhla_diffusers.attention.sparse`."""
DEFAULT_DENSITY = 0.1
"""Part of all pairs of uniform blocks in the lists."""
_BLOCK_SIZES = (64, 32, 16, 8, 4)
"""Default sizes of uniform blocks: 64 fill one block of a matrix product."""
_LEAST_QUERY_BLOCKS, _LEAST_KEY_BLOCKS = 64, 128
"""Blocks that a sequence has at least where it is long enough; with fewer, a list of 5 % is a block or two."""
_MOST_KEYS = 32
"""Largest default block of keys: with 64 the error of one attention is a third larger (``studies/real_weights``)."""


def check_denominator(feature_map: str, eps: float, normalize: bool, beside_softmax: bool, causal: str | None) -> None:
    """Raise ValueError if the normaliser of a query can be 0.

    ``beside_softmax``: whether the own block is attended to with softmax.
    """
    if beside_softmax and not normalize:
        raise ValueError(
            "normalize=False does not work with own='softmax', whose weights share the denominator; use normalize=True."
        )
    if normalize and feature_map == "relu" and eps <= 0 and (beside_softmax or causal == "token"):
        raise ValueError(
            f"eps={eps} lets the relu feature map's normaliser be 0 here; it must be positive, such as 1e-6."
        )


@dataclass(frozen=True, kw_only=True)
class UniformBlocks:
    """Tokens per block of queries and of keys in sparse attention.

    Raises:
        ValueError: sizes that are not positive or do not divide each other, or an unknown order.
    """

    block_size: int
    key_block_size: int = 0
    """Must divide ``block_size``; 0 for as many."""
    order: Order = "content"
    """"content": every head sorts the keys of each stretch of the curve (:mod:`.order`); "curve": none does."""

    def __post_init__(self) -> None:
        if self.key_block_size == 0:
            object.__setattr__(self, "key_block_size", self.block_size)
        for name, size in (("block_size", self.block_size), ("key_block_size", self.key_block_size)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive number of tokens, such as 64.")
        if self.block_size % self.key_block_size:
            raise ValueError(
                f"key_block_size={self.key_block_size} must divide block_size={self.block_size}, for example "
                f"{self.block_size // 2 or 1}."
            )
        check_choice("order", self.order, get_args(Order))

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a query block and of a key block."""
        return self.block_size, self.key_block_size


@dataclass(frozen=True)
class ContentRule(UniformBlocks):
    """Rule for lists chosen at every call (:func:`mhla_diffusers.attention.sparse.choose_by_content`)."""

    block_size: int
    density: float
    """Part of all pairs of blocks that is listed; every query block gets at least one key block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.density, Real) and 0 < self.density <= 1):
            raise ValueError(f"density={self.density!r} must be more than 0 and at most 1.")

    @classmethod
    def on(
        cls,
        grid: Sequence[int],
        density: float,
        block_size: int | None = None,
        key_block_size: int | None = None,
        order: Order = "content",
    ) -> "ContentRule":
        """Return the rule for a token grid; block sizes that are None are chosen to fit it.

        They are the largest of 64, 32, 16, 8 and 4 tokens with at least 64 blocks of queries and 128 of keys, whose
        blocks are 32 at most. Keys have blocks below 16, which the fused kernels lack, only where queries have.
        """
        tokens, query, key = math.prod(list(grid)), block_size, key_block_size
        if query is None:
            if key is not None:
                raise ValueError(
                    f"key_block_size={key} needs block_size, which it must divide; give both, for example "
                    f"block_size={2 * key}."
                )
            query = next((size for size in _BLOCK_SIZES if tokens >= _LEAST_QUERY_BLOCKS * size), _BLOCK_SIZES[-1])
            smallest = 16 if query >= 16 else 4
            sizes = [size for size in _BLOCK_SIZES if smallest <= size <= min(query, _MOST_KEYS)]
            key = next((size for size in sizes if tokens >= _LEAST_KEY_BLOCKS * size), smallest)
        rule = cls(query, density, key_block_size=key or query, order=order)
        return replace(rule, density=1.0) if rule.listed_on(grid) == 1 else rule

    def listed_on(self, grid: Sequence[int]) -> float:
        """Return the density on a token grid, after rounding to whole key blocks per query block, at least one."""
        blocks = block_count(grid, self.key_block_size)
        return list_length(self.density, blocks) / blocks


@dataclass(frozen=True)
class BlockLists(UniformBlocks):
    """Key blocks listed for every query block of a head, as :func:`.sparse.with_lists` finds them."""

    block_size: int
    keys: torch.Tensor
    """int64 (S, H, T, n) for T query blocks, of all samples (S = 1) or each: ascending, -1 behind shorter lists."""
    key_blocks: int
    """K, key blocks of the grid."""

    def mask(self) -> torch.Tensor:
        """Which key blocks are listed: bool (S, H, T, K)."""
        return mask_of_lists(self.keys, self.key_blocks)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments that MHLA and sparse attention share; :mod:`.api` describes them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grid: Shape
    rotary: Rotary | None = None
    key_mask: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MHLACall(Call):
    """The arguments of :func:`mhla_diffusers.attention.mhla_attention`."""

    mixing: torch.Tensor
    blocks: Shape
    feature_map: str = "relu"
    rope: str = "after"
    normalize: bool = True
    eps: float = 1e-6
    output_norm: torch.Tensor | None = None
    output_gate: torch.Tensor | None = None
    linear_weight: torch.Tensor | None = None
    causal: str | None = None
    first: int = 0
    """Place on the grid of the first token, where the call has a part of the tokens."""

    @property
    def own_blocks(self) -> slice:
        """Return the MHLA blocks that may contain the call's tokens: the rows of the mixing matrix that it needs."""
        tokens = self.query.shape[1]
        if self.first == 0 and tokens == math.prod(self.grid):
            return slice(0, math.prod(self.blocks))
        return blocks_of_range(self.grid, self.blocks, self.first, tokens)


@dataclass(frozen=True, kw_only=True)
class SparseCall(Call):
    """The arguments of :func:`mhla_diffusers.attention.sparse_attention`."""

    sparse: BlockLists | ContentRule
    far: Far = "second-order"
    pooled_bias: torch.Tensor | None = None
    """β, (H,), or (B, H) where it was fitted."""
    state_weight: torch.Tensor | None = None
    """γ, likewise."""
    extra: Extra = (0, 0)
    """Tokens before and after those of the grid in the sequence."""

    def extra_last(self, x: torch.Tensor) -> torch.Tensor:
        """Move all extra tokens of a sequence (B, N, ...) after the grid's, keeping their order."""
        before, end = self.extra[0], x.shape[1] - self.extra[1]
        return torch.cat([x[:, before:end], x[:, :before], x[:, end:]], dim=1) if before else x

    def in_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`extra_last`."""
        before, end = self.extra[0], x.shape[1] - sum(self.extra)
        parts = x[:, end : end + before], x[:, :end], x[:, end + before :]
        return torch.cat(parts, dim=1) if before else x
