"""What it costs not to attend to a tile of keys exactly, measured on some queries of every tile.

With p_t the weights of softmax attention, o its output, and p̂_c the weight that tile c gets through its mean, leaving
tile c inexact moves the output of a query by about e_c = Σ_{t∈c} p_t (v_t − o) − p̂_c (v̄_c − o). Pairs are judged by
the mean of ‖W e_c‖², with W the head's part of the output projection, so that the values of different heads compare.
Without means p̂ is 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .blocks import Shape
from .exact import tile_means
from .tiles import tokens_of_tiles

_NUMBERS = {"cpu": 2**23}
"""Numbers of one kind that are formed at once, by type of device."""
_NUMBERS_ELSEWHERE = 2**26


@dataclass(frozen=True)
class TiledInput:
    """What a self-attention attends with, tile by tile, in float32. T tiles of at most L tokens."""

    query: torch.Tensor
    """(B, H, T, L, D) after RoPE, scaled with 1 / √D."""
    key: torch.Tensor
    """(B, H, T, L, D) after RoPE."""
    value: torch.Tensor
    """(B, H, T, L, D)."""
    weight: torch.Tensor
    """(1 or B, T, L): of a key, 0 where there is no token."""
    exists: torch.Tensor
    """Bool (T, L): whether a place holds a token."""

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grid: Shape,
        counts: Shape,
        key_mask: torch.Tensor | None,
    ) -> "TiledInput":
        """From query and key after RoPE, and value: (B, N, H, D)."""
        tokens, exists = (x.to(query.device) for x in tokens_of_tiles(grid, counts))
        weight = exists.float()[None]
        if key_mask is not None:
            weight = weight * key_mask.float()[:, tokens]
        scaled = query * query.shape[-1] ** -0.5
        tiled = [x.float()[:, tokens].permute(0, 3, 1, 2, 4) for x in (scaled, key, value)]
        return cls(tiled[0], tiled[1], tiled[2], weight, exists)

    def samples(self, count: int, shift: int) -> torch.Tensor:
        """Places of some queries of every tile, evenly spaced: int64 (T, count); another ``shift`` gives others."""
        lengths = self.exists.sum(dim=-1, keepdim=True)
        tokens = self.exists.byte().argsort(dim=-1, descending=True, stable=True)
        steps = torch.arange(count, device=lengths.device)
        return tokens.gather(1, (steps * lengths // count + shift) % lengths)


@dataclass(frozen=True)
class Rows:
    """Some queries of one head, of some query tiles, against all keys."""

    tiles: slice
    """Which query tiles."""
    weights: torch.Tensor
    """p: (B, tiles, samples, T, L)."""
    outputs: torch.Tensor
    """o: (B, tiles, samples, D)."""
    of_means: torch.Tensor
    """p̂: (B, tiles, samples, T)."""
    log_sums: torch.Tensor
    """Log of softmax attention's sum of weights: (B, tiles, samples)."""


