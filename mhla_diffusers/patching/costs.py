"""What the attention of a layer costs on a token grid, counted from shapes alone."""

import math
from dataclasses import dataclass, replace
from typing import Any

from ..attention.costs import AttentionSizes
from ..attention.layout import block_count
from ..config import MHLAConfig
from ..families import Family
from ..reporting import scaled


@dataclass(frozen=True)
class AttentionCost:
    """Of self-attention without its projections, for one sample and one forward; sums of layers add up."""

    flops: int = 0
    softmax_flops: int = 0
    """Of softmax attention in its place."""
    listed_pairs: int = 0
    """Pairs of a query and a key that a head attends to with softmax, one by one."""
    all_pairs: int = 0
    """Of all such pairs, which softmax attention in its place sees."""
    held_bytes: int = 0
    """Held beside query, key, value and output: KV states and pooled keys and values, in float32."""
    softmax_bytes: int = 0
    """What softmax attention holds where its weights are written out, in float32; a fused kernel holds next to none."""

    def __add__(self, other: "AttentionCost") -> "AttentionCost":
        """The two one after another: what is held is held by one layer at a time."""
        return AttentionCost(
            self.flops + other.flops,
            self.softmax_flops + other.softmax_flops,
            self.listed_pairs + other.listed_pairs,
            self.all_pairs + other.all_pairs,
            max(self.held_bytes, other.held_bytes),
            max(self.softmax_bytes, other.softmax_bytes),
        )

    def __str__(self) -> str:
        listed = f", softmax over {self.listed_pairs / self.all_pairs:.1%} of all pairs" if self.listed_pairs else ""
        flops, softmax_flops = (scaled(one, 1000, "FLOP") for one in (self.flops, self.softmax_flops))
        held, softmax_bytes = (scaled(one, 1024, "B") for one in (self.held_bytes, self.softmax_bytes))
        return (
            f"{flops} (softmax {softmax_flops}){listed}\n"
            f"a layer holds {held} beside query, key, value and output (softmax, written out, {softmax_bytes})"
        )


def attention_sizes(
    config: MHLAConfig, grid: tuple[int, ...], heads: int, head_dim: int, extra: int = 0, *, in_order: bool = False
) -> AttentionSizes:
    """What the cost of an attention with a patch depends on.

    Args:
        config: of the patch.
        grid: token grid.
        heads: H.
        head_dim: D.
        extra: extra tokens.
        in_order: whether the attention before the patch sees no later token,
            :attr:`mhla_diffusers.families.Family.own_attention_is_causal`.
    """
    sizes = AttentionSizes(math.prod(grid), heads, head_dim, math.prod(config.blocks_on(grid)), extra=extra)
    sizes = _in_order(sizes) if in_order else sizes
    if config.causal is not None:
        return _causal_sizes(sizes, config, grid)
    if config.sparse == "none":
        return sizes
    return sizes.with_sparse(block_count(grid, config.block_size), config.listed_on(grid), pooled=config.pooled)


def _in_order(sizes: AttentionSizes) -> AttentionSizes:
    """In place of softmax attention that sees no later token."""
    return replace(sizes, seen_pairs=sizes.heads * (sizes.tokens * (sizes.tokens + 1) // 2))


def _causal_sizes(sizes: AttentionSizes, config: MHLAConfig, grid: tuple[int, ...]) -> AttentionSizes:
    """With the pairs within frame blocks that a query sees one by one."""
    length = int(config.block_length or grid[0]) * math.prod(grid[1:])
    lengths = [min(length, sizes.tokens - start) for start in range(0, sizes.tokens, length)]
    of_order = config.causal == "token"
    own = sizes.heads * sum(n * (n + 1) // 2 if of_order else n * n for n in lengths)
    if config.sparse == "own":
        return replace(sizes, block_pairs=own)
    return replace(sizes, own_pairs=own if of_order else 0)


def sizes_of(
    attn: Any, family: Family, config: MHLAConfig | None, grid: tuple[int, ...], extra: int = 0
) -> AttentionSizes:
    """What the cost of a model's self-attention depends on.

    Args:
        attn: the attention, whose heads are counted.
        family: whose own attention a layer without a patch has.
        config: of its patch; None without one.
        grid: token grid.
        extra: extra tokens.
    """
    heads, head_dim = family.adapter_of(attn).heads(attn)
    if config is not None:
        return attention_sizes(config, grid, heads, head_dim, extra, in_order=family.own_attention_is_causal)
    sizes = AttentionSizes(math.prod(grid), heads, head_dim, extra=extra)
    if family.own_attention != "softmax":
        return sizes
    sizes = sizes.with_sparse(1, 1.0, pooled=False)
    if not family.own_attention_is_causal:
        return sizes
    sizes = _in_order(sizes)
    return replace(sizes, block_pairs=sizes.pairs)


def own_block_density(config: MHLAConfig, family: Family, grid: tuple[int, ...] | None) -> float:
    """Part of the pairs that a causal patch attends to with softmax, those within frame blocks.

    Args:
        config: of the patch.
        family: whose own attention sees all of them, or those of earlier tokens.
        grid: token grid; None for that of the longest sequence without ``beyond``.
    """
    longest = config.blocks[0] * int(config.block_length or 1), *(1 for _ in config.blocks[1:])
    sizes = attention_sizes(config, grid or longest, 1, 1, in_order=family.own_attention_is_causal)
    return sizes.listed_pairs / sizes.pairs


def attention_cost(
    attn: Any, family: Family, config: MHLAConfig | None, grid: tuple[int, ...], extra: int = 0
) -> AttentionCost:
    """Cost of one self-attention, whose arguments are those of :func:`sizes_of`."""
    sizes = sizes_of(attn, family, config, grid, extra)
    return AttentionCost(
        sizes.flops, sizes.softmax_flops, sizes.listed_pairs, sizes.pairs, sizes.held_bytes, sizes.weight_bytes
    )
