"""What a calibration and an audit measure: some queries of an attention beside all its keys.

With p the weights of softmax attention over all keys and o its output, what a β and a λ give is compared with o. Errors
are seen through the head's part of the output projection, so that those of different heads compare.

The mixing matrix is fitted by least squares without gradients. Row i of a head's matrix weighs KV states for queries of
block i, o = Σ_b m_b n_b / Σ_b m_b z_b with n_b = φ(q)ᵀ S_b and z_b = φ(q)ᵀ z_b. Around weights that give the output
o, a change d of them moves it by about Σ_b d_b (n_b − z_b o) / Σ_b m_b z_b. So every step is a linear least squares
problem of M unknowns for each row, solved under m ≥ 0, and as much of the step is taken as lowers the error most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .call import Call, ContentRule
from .feature_maps import get_feature_map
from .layout import block_count, block_index, layout_of
from .linear import linear_attention
from .merge import linear_branch
from .rope import rotated
from .sparse import with_lists

_CPU_NUMBERS = 2**23
_DEVICE_NUMBERS = 2**26
"""Of one kind that are formed at once."""
_STEPS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Parts of a step that are tried."""
_ROUNDS = 6
_DAMPING = 0.03
"""What holds weights where they are, in units of the mean square of a weight's effect."""
_SWEEPS = 60


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
        table, value, mask = call.rotary_of_tokens, call.value, call.key_mask
        query, key = (rotated(x.float(), table) for x in (call.query, call.key))
        query = query[:, tokens] * query.shape[-1] ** -0.5
        if call.extra is not None:
            _, key, value, mask = call.extra.after(key, key, value, mask)
        weight = torch.ones(1, key.shape[1], device=key.device) if mask is None else mask.float()
        return cls(query, key, value.float(), weight)

    def rows(self, head: int, projection: torch.Tensor, multiple: int = 1) -> Iterator[Rows]:
        """Those of one head, some at a time.

        Args:
            head: which.
            projection: (D, D), with which ‖W v‖ = ‖v @ projection‖ for the head's part W of the output projection.
            multiple: what the number of queries at a time is a multiple of.
        """
        key, value, log_weight = self.key[:, :, head], self.value[:, :, head] @ projection, self.weight.log()
        numbers = _CPU_NUMBERS if key.device.type == "cpu" else _DEVICE_NUMBERS
        at_once = max(1, numbers // (key.shape[0] * key.shape[1] * multiple)) * multiple
        for start in range(0, self.query.shape[1], at_once):
            here = slice(start, start + at_once)
            logits = self.query[:, here, head] @ key.mT + log_weight[:, None]
            log_sums = logits.logsumexp(dim=-1, keepdim=True)
            weights = (logits - log_sums).exp()
            yield Rows(here, weights, weights @ value, log_sums)


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
        rule = ContentRule(block_size, density)
        lists = with_lists(replace(call, lists=None, rule=rule, pooled_bias=None)).lists
        if lists is not None:
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
    mask = none if call.lists is None else call.lists.mask()[:, :, block]
    linear, normaliser = (x[:, tokens].float() for x in linear_attention(linear_branch(call)))
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


@dataclass(frozen=True)
class BlockInput:
    """What MHLA attends with in one call, and the softmax attention that it stands for. S queries, as many of every
    block.
    """

    softmax: SampledQueries
    queries: int
    """Of every block."""
    numerator: torch.Tensor
    denominator: torch.Tensor
    """φ(q) as numerator and normaliser have it: both (B, S, H, D)."""
    states: torch.Tensor
    """S: (B, H, M, D, D)."""
    key_sums: torch.Tensor
    """z: (B, H, M, D)."""

    @classmethod
    def of(cls, call: Call, queries: int, shift: int) -> "BlockInput":
        """Of a call in float32.

        Extra tokens stay out: what MHLA stands for beside them is softmax attention among the grid's tokens.
        How the two share a query is for λ, which :func:`candidate_errors` tries.

        Args:
            call: of MHLA alone, with RoPE's table for every token.
            queries: of every block that are looked at.
            shift: another one looks at others.
        """
        call = replace(call, extra=None)
        block = block_index(call.grid, call.blocks)
        lengths = block.bincount()[:, None]
        places = lengths.cumsum(dim=0) - lengths + (torch.arange(queries) * lengths // queries + shift) % lengths
        tokens = block.argsort(stable=True)[places.flatten()].to(call.query.device)
        numerator, denominator = (x[:, tokens] for x in _features(call, call.query))
        key, plain_key = _features(call, call.key)
        if call.key_mask is not None:
            key, plain_key = (x * call.key_mask.to(x.dtype)[..., None, None] for x in (key, plain_key))
        states, key_sums = [], []
        for number in range(len(lengths)):
            here = (block == number).nonzero().flatten().to(call.query.device)
            states.append(torch.einsum("bnhd,bnhe->bhde", key[:, here], call.value[:, here]))
            key_sums.append(plain_key[:, here].sum(dim=1))
        softmax = SampledQueries.of(call, tokens)
        return cls(softmax, queries, numerator, denominator, torch.stack(states, dim=2), torch.stack(key_sums, dim=2))


def _features(call: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (B, N, H, D) for the numerator and for the normaliser."""
    table = call.rotary_of_tokens
    if call.rope == "before":
        x = rotated(x, table)
    features = get_feature_map(call.feature_map)(x.clone(), call.eps)
    return (rotated(features, table) if call.rope == "after" else features), features


@dataclass(frozen=True)
class _Parts:
    """Some queries of one head, of some blocks."""

    blocks: slice
    numerators: torch.Tensor
    """W n_b: (B, blocks, samples, M, D)."""
    denominators: torch.Tensor
    """z_b: (B, blocks, samples, M)."""
    wanted: torch.Tensor
    """W softmax attention's output: (B, blocks, samples, D)."""

    def output(self, mixing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, blocks, samples, D) and normaliser (B, blocks, samples, 1) with a head's matrix (M, M)."""
        rows = mixing[self.blocks, None, None, :]
        total = (self.denominators * rows[..., 0, :]).sum(dim=-1, keepdim=True)
        total = total.clamp_min(torch.finfo(total.dtype).tiny)
        return (rows @ self.numerators)[..., 0, :] / total, total


def _parts(given: BlockInput, head: int, projection: torch.Tensor) -> Iterator[_Parts]:
    states, by_block = given.states[:, head] @ projection, (-1, given.queries)
    for rows in given.softmax.rows(head, projection, given.queries):
        numerator, denominator = (
            x[:, rows.queries, head].unflatten(1, by_block) for x in (given.numerator, given.denominator)
        )
        yield _Parts(
            slice(rows.queries.start // given.queries, rows.queries.stop // given.queries),
            torch.einsum("bqsd,bmde->bqsme", numerator, states),
            torch.einsum("bqsd,bmd->bqsm", denominator, given.key_sums[:, head]),
            rows.outputs.unflatten(1, by_block),
        )


def fit_mixing(given: list[BlockInput], projections: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Weights that lower the squared error of every head's output, summed over heads where they share one matrix.

    Begins with ``mixing``, (M, M) or (H, M, M), which is positive somewhere in every row, and sees errors through
    ``projections``, see :meth:`SampledQueries.rows`. The largest weight of every row that is found is 1.
    """
    weights = mixing.float().view(-1, *mixing.shape[-2:])
    for _ in range(_ROUNDS):
        gram, slope = _equations(given, projections, weights)
        change = nonnegative_step(gram, slope, weights, _DAMPING) - weights
        errors = torch.stack([_errors(given, projections, weights + part * change) for part in _STEPS])
        parts = torch.tensor(_STEPS, device=weights.device)[errors.argmin(dim=0)]
        weights = weights + parts[..., None] * change
        weights = weights / weights.amax(dim=-1, keepdim=True)  # the output does not depend on the scale of a row
    return weights.view(mixing.shape)


def _equations(
    given: list[BlockInput], projections: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of the effects of weights with each other, and minus those with the error.

    Returns:
        (H, M, M, M) and (H, M, M), row by row; with 1 for H where heads share one matrix.
    """
    gram, slope = weights.new_zeros(*weights.shape, weights.shape[-1]), torch.zeros_like(weights)
    for call in given:
        for head, projection in enumerate(projections):
            place = head % len(weights)
            for parts in _parts(call, head, projection):
                output, total = parts.output(weights[place])
                effects = parts.numerators - parts.denominators[..., None] * output[..., None, :]
                effects = (effects / total[..., None]).permute(1, 3, 0, 2, 4).flatten(2)
                error = (output - parts.wanted).transpose(0, 1).flatten(1)
                gram[place, parts.blocks] += effects @ effects.mT
                slope[place, parts.blocks] -= (effects @ error[..., None])[..., 0]
    return gram, slope


def _errors(given: list[BlockInput], projections: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Squared error of every row: (H, M), with 1 for H where heads share one matrix."""
    errors = torch.zeros_like(weights[..., 0])
    for call in given:
        for head, projection in enumerate(projections):
            place = head % len(weights)
            for parts in _parts(call, head, projection):
                output, _ = parts.output(weights[place])
                errors[place, parts.blocks] += (output - parts.wanted).square().sum(dim=(0, 2, 3))
    return errors


def nonnegative_step(gram: torch.Tensor, slope: torch.Tensor, start: torch.Tensor, damping: float) -> torch.Tensor:
    """The x ≥ 0 that minimises (x − start)ᵀ (G + λ) (x − start) / 2 − slopeᵀ (x − start), by coordinate descent.

    Args:
        gram: G, (..., M, M), positive semidefinite.
        slope: (..., M).
        start: (..., M).
        damping: λ in units of the mean of G's diagonal.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    held = damping * diagonal.mean(dim=-1, keepdim=True) + torch.finfo(gram.dtype).tiny
    x = start.clone()
    for _ in range(_SWEEPS):
        for place in range(x.shape[-1]):
            moved = x - start
            pull = slope[..., place] - (gram[..., place, :] * moved).sum(dim=-1) - held[..., 0] * moved[..., place]
            x[..., place] = (x[..., place] + pull / (diagonal[..., place] + held[..., 0])).clamp_min(0)
    return x
