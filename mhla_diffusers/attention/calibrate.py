"""What a calibration and an audit measure: some queries of an attention beside all its keys.

With p the weights of softmax attention over all keys and o its output, what a β and a λ give is compared with o. Errors
are seen through the head's part of the output projection, so that those of different heads compare.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from .call import BlockLists, Call, ContentRule, UniformBlocks
from .layout import block_count, layout_of
from .linear import read, states
from .rope import rotated
from .sparse import key_block_of_tokens, linear_branch, with_lists

_CPU_NUMBERS = 2**23
_DEVICE_NUMBERS = 2**26
"""Weights that are formed at once."""


def in_float32(call: Call) -> Call:
    """The call with query, key and value in float32."""
    return replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())


def tokens_along(call: Call, block_size: int, count: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens of the grid, evenly along the curve of uniform blocks: both int64 (at most count,).

    Returns:
        The tokens, which another ``shift`` chooses again, and their blocks.
    """
    order = layout_of(call.grid, block_size).order.long()
    order = order[order >= 0]
    count = min(count, len(order))
    places = (torch.arange(count) * len(order) // count + shift) % len(order)
    return order[places].to(call.query.device), (places // block_size).to(call.query.device)


class SampledQueries:
    """Softmax attention of S queries of the grid to all N keys, those of extra tokens last, in float32."""

    def __init__(self, call: Call, tokens: torch.Tensor) -> None:
        query, key = (call.extra_last(rotated(x.float(), call.rotary)) for x in (call.query, call.key))
        mask = torch.ones(1, key.shape[1], device=key.device) if call.key_mask is None else call.key_mask.float()
        self.query = query[:, tokens] * query.shape[-1] ** -0.5
        self.key, self.value, self.weight = key, call.extra_last(call.value.float()), call.extra_last(mask)

    def rows(
        self, head: int, projection: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Attend with one head, for some queries at a time.

        Args:
            head: which.
            projection: (D, D), with which ‖W v‖ = ‖v @ projection‖ for the head's part W of the output projection.

        Yields:
            Which s of the S queries, their weights p (B, s, N), outputs W o (B, s, D), and LSE (B, s, 1).
        """
        key, value, log_weight = self.key[:, :, head], self.value[:, :, head] @ projection, self.weight.log()
        numbers = _CPU_NUMBERS if key.device.type == "cpu" else _DEVICE_NUMBERS
        at_once = max(1, numbers // (key.shape[0] * key.shape[1]))
        for start in range(0, self.query.shape[1], at_once):
            here = slice(start, start + at_once)
            logits = self.query[:, here, head] @ key.mT + log_weight[:, None]
            lse = logits.logsumexp(dim=-1, keepdim=True)
            weights = (logits - lse).exp()
            yield here, weights, weights @ value, lse


def weight_held(call: Call, rule: ContentRule, count: int, shift: int) -> torch.Tensor:
    """Part of softmax attention's weight that the lists of a rule hold, extra tokens counted with them.

    Returns:
        float64 (), mean over samples, heads and ``count`` queries, which another ``shift`` chooses again.
    """
    tokens, block = tokens_along(call, rule.block_size, count, shift)
    sampled = SampledQueries(call, tokens)
    lists = with_lists(replace(call, sparse=replace(rule, fit_pooled_bias=False), pooled_bias=None)).sparse
    assert isinstance(lists, BlockLists)
    listed = lists.mask()[:, :, block]
    batch, queries, heads, head_dim = sampled.query.shape
    member = key_block_of_tokens(call, lists).expand(batch, heads, -1)
    grid_tokens = member.shape[-1]
    found = torch.zeros((), dtype=torch.float64, device=tokens.device)
    nothing = torch.eye(head_dim, device=tokens.device)
    for head in range(heads):
        for here, weights, _, _ in sampled.rows(head, nothing):
            of_keys = listed[:, head, here].expand(batch, -1, -1).gather(-1, _for_queries(member[:, head], weights))
            found += (weights[..., :grid_tokens] * of_keys).sum().double() + weights[..., grid_tokens:].sum().double()
    return found / (batch * heads * queries)


def _for_queries(member: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Blocks (B, N) of the keys that weights (B, s, N) belong to, for every query."""
    return member[:, None].expand(-1, weights.shape[1], -1)


def candidate_errors(
    call: Call,
    blocks: UniformBlocks,
    count: int,
    shift: int,
    projections: torch.Tensor,
    pooled_bias: torch.Tensor,
    linear_log_weight: torch.Tensor,
) -> torch.Tensor:
    """Mean squared error of the merged output for every pair of a β and a λ.

    Args:
        call: without lists, no block is listed.
        blocks: of queries and keys.
        count: queries of every head that are looked at.
        shift: another one chooses others.
        projections: (H, D, D), see :meth:`SampledQueries.rows`.
        pooled_bias: β to try, (candidates,), or (H, candidates) where each head has its own; -∞ for no pooled keys.
        linear_log_weight: log λ to try, (candidates,).

    Returns:
        (H, candidates of β, candidates of λ).
    """
    device, heads, head_dim = call.query.device, call.query.shape[2], call.query.shape[3]
    tokens, block = tokens_along(call, blocks.block_size, count, shift)
    sampled, key_blocks = SampledQueries(call, tokens), block_count(call.grid, blocks.key_block_size)
    batch, grid_tokens = len(sampled.key), math.prod(call.grid)
    member = key_block_of_tokens(call, blocks).expand(batch, heads, -1)
    others = sampled.key.shape[1] - grid_tokens
    none = torch.zeros(1, heads, len(tokens), key_blocks, dtype=torch.bool, device=device)
    mask = call.sparse.mask()[:, :, block] if isinstance(call.sparse, BlockLists) else none
    alone, tiny = linear_branch(call), torch.finfo(torch.float32).tiny
    linear, normaliser = (x[:, tokens].float() for x in read(alone, states(alone)))
    weight = sampled.weight[:, :grid_tokens].expand(batch, -1)
    biases, factors, found = pooled_bias.to(device).exp().expand(heads, -1), linear_log_weight.to(device).exp(), []
    for head, beta in enumerate(biases[..., None]):
        value = sampled.value[:, :, head] @ projections[head]
        here_member = member[:, head]
        sums = weight.new_zeros(batch, key_blocks).scatter_add_(1, here_member, weight)
        shares = (weight / sums.clamp_min(tiny).gather(1, here_member))[..., None]
        pooled_key, pooled_value = (
            value.new_zeros(batch, key_blocks, head_dim).scatter_add_(
                1, here_member[..., None].expand(-1, -1, head_dim), shares * x[:, :grid_tokens]
            )
            for x in (sampled.key[:, :, head], value)
        )
        pairs = torch.stack(torch.broadcast_tensors(torch.ones_like(beta * factors), beta, factors), dim=-1)
        total = torch.zeros(len(beta), len(factors), device=device)
        for rows, weights, outputs, lse in sampled.rows(head, projections[head]):
            here = mask[:, head, rows].expand(batch, -1, -1)
            of_keys = here.gather(-1, _for_queries(here_member, weights))
            listed = weights * torch.nn.functional.pad(of_keys, (0, others), value=True)
            of_pooled = sampled.query[:, rows, head] @ pooled_key.mT + sums.log()[:, None] - lse
            of_pooled = of_pooled.exp() * ~here
            # beyond e^60 times the softmax weights a linear branch is all there is
            of_linear = (normaliser[:, rows, head].log() - lse).clamp_max(60).exp()
            through = of_linear * (linear[:, rows, head] @ projections[head])
            parts = torch.stack([listed.sum(dim=-1), of_pooled.sum(dim=-1), of_linear[..., 0]], dim=-1)
            # how far each part pulls the output away from softmax attention's
            pulls = torch.stack([listed @ value, of_pooled @ pooled_value, through], dim=-2)
            pulls = pulls - parts[..., None] * outputs[..., None, :]
            squares = torch.einsum("xyi,bqij,xyj->xybq", pairs, pulls @ pulls.mT, pairs)
            sums_of_weights = torch.einsum("xyi,bqi->xybq", pairs, parts).clamp_min(tiny)
            total += (squares / sums_of_weights.square()).mean(dim=2).sum(dim=-1) / len(tokens)
        found.append(total)
    return torch.stack(found)
