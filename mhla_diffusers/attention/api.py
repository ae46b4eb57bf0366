"""The one entry to MHLA as a function: checks the arguments and picks a backend."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial

import torch

from .block_lists import BlockLists, ContentRule
from .blocks import Shape, check_layout
from .call import Call, split_call, with_rotary
from .causal import Causal, CausalAttention, check_causal
from .checks import check_axes, check_beside_causal, check_call, check_rotary, check_tensors, tokens_in_order
from .extra import Extra, check_extra
from .feature_maps import get_feature_map
from .layout import block_count
from .linear import block_states, read_states
from .merge import LinearAttention, merged_attention
from .own_block import own_block_attention
from .parallel.collectives import summed
from .parallel.place import Parallel
from .parallel.softmax import of_everyone
from .parallel.sparse import ring_sparse_attention
from .parallel.ulysses import attend_by_heads
from .rope import Rotary
from .sparse import ROWS, softmax_attention, sparse_attention, with_lists
from .triton import TRITON_CAUSAL, triton_attention, why_not

logger = logging.getLogger(__name__)

_EAGER = LinearAttention(block_states, read_states)


def _attend_eagerly(call: Call) -> torch.Tensor:
    call = with_lists(call)
    if call.lists is None:
        return _EAGER(call)
    return merged_attention(call, sparse_attention if call.group is None else ring_sparse_attention, _EAGER)


_BACKENDS: dict[str, Callable[[Call], torch.Tensor]] = {"eager": _attend_eagerly, "triton": triton_attention}


CAUSAL_BACKENDS = {
    "eager": CausalAttention(_EAGER, own_block_attention),
    "triton": TRITON_CAUSAL,
}
"""By the names of backends."""


def backend_names() -> list[str]:
    """What ``backend`` of :func:`mhla_attention` may be."""
    return ["auto", *_BACKENDS]


def check_backend(name: str) -> None:
    """Raise unless ``name`` is a backend.

    Raises:
        ValueError: with the nearest names.
    """
    if name not in backend_names():
        near = get_close_matches(str(name), backend_names(), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown backend {name!r}; allowed: {', '.join(backend_names())}.{hint}")


def mhla_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Sequence[int],
    blocks: Sequence[int],
    *,
    feature_map: str = "relu",
    rotary: Rotary | None = None,
    rotary_axes: Sequence[int] | None = None,
    rope: str = "after",
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: torch.Tensor | None = None,
    output_norm: torch.Tensor | None = None,
    output_gate: torch.Tensor | None = None,
    linear_weight: torch.Tensor | None = None,
    sparse: BlockLists | ContentRule | None = None,
    pooled_bias: torch.Tensor | None = None,
    extra: Extra = (0, 0),
    parallel: Parallel | None = None,
    causal: Causal | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-Head Linear Attention (paper, Eq. 3-5).

    For a query q in block i, with φ the feature map, S_b = Σ φ(k_t) v_tᵀ and z_b = Σ φ(k_t) over the tokens t of
    block b::

        o = φ(q)ᵀ Σ_b m_ib S_b  /  φ(q)ᵀ Σ_b m_ib z_b

    The weights that a query gives to all tokens sum to 1, except with RoPE after the feature map, which turns the
    numerator alone. Differentiable in query, key, value, mixing, output_norm and output_gate.

    Extra tokens, such as the text of joint attention, are in no block. Every query of the grid attends to
    each of them with softmax, under one denominator with all else (λ is 1 without ``sparse`` if it is not given), and
    they attend to all N tokens with softmax.

    Shapes: B batch, N tokens, H heads, D head dim, M blocks.

    Args:
        query: (B, N, H, D) floating point, tokens in raster order of the grid.
        key: like ``query``.
        value: like ``query``.
        mixing: (M, M), or (H, M, M) for one matrix per head; row i belongs to query block i. Any float type.
        grid: token grid, 1 to 3 axes whose product is N, less the extra tokens.
        blocks: block count per axis of the grid; the product is M.
        feature_map: a name registered with :func:`register_feature_map`.
        rotary: (cos, sin), each (1 or B, N, 1, D), as diffusers' Wan computes them; None for no RoPE.
        rotary_axes: channels of the head that turn with each axis of the grid, in order, such as (44, 42, 42): says
            that the angles of a channel depend on its axis alone, so that kernels read one row for every place on an
            axis instead of one for every token. None for angles of any kind.
        rope: "after": rotate φ(q) and φ(k), normaliser unrotated; "before": rotate q and k, then apply φ.
        normalize: divide by the normaliser. Without it the output grows with N and ``output_norm`` should fix it.
        eps: floor that the relu and elu+1 feature maps add.
        key_mask: (B, N), bool (True takes part) or a weight in [0, 1] on φ(k). A sample of which no key takes part gets
            0, as from PyTorch's attention.
        output_norm: (D,) weight of an RMSNorm over each head's output, of the grid's tokens alone.
        output_gate: (B, product of the grid, H, D); the output of the grid's tokens is multiplied with its SiLU.
        linear_weight: λ, (H,), positive, of which those on a CPU are looked at, since a GPU would have to be waited
            for: beside ``sparse`` or extra tokens, the weights of MHLA over all blocks are multiplied with it; see
            :mod:`mhla_diffusers.attention.merge`. None for the sparse branch alone.
        sparse: blocks of keys that every head of every query block attends to with softmax, under one denominator with
            the linear branch; see :mod:`mhla_diffusers.attention.sparse`. :class:`ContentRule` to choose them by query
            and key. Where all pairs of blocks are listed, that is softmax attention, and ``linear_weight`` and
            ``pooled_bias`` have no part. None for MHLA throughout.
        pooled_bias: β, (H,): every block that is not listed takes part in that softmax as one key, its mean, with β
            added to the logit; see :mod:`mhla_diffusers.attention.sparse`. None to leave these blocks to the linear
            branch.
        extra: how many tokens stand before, and how many after those of the grid in the sequence; of a ring of
            processes each has at least one or none of them any.
        parallel: the processes between which the tokens are split, each of which calls this with its own: all above of
            N tokens is of these, and ``extra`` counts these. What is of heads is of all H, except the lists of
            ``sparse``, which are of the heads that the process attends with (:meth:`Parallel.heads`). The gradients
            that the processes get add up to the gradient. None for this process alone.
        causal: "token": a query sees no later token of its sequence, the one axis of the grid. "block": it sees no
            later block of the first axis, and of its own and earlier ones every token. The sequence may end before the
            grid does, with "block" behind a whole block. With ``linear_weight`` the own block along the first axis
            is attended to with softmax, and the earlier ones with these weights;
            :mod:`mhla_diffusers.attention.causal`. None for attention that knows no order.
        backend: one of :func:`backend_names`. "triton": fused kernels, for float32, bfloat16 and float16 on CUDA and
            ROCm devices, D up to 256 and the built-in feature maps. "eager": torch operations, for everything. "auto":
            triton on a CUDA or ROCm device if it can run the call, else eager.

    Returns:
        (B, N, H, D) in the type of ``query``; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, types, devices, grid, blocks, feature map, rope or backend do not fit, or the backend
            asked for cannot run the call.
    """
    grid, blocks = check_layout(grid, blocks, is_causal=causal is not None)
    get_feature_map(feature_map)
    check_backend(backend)
    check_tensors(query, key, value)
    if rotary is not None:
        check_rotary(rotary, query)
    if not isinstance(sparse, BlockLists | ContentRule | None):
        raise ValueError(f"sparse={sparse!r} must be BlockLists, ContentRule or None.")
    axes = check_axes(rotary_axes, grid, query.shape[3])
    extra = check_extra(extra)
    if causal is not None:
        check_causal(causal, grid, blocks)
        check_beside_causal(causal, extra, sparse=sparse, pooled_bias=pooled_bias, parallel=parallel)
    first, count = (0, math.prod(grid)) if parallel is None else parallel.own_share(math.prod(grid))
    if causal is not None:
        count = tokens_in_order(query, grid, blocks, causal)
    call = Call(
        query,
        key,
        value,
        mixing,
        grid,
        blocks,
        feature_map,
        None,
        rope,
        normalize,
        eps,
        key_mask,
        output_norm,
        output_gate,
        linear_weight,
        sparse if isinstance(sparse, BlockLists) else None,
        pooled_bias,
        first=first,
        causal=causal,
        rule=sparse if isinstance(sparse, ContentRule) else None,
    )
    if parallel is not None and parallel.ring.size > 1:
        call = replace(call, group=parallel.ring.name, shares=tuple(parallel.segments(math.prod(grid))))
    check_call(call, extra, count, parallel)
    if query.numel() == 0:
        return torch.empty_like(query)
    backend = chosen_backend(backend, query, feature_map, _block_size(call, extra))
    if causal is not None:
        return _attend_where_keys_are(
            call if rotary is None else with_rotary(call, rotary, None), CAUSAL_BACKENDS[backend]
        )
    attend = partial(_attend, _BACKENDS[backend], parallel)
    if parallel is not None and parallel.ulysses.size > 1:
        return attend_by_heads(call, rotary, axes, extra, parallel, attend)
    return attend(call, rotary, axes, extra)


