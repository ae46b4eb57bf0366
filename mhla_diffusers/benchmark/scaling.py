"""Time and memory over the number of tokens N and of token blocks M (paper, Tab. 14)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from .candidates import PLAIN
from .conditions import Rates
from .correctness import check_operation
from .operation import fastest_backend, linear_attention, operation_row
from .problems import make_inputs
from .recorder import console
from .results import Row, Run
from .shapes import Shape
from .timing import Absent, Budget, Variant, time_interleaved

SOFTMAX = "softmax"
FIT_FROM_TOKENS = 8192
"""Below this, launches and caches decide, and time does not grow with N."""


@dataclass(frozen=True)
class ScalingConfig:
    """What to vary.

    Raises:
        ValueError: a value that is not allowed.
    """

    tokens: tuple[int, ...]
    """N, squares of the sides of the grids."""
    blocks: tuple[int, ...]
    """M, squares too."""
    heads: int = 6
    head_dim: int = 64
    """DiT-S/2's, as in the paper."""
    softmax_tokens: int = 2**20
    """Softmax attention is measured up to here."""

    def __post_init__(self) -> None:
        for name in ("tokens", "blocks"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one number.")
            for number in getattr(self, name):
                if number < 1 or math.isqrt(number) ** 2 != number:
                    near = (math.isqrt(max(number, 1))) ** 2
                    raise ValueError(
                        f"{name}={number} is no square number, as a square grid needs; for example {near}."
                    )
        if self.heads < 1 or self.head_dim < 1:
            raise ValueError(f"heads={self.heads} and head_dim={self.head_dim} must be positive.")


def default_config(device_type: str) -> ScalingConfig:
    """Up to a million tokens on a GPU and 36 864 on a CPU."""
    if device_type == "cpu":
        return ScalingConfig(tuple(s**2 for s in (32, 64, 96, 128, 192)), (4, 16, 64, 256), softmax_tokens=4096)
    return ScalingConfig(tuple(4**power for power in range(5, 11)), (4, 16, 64, 256, 1024))


def check_scaling(config: ScalingConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Check MHLA with every M.

    Raises:
        IncorrectAttentionError: it is wrong here.
    """
    for count in config.blocks:
        shape = _shape(config, min(config.tokens), count)
        check_operation(shape, device, dtype, fastest_backend(shape, device, dtype))


def benchmark_scaling(
    config: ScalingConfig, tokens: int, device: torch.device, dtype: torch.dtype, rates: Rates, budget: Budget
) -> list[Row]:
    """Time softmax, plain linear attention and MHLA with every M at one N, in turns.

    Args:
        config: what to vary; :func:`check_scaling` has been called with it.
        tokens: N.
        device: where.
        dtype: of query, key and value.
        rates: of the device.
        budget: how often.
    """
    whole = _shape(config, tokens, 1)
    backend, inputs = fastest_backend(whole, device, dtype), make_inputs(whole, device, dtype)
    shapes = {SOFTMAX: whole, PLAIN: whole}
    shapes |= {f"MHLA M={count}": _shape(config, tokens, count) for count in sorted(config.blocks) if count <= tokens}
    variants: dict[str, Variant] = {
        name: torch.no_grad()(linear_attention(shape, inputs, backend))
        for name, shape in shapes.items()
        if name != SOFTMAX
    }
    outcomes = time_interleaved({SOFTMAX: _softmax(config, tokens, inputs)} | variants, device, budget)
    return [
        operation_row(shapes[name], name, "forward", dtype, outcome, rates, "softmax" if name == SOFTMAX else "linear")
        for name, outcome in outcomes.items()
    ]


def fitted_exponent(rows: Sequence[Row], variant: str) -> float | None:
    """Exponent e of time ~ N^e by least squares on logarithms, from 8192 tokens up; None with fewer than two N."""
    points = [
        (math.log(row.tokens), math.log(row.median))
        for row in rows
        if row.variant == variant
        and row.median is not None
        and row.tokens is not None
        and row.tokens >= FIT_FROM_TOKENS
    ]
    if len({x for x, _ in points}) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def mixing_overhead(run: Run, row: Row) -> float | None:
    """Time of an MHLA row beyond plain linear attention with the same N, as a fraction of the latter's."""
    plain = next((other.median for other in run.rows if other.case == row.case and other.variant == PLAIN), None)
    if plain is None or row.median is None or row.blocks is None or row.blocks == 1:
        return None
    return row.median / plain - 1


def print_summary(run: Run) -> None:
    """The fitted exponents, and the overhead of mixing over N and M with M² ≤ N marked."""
    exponents = Table("variant", f"exponent of time in N, from {FIT_FROM_TOKENS} tokens", title="Growth")
    for variant in dict.fromkeys(row.variant for row in run.rows):
        exponent = fitted_exponent(run.rows, variant)
        exponents.add_row(variant, "too few N" if exponent is None else f"{exponent:.2f}")
    console().print(exponents)
    tokens = sorted({row.tokens for row in run.rows if row.tokens})
    counts = sorted({row.blocks for row in run.rows if row.blocks and row.blocks > 1})
    table = Table("M \\ N", *map(str, tokens))
    overheads = {(row.blocks, row.tokens): mixing_overhead(run, row) for row in run.rows}
    for m in counts:
        cells = [(overheads.get((m, n)), "*" if m**2 <= n else "") for n in tokens]
        table.add_row(str(m), *("" if value is None else f"{value:+.0%}{mark}" for value, mark in cells))
    console().print("Time beyond plain linear attention (* where M² ≤ N)", highlight=False)
    console().print(table)


def _shape(config: ScalingConfig, tokens: int, count: int) -> Shape:
    side = math.isqrt(tokens)
    return Shape(f"N={tokens}", (side, side), (math.isqrt(count),) * 2, config.heads, config.head_dim)


def _softmax(config: ScalingConfig, tokens: int, inputs: Sequence[torch.Tensor]) -> Variant:
    if tokens > config.softmax_tokens:
        return Absent(f"softmax attention is measured up to {config.softmax_tokens} tokens; see --softmax-tokens")
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return torch.no_grad()(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
