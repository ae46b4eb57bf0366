"""What a calibration and an audit measure: some queries of an attention beside all its keys.

With p the weights of softmax attention over all keys and o its output, what a β and a λ give is compared with o. Errors
are seen through the head's part of the output projection, so that those of different heads compare.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .call import BlockLists, Call, ContentRule
from .layout import block_count, layout_of
from .linear import read, states
from .rope import rotated
from .sparse import linear_branch, with_lists

_CPU_NUMBERS = 2**23
_DEVICE_NUMBERS = 2**26
"""Of one kind that are formed at once."""


@dataclass(frozen=True)
class Rows:
    """Softmax attention of some queries of one head: s of S queries, K keys."""

    queries: slice
    """Which of the S."""
    weights: torch.Tensor
    """p: (B, s, K)."""
    outputs: torch.Tensor
    """W o: (B, s, D)."""
    log_sums: torch.Tensor
    """Log of the sum of weights: (B, s, 1)."""


@dataclass(frozen=True)
class SampledQueries:
    """Some queries of a call beside all its keys, float32: S of the grid, and K keys, those of extra tokens last."""

    query: torch.Tensor
    """(B, S, H, D) after RoPE, scaled with 1 / √D."""
    key: torch.Tensor
    """(B, K, H, D) after RoPE."""
    value: torch.Tensor
    """(B, K, H, D)."""
    weight: torch.Tensor
    """(1 or B, K): of a key, 0 of one that is masked."""

    @classmethod
    def of(cls, call: Call, tokens: torch.Tensor) -> "SampledQueries":
        """Of a call, and tokens of its grid in raster order, int64 (S,)."""
        query, key = (call.extra_last(rotated(x.float(), call.rotary)) for x in (call.query, call.key))
        mask = torch.ones(1, key.shape[1], device=key.device) if call.key_mask is None else call.key_mask.float()
        scaled = query[:, tokens] * query.shape[-1] ** -0.5
        return cls(scaled, key, call.extra_last(call.value.float()), call.extra_last(mask))

    def rows(self, head: int, projection: torch.Tensor) -> Iterator[Rows]:
        """Softmax attention of one head, for some queries at a time.

        Args:
            head: which.
            projection: (D, D), with which ‖W v‖ = ‖v @ projection‖ for the head's part W of the output projection.
        """
        key, value, log_weight = self.key[:, :, head], self.value[:, :, head] @ projection, self.weight.log()
        numbers = _CPU_NUMBERS if key.device.type == "cpu" else _DEVICE_NUMBERS
        at_once = max(1, numbers // (key.shape[0] * key.shape[1]))
        for start in range(0, self.query.shape[1], at_once):
            here = slice(start, start + at_once)
            logits = self.query[:, here, head] @ key.mT + log_weight[:, None]
            log_sums = logits.logsumexp(dim=-1, keepdim=True)
            weights = (logits - log_sums).exp()
            yield Rows(here, weights, weights @ value, log_sums)


def in_float32(call: Call) -> Call:
    """The call with query, key and value in float32."""
    return replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())


def tokens_along(call: Call, block_size: int, count: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the grid, evenly along the curve of uniform blocks, and their blocks: both int64 (at most count,).

    Another ``shift`` gives others.
    """
    order = layout_of(call.grid, block_size).order.long()
    order = order[order >= 0]
    count = min(count, len(order))
    places = (torch.arange(count) * len(order) // count + shift) % len(order)
    return order[places].to(call.query.device), (places // block_size).to(call.query.device)


def block_of_keys(call: Call, block_size: int) -> torch.Tensor:
    """Uniform block of every token of the grid: int64 (N,)."""
    return layout_of(call.grid, block_size).rows.long().to(call.query.device) // block_size


def weight_held(call: Call, block_size: int, densities: Sequence[float], count: int, shift: int) -> torch.Tensor:
    """Part of softmax attention's weight that the lists chosen by content hold, extra tokens counted with them.

    Returns:
        float64 (densities,), mean over samples, heads and ``count`` queries, which another ``shift`` chooses anew.
    """
    tokens, block = tokens_along(call, block_size, count, shift)
    sampled, member = SampledQueries.of(call, tokens), block_of_keys(call, block_size)
    listed = []
    for density in densities:
        lists = with_lists(replace(call, sparse=ContentRule(block_size, density), pooled_bias=None)).sparse
        if isinstance(lists, BlockLists):
            listed.append(lists.mask()[:, :, block])
    batch, queries, heads, head_dim = sampled.query.shape
    found = torch.zeros(len(densities), dtype=torch.float64, device=tokens.device)
    nothing = torch.eye(head_dim, device=tokens.device)
    for head in range(heads):
        for rows in sampled.rows(head, nothing):
            of_grid, of_extra = rows.weights[..., : len(member)], rows.weights[..., len(member) :]
            blocks = of_grid.new_zeros(*of_grid.shape[:2], block_count(call.grid, block_size))
            blocks.index_add_(2, member, of_grid)
            for place, mask in enumerate(listed):
                found[place] += (blocks * mask[:, head, rows.queries]).sum().double() + of_extra.sum().double()
    return found / (batch * heads * queries)


@dataclass(frozen=True)
class Candidates:
    """Values of β and log λ among which the best pair is found by trying."""

    pooled_bias: torch.Tensor
    """(candidates,), or (H, candidates) where each head has its own; -∞ stands for no pooled keys."""
    linear_log_weight: torch.Tensor
    """(candidates,)."""


def candidate_errors(
    call: Call,
    block_size: int,
    count: int,
    shift: int,
    projections: torch.Tensor,
    candidates: Candidates,
) -> torch.Tensor:
    """Mean squared error of the merged output for every pair of candidates: (H, candidates of β, candidates of log λ).

    Looks at ``count`` queries of every head, which another ``shift`` chooses anew, through ``projections`` (H, D, D),
    see :meth:`SampledQueries.rows`. A call without lists has no block listed.
    """
    device, heads, head_dim = call.query.device, call.query.shape[2], call.query.shape[3]
    tokens, block = tokens_along(call, block_size, count, shift)
    sampled, member = SampledQueries.of(call, tokens), block_of_keys(call, block_size)
    others = sampled.key.shape[1] - len(member)
    blocks = block_count(call.grid, block_size)
    none = torch.zeros(1, heads, len(tokens), blocks, dtype=torch.bool, device=device)
    mask = call.sparse.mask()[:, :, block] if isinstance(call.sparse, BlockLists) else none
    alone = linear_branch(call)
    linear, normaliser = (x[:, tokens].float() for x in read(alone, states(alone)))
    weight = sampled.weight[:, : len(member)]
    sums = weight.new_zeros(len(weight), blocks).index_add_(1, member, weight)
    shares = (weight / sums.clamp_min(torch.finfo(torch.float32).tiny)[:, member])[..., None]
    biases = candidates.pooled_bias.to(device).exp().expand(heads, -1)[..., None]
    factors_of_linear, found = candidates.linear_log_weight.to(device).exp(), []
    for head, beta in enumerate(biases):
        value = sampled.value[:, :, head] @ projections[head]
        zeros = value.new_zeros(len(value), blocks, head_dim)
        pooled_key = zeros.index_add(1, member, shares * sampled.key[:, : len(member), head])
        pooled_value = zeros.index_add(1, member, shares * value[:, : len(member)])
        total = torch.zeros(len(beta), len(factors_of_linear), device=device)
        for rows in sampled.rows(head, projections[head]):
            here = mask[:, head, rows.queries]
            listed = rows.weights * torch.nn.functional.pad(here[..., member], (0, others), value=True)
            of_pooled = sampled.query[:, rows.queries, head] @ pooled_key.mT + sums.log()[:, None] - rows.log_sums
            of_pooled = of_pooled.exp() * ~here
            # beyond e^60 times the softmax weights a linear branch is all there is
            of_linear = (normaliser[:, rows.queries, head].log() - rows.log_sums).clamp_max(60).exp()
            parts = torch.stack([listed.sum(dim=-1), of_pooled.sum(dim=-1), of_linear[..., 0]], dim=-1)
            outputs = torch.stack(
                [
                    listed @ value,
                    of_pooled @ pooled_value,
                    of_linear * (linear[:, rows.queries, head] @ projections[head]),
                ],
                dim=-2,
            )
            # how far each part pulls the output away from softmax attention's
            pulls = outputs - parts[..., None] * rows.outputs[..., None, :]
            factors = torch.stack(
                torch.broadcast_tensors(torch.ones_like(beta * factors_of_linear), beta, factors_of_linear), dim=-1
            )
            squares = torch.einsum("xyi,bqij,xyj->xybq", factors, pulls @ pulls.mT, factors)
            weights = torch.einsum("xyi,bqi->xybq", factors, parts).clamp_min(torch.finfo(torch.float32).tiny)
            total += (squares / weights.square()).mean(dim=2).sum(dim=-1) / len(tokens)
        found.append(total)
    return torch.stack(found)