def _block_size(call: Call, extra: Extra) -> int | None:
    """Rows of the blocks that softmax is attended to in; None for MHLA throughout."""
    if call.rule is not None:
        return call.rule.block_size
    if call.lists is not None:
        return call.lists.block_size
    return ROWS if any(extra) else None


def chosen_backend(backend: str, query: torch.Tensor, feature_map: str, block_size: int | None = None) -> str:
    """What "auto" stands for with such a query (B, N, H, D), and uniform blocks of such a size."""
    if backend != "auto":
        return backend
    if query.device.type != "cuda" or why_not(query, feature_map) is not None:
        return "eager"
    reason = why_not(query, feature_map, block_size)
    if reason is not None and not torch.compiler.is_compiling():  # a call of the logger would break the graph
        _say_eager(reason)
    return "triton" if reason is None else "eager"


@cache
def _say_eager(reason: str) -> None:
    """Said once per reason."""
    logger.warning("Eager operations take the place of the Triton kernels: %s.", reason)


def _attend_where_keys_are(call: Call, attend: Callable[[Call], torch.Tensor]) -> torch.Tensor:
    """Attend, and give 0 to samples whose mask leaves no key, as PyTorch's attention does.

    They attend to all keys meanwhile: a quotient of zeros would be NaN, and its gradients stay NaN when it is replaced.
    """
    if call.key_mask is None:
        return attend(call)
    keys = summed((call.key_mask != 0).any(dim=1).float(), call.group)
    has_none = (keys == 0)[:, None]
    output = attend(replace(call, key_mask=call.key_mask.masked_fill(has_none, 1)))
    return output.masked_fill(has_none[..., None, None], 0)


