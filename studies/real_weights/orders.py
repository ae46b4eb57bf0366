"""Which keys a block should hold, on DINOv2-S without training: all rules of an order, in an attention of its own.

python studies/real_weights/orders.py --pixels 1036 > studies/real_weights/orders-1036.csv
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from dinov2 import open_model
from fetch import PATCH, photographs, pixels_of

from mhla_diffusers.attention.layout import layout_of

HEADS = 6
PHOTOGRAPHS = ("astronaut.png", "coffee.png")
HIDDEN = -1e30
"""Logit of what is not attended to."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    density: float = 0.05
    rule: str = "curve"
    """How keys are sorted within a stretch: a name of RULES, or "curve" for not at all."""
    stretch: int = 256
    key_block: int = 64
    query_block: int = 64
    sorts_queries: bool = False


def by_channel(rows: torch.Tensor) -> torch.Tensor:
    """Return the channel of largest variance of every part (..., L, D): (..., L)."""
    return _column(rows, rows.var(dim=-2))


def by_range(rows: torch.Tensor) -> torch.Tensor:
    """Return the channel of largest range, whose maximum and minimum are exact in any order of evaluation."""
    return _column(rows, rows.amax(dim=-2) - rows.amin(dim=-2))


def by_deviation(rows: torch.Tensor) -> torch.Tensor:
    """Return the channel of largest mean absolute deviation."""
    return _column(rows, (rows - rows.mean(dim=-2, keepdim=True)).abs().mean(dim=-2))


def by_power_step(rows: torch.Tensor) -> torch.Tensor:
    """Project on one power step from the channel of largest variance."""
    centred = rows - rows.mean(dim=-2, keepdim=True)
    column = _column(centred, centred.square().mean(dim=-2))
    return (centred @ (centred.mT @ column[..., None])).squeeze(-1)


def by_direction(rows: torch.Tensor) -> torch.Tensor:
    """Project on the main direction of every part."""
    centred = rows - rows.mean(dim=-2, keepdim=True)
    _, vectors = torch.linalg.eigh(centred.mT @ centred)
    return (centred @ vectors[..., -1:]).squeeze(-1)


def _column(rows: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    channel = score.argmax(dim=-1)[..., None, None].expand(*rows.shape[:-1], 1)
    return rows.gather(-1, channel).squeeze(-1)


RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channel": by_channel,
    "range": by_range,
    "deviation": by_deviation,
    "power step": by_power_step,
    "direction": by_direction,
}