def rows_of_head(given: TiledInput, head: int, samples: torch.Tensor, projection: torch.Tensor) -> Iterator[Rows]:
    """The rows of one head, some query tiles at a time, values seen through W: ‖W v‖ = ‖v @ projection‖.

    Args:
        given: input of the attention.
        head: which.
        samples: (T, count) from :meth:`TiledInput.samples`.
        projection: (D, D).
    """
    key, value = given.key[:, head], given.value[:, head] @ projection
    mean_key, _, log_count = tile_means(key[:, None], value[:, None], given.weight)
    mean_key, log_count = mean_key[:, 0], log_count[:, 0]
    batch, tiles, length, _ = key.shape
    largest = max(tiles * length, tiles * key.shape[-1])
    numbers = _NUMBERS.get(key.device.type, _NUMBERS_ELSEWHERE)
    at_once = max(1, numbers // (batch * samples.shape[1] * largest))
    for start in range(0, tiles, at_once):
        here = slice(start, start + at_once)
        places = samples[here, :, None].expand(batch, -1, -1, key.shape[-1])
        query = given.query[:, head, here].gather(2, places)
        logits = torch.einsum("bqsd,btld->bqstl", query, key) + given.weight.log()[:, None, None]
        log_sums = logits.flatten(3).logsumexp(dim=-1)
        weights = (logits - log_sums[..., None, None]).exp()
        of_means = torch.einsum("bqsd,btd->bqst", query, mean_key) + log_count[:, None, None] - log_sums[..., None]
        yield Rows(here, weights, torch.einsum("bqstl,btld->bqsd", weights, value), of_means.exp(), log_sums)


def pair_errors(
    given: TiledInput, samples: torch.Tensor, projections: torch.Tensor, means: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What leaving a pair inexact costs, and its softmax weight.

    Args:
        given: input of the attention.
        samples: (T, count) from :meth:`TiledInput.samples`.
        projections: (H, D, D), see :func:`rows_of_head`.
        means: whether tiles that are not exact take part through their means.

    Returns:
        Mean of ‖W e_c‖² (H, T, T), mean weight (H, T, T), and mean of ‖W o‖² (H,).
    """
    heads, tiles = given.key.shape[1:3]
    errors = torch.zeros(heads, tiles, tiles, device=given.key.device)
    masses, squares = torch.zeros_like(errors), torch.zeros(heads, device=given.key.device)
    for head in range(heads):
        value = given.value[:, head] @ projections[head]
        mean_value = tile_means(value[:, None], value[:, None], given.weight)[1][:, 0, None, None]
        for rows in rows_of_head(given, head, samples, projections[head]):
            mass = rows.weights.sum(dim=-1)
            of_means = rows.of_means if means else torch.zeros_like(mass)
            moved = torch.einsum("bqstl,btld->bqstd", rows.weights, value) - of_means[..., None] * mean_value
            moved -= (mass - of_means)[..., None] * rows.outputs[..., None, :]
            errors[head, rows.tiles] = moved.square().sum(dim=-1).mean(dim=(0, 2))
            masses[head, rows.tiles] = mass.mean(dim=(0, 2))
            squares[head] += rows.outputs.square().sum(dim=-1).mean(dim=(0, 2)).sum() / tiles
    return errors, masses, squares


@dataclass(frozen=True)
class Candidates:
    """Values of β and log λ among which the best pair is found by trying."""

    mean_bias: torch.Tensor
    far_log_weight: torch.Tensor

    def to(self, device: torch.device) -> "Candidates":
        """On a device."""
        return replace(self, mean_bias=self.mean_bias.to(device), far_log_weight=self.far_log_weight.to(device))


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
        projections: (H, D, D), see :func:`rows_of_head`.
        mask: bool (1 or B, H, T, T), the exact pairs.
        far: output (B, H, T, L, D) of MHLA over all blocks and log of its normaliser (B, H, T, L).
        candidates: what to try; β = −∞ stands for no means.
    """
    candidates = candidates.to(given.key.device)
    beta, far_weight = candidates.mean_bias.exp()[:, None], candidates.far_log_weight.exp()
    found = []
    for head in range(given.key.shape[1]):
        value = given.value[:, head] @ projections[head]
        mean_value = tile_means(value[:, None], value[:, None], given.weight)[1][:, 0]
        total = torch.zeros(len(beta), len(far_weight), device=value.device)
        for rows in rows_of_head(given, head, samples, projections[head]):
            exact = mask[:, head, rows.tiles, None]
            weights, of_means = rows.weights * exact[..., None], rows.of_means * ~exact
            places = samples[rows.tiles].expand(len(value), -1, -1)
            far_output = far[0][:, head, rows.tiles].gather(2, places[..., None].expand(-1, -1, -1, value.shape[-1]))
            # beyond e^60 times the softmax weights a far field is all there is
            far_share = (far[1][:, head, rows.tiles].gather(2, places) - rows.log_sums).clamp_max(60).exp()
            shares = torch.stack([weights.sum(dim=(-2, -1)), of_means.sum(dim=-1), far_share], dim=-1)
            outputs = torch.stack(
                [
                    torch.einsum("bqstl,btld->bqsd", weights, value),
                    torch.einsum("bqst,btd->bqsd", of_means, mean_value),
                    far_share[..., None] * (far_output @ projections[head]),
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