def _attend(
    run: Callable[[Call], torch.Tensor],
    parallel: Parallel | None,
    call: Call,
    rotary: Rotary | None,
    axes: Shape | None,
    extra: Extra,
) -> torch.Tensor:
    """With a whole sequence, or a share of its tokens."""
    return _attend_where_keys_are(call, partial(_attend_to_keys, run, parallel, rotary, axes, extra))


def _attend_to_keys(
    run: Callable[[Call], torch.Tensor],
    parallel: Parallel | None,
    rotary: Rotary | None,
    axes: Shape | None,
    extra: Extra,
    call: Call,
) -> torch.Tensor:
    """With the extra tokens put aside."""
    if any(extra):
        call, rotary = split_call(call, rotary, extra)
        if parallel is not None and call.group is not None and call.extra is not None:
            call = replace(call, extra=of_everyone(call.extra, parallel.ring, not parallel.anything))
        if call.lists is None and call.rule is None:
            call = _beside_extra_alone(call)
    if rotary is not None:
        # a share of the tokens need not have every place on every axis, of which a table of axes holds a row
        call = with_rotary(call, rotary, axes if call.group is None else None)
    if call.lists_everything:
        # softmax leaves nothing to the other branches
        call = replace(call, linear_weight=None, pooled_bias=None)
        if call.group is None:
            return softmax_attention(call)
        rule = None if call.rule is None else replace(call.rule, fit_pooled_bias=False)
        call = replace(call, rule=rule)
    return run(call)


def _beside_extra_alone(call: Call) -> Call:
    """With the empty lists and the λ that ``sparse=None`` stands for beside extra tokens."""
    heads, device = call.query.shape[2], call.query.device
    weight = call.linear_weight if call.linear_weight is not None else torch.ones(heads, device=device)
    lists = BlockLists.empty(ROWS, heads, block_count(call.grid, ROWS), device)
    return replace(call, lists=lists, linear_weight=weight)