def sorted_order(keys: torch.Tensor, rule: str, block: int, stretch: int) -> torch.Tensor:
    """Return the order of rows (H, N, D) of every head: int64 (H, N).

    Each stretch is halved until a part is one block. "head": by the head's main directions, one per level.
    """
    heads, count, channels = keys.shape
    order, whole, part, level = torch.arange(count).expand(heads, count).clone(), count // stretch * stretch, stretch, 0
    centred = keys - keys.mean(dim=1, keepdim=True)
    directions = torch.linalg.eigh(centred.mT @ centred)[1].flip(-1) if rule == "head" else None
    while part > block:
        rows = keys.gather(1, order[..., None].expand(-1, -1, channels))[:, :whole].view(heads, -1, part, channels)
        column = RULES[rule](rows) if directions is None else torch.einsum("hgld,hd->hgl", rows, directions[..., level])
        first = order[:, :whole].view(heads, -1, part).gather(-1, column.argsort(dim=-1, stable=True)).flatten(1)
        order, part, level = torch.cat([first, order[:, whole:]], dim=1), part // 2, level + 1
    return order


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: tuple[torch.Tensor, torch.Tensor], setting: Setting
) -> tuple[torch.Tensor, list[float]]:
    """Attend to listed blocks token by token, and to the means of all others; β is fitted on 256 queries.

    Args:
        q: (H, N, D) along the curve.
        k: likewise.
        v: likewise.
        extra: key and value (H, E, D) that every query attends to.
        setting: how.

    Returns:
        Output (H, N, D), and the squared error relative to softmax attention, per head.
    """
    heads, count, dim = q.shape
    scale, padding = dim**-0.5, -count % max(setting.query_block, setting.key_block)
    q, k, v = (torch.cat([x, x[:, -1:].expand(-1, padding, -1)], dim=1) for x in (q, k, v))
    real = torch.cat([torch.ones(count), torch.zeros(padding)]).expand(heads, -1)
    query_order = None
    if setting.rule != "curve":
        order = sorted_order(k, setting.rule, setting.key_block, setting.stretch)
        k, v = (x.gather(1, order[..., None].expand_as(x)) for x in (k, v))
        real = real.gather(1, order)
        if setting.sorts_queries:
            query_order = sorted_order(q, setting.rule, setting.query_block, setting.stretch)
            q = q.gather(1, query_order[..., None].expand_as(q))
    rows, blocks = q.shape[1], k.shape[1] // setting.key_block
    weight = real.view(heads, blocks, setting.key_block, 1)
    tokens = weight.sum(2).clamp_min(1e-9)
    by_block = [x.view(heads, blocks, setting.key_block, dim) for x in (k, v)]
    mean_k, mean_v = ((weight * x).sum(2) / tokens for x in by_block)
    spread = (weight * (by_block[0] - mean_k[:, :, None]).square()).sum(2) / tokens
    mean_q = q.view(heads, -1, setting.query_block, dim).mean(2)
    score = mean_q @ mean_k.mT * scale + (mean_q.square() @ spread.mT * scale**2).clamp_min(1e-20).log() / 2
    listed = max(1, round(setting.density * blocks))
    output, errors, hidden = torch.empty_like(q), [], (1 - real) * HIDDEN
    sampled = torch.arange(0, count, max(1, count // 256))
    for h in range(heads):
        chosen = score[h].topk(listed, dim=-1).indices
        is_listed = torch.zeros(len(chosen), blocks, dtype=torch.bool).scatter_(-1, chosen, value=True)
        is_listed = is_listed.repeat_interleave(setting.query_block, 0)
        near_k, near_v = (x[h][chosen].flatten(1, 2) for x in by_block)
        near = q[h].view(-1, setting.query_block, dim) @ near_k.mT * scale
        near = (near + hidden[h].view(blocks, setting.key_block)[chosen].flatten(1)[:, None]).view(rows, -1)
        far = (q[h] @ mean_k[h].T * scale + tokens[h, :, 0].log()).masked_fill(is_listed, HIDDEN)
        always = q[h] @ extra[0][h].T * scale
        top = torch.stack([near.amax(-1), far.amax(-1), always.amax(-1)]).amax(0)[:, None]
        near, far, always = ((x - top).exp() for x in (near, far, always))
        near_sum = (near.view(-1, setting.query_block, near.shape[1]) @ near_v).view(rows, dim) + always @ extra[1][h]
        near_total, far_sum, far_total = near.sum(-1, True) + always.sum(-1, True), far @ mean_v[h], far.sum(-1, True)
        logits = torch.cat([q[h][sampled] @ k[h].T * scale + hidden[h], q[h][sampled] @ extra[0][h].T * scale], dim=1)
        truth = logits.softmax(-1) @ torch.cat([v[h], extra[1][h]])
        tried = torch.linspace(-3, 3, 25).exp()
        outputs = [((near_sum + b * far_sum) / (near_total + b * far_total))[sampled] for b in tried]
        beta = tried[int(torch.stack([(x - truth).square().sum() for x in outputs]).argmin())]
        output[h] = (near_sum + beta * far_sum) / (near_total + beta * far_total)
        errors.append(((output[h][sampled] - truth).square().sum() / truth.square().sum()).item())
    if query_order is not None:
        output = torch.empty_like(output).scatter_(1, query_order[..., None].expand_as(output), output)
    return output[:, :count], errors


def cost(setting: Setting, tokens: int) -> float:
    """Return keys that a query attends to, listed and pooled, over N."""
    blocks = -(-tokens // setting.key_block)
    listed = max(1, round(setting.density * blocks))
    return (listed * setting.key_block + blocks - listed) / tokens


def settings() -> Iterator[Setting]:
    """Yield all rows of the table."""
    for density in (0.05, 0.1, 0.15):
        yield Setting(density)
    for rule in (*RULES, "head"):
        yield Setting(rule=rule)
    for key_block in (32, 16):
        yield Setting(key_block=key_block)
        for rule in ("channel", "range", "head"):
            yield Setting(key_block=key_block, rule=rule)
    for key_block in (64, 32):
        for stretch in (128, 512, 1024):
            yield Setting(rule="channel", stretch=stretch, key_block=key_block)
        for density in (0.025, 0.1, 0.15, 0.25):
            yield Setting(density, "channel", key_block=key_block)
        for density in (0.05, 0.15):
            yield Setting(density, "channel", query_block=128, key_block=key_block)
            yield Setting(density, "channel", key_block=key_block, sorts_queries=True)


def main() -> None:
    """Write one CSV row per setting to standard output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", type=int, default=1036, help="side of the photographs, a multiple of 14")
    pixels = parser.parse_args().pixels
    model, side = open_model(), pixels // PATCH
    photos = [pixels_of(x, pixels) for x in photographs() if x.name in PHOTOGRAPHS]
    curve = layout_of((side, side), 64).order.long()[: side * side]
    current: Setting | None = None
    errors: list[float] = []

    def replace(attention: Any) -> None:
        original = attention.forward

        def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            if current is None:
                return original(hidden_states, **kwargs)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (f(hidden_states)[0].unflatten(-1, (HEADS, -1)).transpose(0, 1) for f in projections)
            output = torch.empty_like(q)
            output[:, :1] = torch.nn.functional.scaled_dot_product_attention(q[:, :1], k, v)
            along = (x[:, 1:][:, curve] for x in (q, k, v))
            output[:, 1 + curve], found = attend(*along, (k[:, :1], v[:, :1]), current)
            errors.extend(found)
            return attention.o_proj(output.transpose(0, 1).flatten(1)[None]), None

        attention.forward = forward

    for layer in model.encoder.layer:
        replace(layer.attention)
    table = csv.writer(sys.stdout)
    table.writerow(["tokens", *(field.name for field in fields(Setting)), "cost", "features", "attention"])
    with torch.no_grad():
        plain = [model(x).last_hidden_state for x in photos]
        for current in settings():
            errors.clear()
            found = [model(x).last_hidden_state for x in photos]
            features = np.mean([((a - b).norm() / b.norm()).item() for a, b in zip(found, plain, strict=True)])
            numbers = cost(current, side * side), features, math.sqrt(np.mean(errors))
            table.writerow([side * side, *astuple(current), *(f"{x:.3f}" for x in numbers)])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
