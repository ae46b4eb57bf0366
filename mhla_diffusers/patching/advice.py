"""What to say of settings on a token grid where others would do better, with numbers."""

import math
from typing import Any

from ..attention.layout import block_count, fit_blocks
from ..config import MHLAConfig, PatchConfig, SparseConfig
from .patched import Patched


def advice_on(patched: Patched, grid: tuple[int, ...]) -> dict[str, str]:
    """Return the warnings of :func:`advise` of a patched transformer of a family on a grid."""
    family = patched.of_family
    if family.computes != "softmax":
        return {}
    heads, head_dim = family.heads(next(iter(patched.attentions.values())))
    return advise(patched.config, grid, heads, head_dim, family.extra_tokens)


def advise(config: PatchConfig, grid: tuple[int, ...], heads: int, head_dim: int, extra: int) -> dict[str, str]:
    """Return warnings of a patch on a grid, in place of softmax attention.

    Args:
        config: its settings.
        grid: token grid.
        heads: H.
        head_dim: D.
        extra: extra tokens.

    Returns:
        "blocks": sparse attention has so few blocks that smaller ones come closer to softmax attention. "cost": the
        patch computes no less than that, with what does, if anything.
    """

    def cost(**changes: Any) -> float:
        sizes = config.replace(**changes).sizes_on(grid, heads, head_dim, extra)
        return sizes.flops / sizes.softmax_flops

    tokens, found, changes = math.prod(grid), {}, list[dict[str, Any]]()
    if isinstance(config, SparseConfig) and config.density < 1:
        rule, fitting = config.rule_on(grid), SparseConfig().rule_on(grid)
        sizes = {"block_size": fitting.block_size, "key_block_size": fitting.key_block_size}
        usual = {"density": min(config.density, SparseConfig.density)}
        changes = [sizes, usual, {"far": "means"}, sizes | usual, usual | {"far": "means"}]
        number = block_count(grid, rule.key_block_size)
        is_coarse = number < block_count(grid, fitting.key_block_size) and rule.listed_on(grid) < 1
        if is_coarse and cost(**sizes) < 1:
            found["blocks"] = (
                f"block_size={rule.block_size} cuts the {tokens} tokens of this grid into {number} blocks of keys, and "
                f"a query attends to {rule.listed_on(grid):.0%} of them one by one. block_size={fitting.block_size} "
                f"with key_block_size={fitting.key_block_size}, which block_size=None picks, comes closer to softmax "
                f"attention, at {cost(**sizes):.0%} of its cost; now it is {cost():.0%}."
            )
    elif isinstance(config, MHLAConfig):
        changes = [{"blocks": fit_blocks(config.blocks_on(grid), grid)}]
    if changes and cost() >= 1:
        best = min(changes, key=lambda change: cost(**change))
        best = {name: value for name, value in best.items() if value != getattr(config, name)}
        words = ", ".join(f"{name}={value!r}" for name, value in best.items())
        price = ", less close to softmax attention" if {"density", "far"} & best.keys() else ""
        advice = f" Cheaper settings: {words} computes {cost(**best):.0%}{price}." if cost(**best) < 1 else ""
        found["cost"] = (
            f"On a grid of {tokens} tokens this patch computes {cost():.0%} of what softmax attention does: it gains "
            f"nothing, so leave the model unpatched at this size.{advice} Larger sizes are where a patch pays."
        )
    return found
