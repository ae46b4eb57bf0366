"""What length_study.py will take: tokens, FLOPs and memory counted from shapes, and seconds predicted for an H100."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from length_model import TEXT_DIM, Row, Size, make_model, rows_of

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.demo.adaptation import DIFFUSION
from mhla_diffusers.reporting import text_table
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig
from mhla_diffusers.training.estimate import estimate

FORWARD_RATE, TRAINING_RATE = 180e12, 164e12
"""FLOP/s of softmax attention, forward alone and with the backward pass. FlashAttention-2 in docs/results.md took 16.9
and 64.9 ms of an H100 for 31,500 tokens of 12 heads of 128; heads of 64 are assumed to reach half of that rate."""
SPARSE_RATE = 36e12
"""Of what replaces it: 71 TFLOP/s, as the sparse kernel of the version that was measured reached, halved alike."""
REST_RATE = 112e12
"""Of all else. In Wan2.1-1.3B's compiled forward at 480x800 it reached 447 TFLOP/s (190 of 516 ms, docs/results.md);
with a quarter of the channels a FLOP moves four times the bytes, so a quarter of that is assumed."""
START, CLASSIFIER, CALIBRATION, TIMING = 25.0, 20.0, 3.0, 1.5
COMPILED, COMPILED_BACKWARD = 15.0, 30.0
"""Seconds of single things, which are assumed; compiling blocks of another Wan transformer took about 15 s."""


@dataclass(frozen=True)
class Counts:
    """Of one update."""

    flops: int
    bytes: int
    """Weights, gradients, moments and activations; without the allocator's and the kernels' own."""


def softmax_flops(size: Size, frames: int, clips: int) -> float:
    """Of softmax attention in all layers, forward."""
    tokens = math.prod(size.grid) // size.frames * frames
    return 4.0 * size.layers * size.heads * size.head_dim * clips * tokens**2


def replaced_flops(size: Size, config: MHLAConfig, clips: int) -> float:
    """Of what replaces it in whole clips, as if in all layers."""
    return float(size.layers * clips * config.sizes_on(size.grid, size.heads, size.head_dim).flops)


def count_update(size: Size, config: MHLAConfig | None, stage: StageConfig, frames: int, clips: int) -> Counts:
    """Forwards and backwards of an update, on the meta device."""
    with torch.device("meta"):
        model = make_model(size)
        if config is not None:
            apply_mhla(model, config)
    sample = {
        "latents": torch.empty(3, frames, size.pixels, size.pixels, device="meta"),
        "encoder_hidden_states": torch.empty(size.digits, TEXT_DIM, device="meta"),
    }
    precision = "bf16" if size.precision == "bfloat16" else "no"
    settings = TrainingConfig("-", (stage,), patch=config, batch_size=clips, precision=precision)
    (found,) = estimate(model, sample, settings).stages
    return Counts(found.flops, found.weight_bytes + found.training_bytes + found.activation_bytes)


@cache
def linear_flops(size: Size, clips: int) -> float:
    """Of a forward of whole clips but for self-attention: two for every weight and token, and cross-attention."""
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in make_model(size).blocks.parameters())
    tokens = clips * math.prod(size.grid)
    return 2.0 * tokens * (weights + 2 * size.layers * size.digits * size.heads * size.head_dim)


def forward_seconds(size: Size, config: MHLAConfig | None) -> float:
    """Of as many whole clips as are run at a time."""
    attention = softmax_flops(size, size.frames, size.batch) / FORWARD_RATE
    if config is not None:
        attention = replaced_flops(size, config, size.batch) / SPARSE_RATE
    return attention + linear_flops(size, size.batch) / REST_RATE


def row_seconds(size: Size, row: Row) -> float:
    """Of measuring and, where it is, adapting a row."""
    forward = forward_seconds(size, row.config)
    seconds = TIMING + CALIBRATION * (row.linear == "calibrated")
    seconds += forward * size.held_out / size.batch + forward_seconds(size, None) + forward
    if row.generated:
        seconds += forward * size.sampler_steps * 2 * size.clips / size.batch
    if row.is_compiled:
        seconds += COMPILED
    if row.adapted:
        teacher, backward = forward_seconds(size, None), 2.5 * forward
        steps = size.adapted_steps
        if row.config is None:
            seconds += (size.transfer_steps + steps) * (forward + backward)
        else:
            seconds += size.transfer_steps * (teacher + forward + backward) + steps * (teacher + forward + backward)
        seconds += COMPILED_BACKWARD
    return seconds


def predict_parts(size: Size) -> dict[str, float]:
    """Part → seconds."""
    rows = rows_of(size)

    def seconds_of(chosen: Iterable[Row]) -> float:
        return sum(row_seconds(size, row) for row in chosen)

    return {
        "start of a slice": START,
        "classifier": CLASSIFIER,
        "softmax from scratch": size.training_seconds,
        "softmax measured, and the gate": row_seconds(size, rows[0]),
        "without training, with clips": seconds_of(row for row in rows[1:] if row.generated and not row.adapted),
        "adapted": seconds_of(row for row in rows if row.adapted),
        "the rest of the grid": seconds_of(row for row in rows if not row.generated),
    }


def plan(size: Size) -> str:
    """The table of updates, and that of the parts."""
    updates = []
    full = StageConfig(1, 1e-3, "all", DIFFUSION)
    for frames, clips, share in size.curriculum:
        counts = count_update(size, None, full, frames, clips)
        attention = softmax_flops(size, frames, clips)
        rest = 3 * linear_flops(size, clips) * frames / size.frames
        seconds = 3.5 * attention / TRAINING_RATE + rest / REST_RATE
        number = max(0.0, share * size.training_seconds - COMPILED_BACKWARD) / seconds
        updates.append((f"softmax, {clips} clips of {frames} frames", counts, seconds, f"{number:.0f}"))
    adapted = next(row for row in rows_of(size) if row.adapted and row.config is not None)
    forward = forward_seconds(size, adapted.config)
    step = forward_seconds(size, None) + 3.5 * forward
    for name, weights, number in (
        ("transfer", ObjectiveWeights(transfer=1.0), size.transfer_steps),
        ("distillation", ObjectiveWeights(distillation=1.0), size.adapted_steps),
    ):
        stage = StageConfig(1, 1e-3, "attention", weights)
        counts = count_update(size, adapted.config, stage, size.frames, size.batch)
        updates.append((f"{name}, {adapted.name}", counts, step, f"{number}"))
    rows = rows_of(size)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in make_model(size).parameters())
    return "\n".join(
        [
            f"{math.prod(size.grid):,} tokens of a clip, {'x'.join(map(str, size.grid))}; {weights:,} weights; "
            f"{len(rows)} rows, {sum(row.adapted for row in rows)} of them adapted",
            "",
            text_table(
                ("update", "TFLOP, counted", "GB, counted", "ms, predicted", "updates"),
                [
                    (name, f"{counts.flops / 1e12:.1f}", f"{counts.bytes / 1e9:.1f}", f"{1000 * seconds:.0f}", number)
                    for name, counts, seconds, number in updates
                ],
                right=True,
            ),
            "",
            text_table(
                ("part", "minutes on an H100, predicted"),
                [(name, f"{seconds / 60:.1f}") for name, seconds in predict_parts(size).items()],
                right=True,
            ),
        ]
    )
