"""What it costs not to attend to a tile of keys exactly, measured on some queries of every tile.

With p_t the weights of softmax attention, o its output, and p̂_c the weight that tile c gets through its mean, leaving
tile c inexact moves the output of a query by about e_c = Σ_{t∈c} p_t (v_t − o) − p̂_c (v̄_c − o). Pairs are judged by
the mean of ‖W e_c‖², with W the head's part of the output projection, so that the values of different heads compare.
Without means p̂ is 0. Extra tokens are tiles that are always exact: they have a weight and a part of the
output, and no error.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .extra import ExtraTokens
from .layout import BlockTable
from .sparse import block_means

_CPU_NUMBERS = 2**23
_DEVICE_NUMBERS = 2**26
"""Of one kind that are formed at once."""


@dataclass(frozen=True)
class TiledInput:
    """What a self-attention attends with, tile by tile, in float32: T tiles of at most L tokens.

    Extra tokens are E further tiles of keys.
    """

    query: torch.Tensor
    """(B, H, T, L, D) after RoPE, scaled with 1 / √D."""
    key: torch.Tensor
    """(B, H, T + E, L, D) after RoPE."""
    value: torch.Tensor
    """(B, H, T + E, L, D)."""
    weight: torch.Tensor
    """(1 or B, T + E, L): of a key, 0 where there is no token."""
    exists: torch.Tensor
    """Bool (T, L): whether a place holds a token of the grid."""

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        table: BlockTable,
        key_mask: torch.Tensor | None,
        extra: ExtraTokens | None = None,
    ) -> "TiledInput":
        """Of a call.

        Args:
            query: (B, N, H, D) after RoPE, of the grid's tokens.
            key: like ``query``.
            value: (B, N, H, D).
            table: the grid's tokens, and the extra ones behind them, block by block.
            key_mask: (B, N).
            extra: extra tokens, if any.
        """
        tiles = table.count
        if extra is not None:
            query, key, value, key_mask = extra.after(query, key, value, key_mask)
            tiles -= -(-extra.count // table.tokens.shape[1])
        scaled = query * query.shape[-1] ** -0.5
        scaled, key, value = (table.in_blocks(x.float()) for x in (scaled, key, value))
        weight = table.weights(key_mask, torch.float32)
        return cls(scaled[:, :, :tiles], key, value, weight, table.exists[:tiles])

    def samples(self, count: int, shift: int) -> torch.Tensor:
        """Places of some queries of every tile, evenly spaced: int64 (T, count); another ``shift`` gives others."""
        lengths = self.exists.sum(dim=-1, keepdim=True)
        tokens = self.exists.byte().argsort(dim=-1, descending=True, stable=True)
        steps = torch.arange(count, device=lengths.device)
        return tokens.gather(1, (steps * lengths // count + shift) % lengths)


@dataclass(frozen=True)
class HeadInput:
    """One head of a :class:`TiledInput`, its values seen through W: ‖W v‖ = ‖v @ projection‖."""

    query: torch.Tensor
    """(B, T, L, D)."""
    key: torch.Tensor
    value: torch.Tensor
    """Both (B, T + E, L, D)."""
    log_weight: torch.Tensor
    """(1 or B, T + E, L)."""
    mean_key: torch.Tensor
    mean_value: torch.Tensor
    """Both (B, T, D)."""
    log_count: torch.Tensor
    """(1 or B, T)."""

    @classmethod
    def of(cls, given: TiledInput, head: int, projection: torch.Tensor) -> "HeadInput":
        """Take one head out.

        Args:
            given: input of the attention.
            head: which.
            projection: (D, D).
        """
        key, value, tiles = given.key[:, head], given.value[:, head] @ projection, given.query.shape[2]
        of_grid = given.weight[:, :tiles], key[:, None, :tiles], value[:, None, :tiles]
        means = (*(x[:, 0] for x in block_means(*of_grid)), given.weight[:, :tiles].sum(dim=-1).log())
        return cls(given.query[:, head], key, value, given.weight.log(), *means)


@dataclass(frozen=True)
class Rows:
    """Some queries of one head, of some tiles of the grid, against all keys."""

    tiles: slice
    """Which query tiles."""
    weights: torch.Tensor
    """p: (B, tiles, samples, T + E, L)."""
    outputs: torch.Tensor
    """o: (B, tiles, samples, D)."""
    of_means: torch.Tensor
    """p̂: (B, tiles, samples, T)."""
    log_sums: torch.Tensor
    """Log of softmax attention's sum of weights: (B, tiles, samples)."""


def rows_of_head(head: HeadInput, samples: torch.Tensor) -> Iterator[Rows]:
    """The rows of one head, some query tiles at a time.

    Args:
        head: what it attends with.
        samples: (T, count) from :meth:`TiledInput.samples`.
    """
    batch, tiles, length, head_dim = head.query.shape
    numbers = _CPU_NUMBERS if head.key.device.type == "cpu" else _DEVICE_NUMBERS
    at_once = max(1, numbers // (batch * samples.shape[1] * head.key.shape[1] * max(length, head_dim)))
    for start in range(0, tiles, at_once):
        here = slice(start, start + at_once)
        places = samples[here, :, None].expand(batch, -1, -1, head_dim)
        query = head.query[:, here].gather(2, places)
        logits = torch.einsum("bqsd,btld->bqstl", query, head.key) + head.log_weight[:, None, None]
        log_sums = logits.flatten(3).logsumexp(dim=-1)
        weights = (logits - log_sums[..., None, None]).exp()
        of_means = torch.einsum("bqsd,btd->bqst", query, head.mean_key) + head.log_count[:, None, None]
        outputs = torch.einsum("bqstl,btld->bqsd", weights, head.value)
        yield Rows(here, weights, outputs, (of_means - log_sums[..., None]).exp(), log_sums)


def pair_errors(
    given: TiledInput, samples: torch.Tensor, projections: torch.Tensor, means: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What leaving a pair inexact costs, and its softmax weight.

    Args:
        given: input of the attention.
        samples: (T, count) from :meth:`TiledInput.samples`.
        projections: (H, D, D), see :class:`HeadInput`.
        means: whether tiles that are not exact take part through their means.

    Returns:
        Mean of ‖W e_c‖² (H, T, T), mean weight (H, T, T), whose rows sum to what extra tokens leave of 1,
        and mean of ‖W o‖² (H,).
    """
    heads, tiles = given.query.shape[1:3]
    errors = torch.zeros(heads, tiles, tiles, device=given.key.device)
    masses, squares = torch.zeros_like(errors), torch.zeros(heads, device=given.key.device)
    for index in range(heads):
        head = HeadInput.of(given, index, projections[index])
        for rows in rows_of_head(head, samples):
            weights, value = rows.weights[..., :tiles, :], head.value[:, :tiles]
            mass = weights.sum(dim=-1)
            of_means = rows.of_means if means else torch.zeros_like(mass)
            moved = torch.einsum("bqstl,btld->bqstd", weights, value)
            moved -= of_means[..., None] * head.mean_value[:, None, None]
            moved -= (mass - of_means)[..., None] * rows.outputs[..., None, :]
            errors[index, rows.tiles] = moved.square().sum(dim=-1).mean(dim=(0, 2))
            masses[index, rows.tiles] = mass.mean(dim=(0, 2))
            squares[index] += rows.outputs.square().sum(dim=-1).mean(dim=(0, 2)).sum() / tiles
    return errors, masses, squares


@dataclass(frozen=True)
class Candidates:
    """Values of β and log λ among which the best pair is found by trying."""

    pooled_bias: torch.Tensor
    """(candidates,), or (H, candidates) where each head has its own."""
    far_log_weight: torch.Tensor


def candidate_errors(
    given: TiledInput,
    samples: torch.Tensor,
    projections: torch.Tensor,
    mask: torch.Tensor,
    far: tuple[torch.Tensor, torch.Tensor],
    candidates: Candidates,
) -> torch.Tensor:
    """Mean squared error of the merged output for every pair of candidates: (H, candidates of β, candidates of log λ).

    Args:
        given: input of the attention.
        samples: (T, count) from :meth:`TiledInput.samples`.
        projections: (H, D, D), see :class:`HeadInput`.
        mask: bool (1 or B, H, T, T), the exact pairs.
        far: output (B, H, T, L, D) of MHLA over all blocks and log of its normaliser (B, H, T, L).
        candidates: what to try; β = −∞ stands for no means.
    """
    device = given.key.device
    biases = candidates.pooled_bias.to(device).exp().expand(given.key.shape[1], -1)[..., None]
    far_weight, found = candidates.far_log_weight.to(device).exp(), []
    for index, beta in enumerate(biases):
        head = HeadInput.of(given, index, projections[index])
        total = torch.zeros(len(beta), len(far_weight), device=device)
        for rows in rows_of_head(head, samples):
            exact = mask[:, index, rows.tiles, None]
            always = torch.nn.functional.pad(exact, (0, head.key.shape[1] - exact.shape[-1]), value=True)
            weights, of_means = rows.weights * always[..., None], rows.of_means * ~exact
            places = samples[rows.tiles].expand(len(rows.outputs), -1, -1)
            of_channels = places[..., None].expand_as(rows.outputs)
            far_output = far[0][:, index, rows.tiles].gather(2, of_channels)
            # beyond e^60 times the softmax weights a far field is all there is
            far_share = (far[1][:, index, rows.tiles].gather(2, places) - rows.log_sums).clamp_max(60).exp()
            shares = torch.stack([weights.sum(dim=(-2, -1)), of_means.sum(dim=-1), far_share], dim=-1)
            outputs = torch.stack(
                [
                    torch.einsum("bqstl,btld->bqsd", weights, head.value),
                    torch.einsum("bqst,btd->bqsd", of_means, head.mean_value),
                    far_share[..., None] * (far_output @ projections[index]),
                ],
                dim=-2,
            )
            # how far each part pulls the output away from softmax attention's
            pulls = outputs - shares[..., None] * rows.outputs[..., None, :]
            products = pulls @ pulls.mT
            factors = torch.stack(torch.broadcast_tensors(torch.ones_like(beta * far_weight), beta, far_weight), dim=-1)
            squares = torch.einsum("xyi,bqsij,xyj->xybqs", factors, products, factors)
            sums = torch.einsum("xyi,bqsi->xybqs", factors, shares).clamp_min(torch.finfo(torch.float32).tiny)
            total += (squares / sums.square()).mean(dim=(2, 4)).sum(dim=-1) / len(samples)
        found.append(total)
    return torch.stack(found)
