"""The one entry to MHLA as a function: checks the arguments once and picks a backend."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, get_args

import torch

from .call import BlockLists, Call, ContentRule, split_call, with_rotary
from .causal import Causal, CausalAttention, own_block_attention
from .feature_maps import get_feature_map
from .layout import Extra, Shape, block_count, check_layout, frame_block_starts
from .linear import block_states, read_states
from .merge import LinearAttention, merged_attention
from .parallel.collectives import summed
from .parallel.place import Parallel
from .parallel.sparse import of_everyone, ring_sparse_attention
from .parallel.ulysses import attend_by_heads
from .rope import Rotary
from .sparse import ROWS, softmax_attention, sparse_attention, with_lists
from .triton import TRITON_CAUSAL, triton_attention, why_not

logger = logging.getLogger(__name__)

_EAGER = LinearAttention(block_states, read_states)


def _attend_eagerly(call: Call) -> torch.Tensor:
    if call.lists is None and call.rule is None:
        return _EAGER(call)
    sparse = sparse_attention if call.group is None else ring_sparse_attention
    return merged_attention(with_lists(call), sparse, _EAGER)


_BACKENDS: dict[str, Callable[[Call], torch.Tensor]] = {"eager": _attend_eagerly, "triton": triton_attention}
CAUSAL_BACKENDS = {"eager": CausalAttention(_EAGER, own_block_attention), "triton": TRITON_CAUSAL}


def backend_names() -> list[str]:
    """What ``backend`` of :func:`mhla_attention` may be."""
    return ["auto", *_BACKENDS]


def check_backend(name: str) -> None:
    """Ensure that ``name`` is a backend.

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

    The weights that a query gives to all tokens sum to 1, except with RoPE after the feature map, which rotates the
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
    axes, extra = _check_axes(rotary_axes, grid, query.shape[3]), _check_extra(extra)
    if causal is not None:
        check_causal(causal, grid, blocks)
        _check_beside_causal(causal, extra, sparse=sparse, pooled_bias=pooled_bias, parallel=parallel)
        first, count = 0, _tokens_in_order(query, grid, blocks, causal)
    else:
        first, count = (0, math.prod(grid)) if parallel is None else parallel.own_share(math.prod(grid))
    lists = sparse if isinstance(sparse, BlockLists) else None
    rule = sparse if isinstance(sparse, ContentRule) else None
    # in the order of its fields, the first without RoPE
    of_map = feature_map, None, rope, normalize, eps, key_mask
    weights = output_norm, output_gate, linear_weight, lists, pooled_bias
    call = Call(query, key, value, mixing, grid, blocks, *of_map, *weights, first=first, causal=causal, rule=rule)
    if parallel is not None and parallel.ring.size > 1:
        call = replace(call, group=parallel.ring.name, shares=tuple(parallel.segments(math.prod(grid))))
    check_call(call, extra, count, parallel)
    if query.numel() == 0:
        return torch.empty_like(query)
    of_softmax = rule or lists
    block_size = of_softmax.block_size if of_softmax is not None else ROWS if any(extra) else None
    backend = chosen_backend(backend, query, feature_map, block_size)
    if causal is not None:
        call = call if rotary is None else with_rotary(call, rotary, None)
        return _attend_where_keys_are(call, CAUSAL_BACKENDS[backend])
    attend = partial(_attend, _BACKENDS[backend], parallel)
    if parallel is not None and parallel.ulysses.size > 1:
        return attend_by_heads(call, rotary, axes, extra, parallel, attend)
    return attend(call, rotary, axes, extra)


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

    def with_extra_put_aside(call: Call) -> torch.Tensor:
        table = rotary
        if any(extra):
            call, table = split_call(call, rotary, extra)
            if parallel is not None and call.group is not None and call.extra is not None:
                call = replace(call, extra=of_everyone(call.extra, parallel.ring, not parallel.anything))
            if call.lists is None and call.rule is None:  # sparse=None stands for empty lists and a λ of 1 then
                heads, device = call.query.shape[2], call.query.device
                weight = call.linear_weight if call.linear_weight is not None else torch.ones(heads, device=device)
                lists = BlockLists.empty(ROWS, heads, block_count(call.grid, ROWS), device)
                call = replace(call, lists=lists, linear_weight=weight)
        if table is not None:
            # a share of the tokens need not have every place on every axis, of which a table of axes holds a row
            call = with_rotary(call, table, axes if call.group is None else None)
        if call.lists_everything:  # softmax leaves nothing to the other branches
            call = replace(call, linear_weight=None, pooled_bias=None)
            if call.group is None:
                return softmax_attention(call)
            rule = None if call.rule is None else replace(call.rule, fit_pooled_bias=False)
            call = replace(call, rule=rule)
        return run(call)

    return _attend_where_keys_are(call, with_extra_put_aside)


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Ensure that they are (B, N, H, D) of one kind."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_is_tensor(name, tensor)
    if query.ndim != 4:
        raise ValueError(f"query must be (B, N, H, D), got shape {tuple(query.shape)}.")
    if not query.is_floating_point():
        raise ValueError(f"query must be floating point, got {query.dtype}.")
    for name, tensor in (("key", key), ("value", value)):
        for what in ("shape", "dtype", "device"):
            expected, found = getattr(query, what), getattr(tensor, what)
            if found != expected:
                raise ValueError(f"{name} has {what} {found}, but query has {expected}; they must be the same.")


def _check_is_tensor(name: str, value: object) -> None:
    """Ensure that it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_rotary(rotary: Rotary, query: torch.Tensor) -> None:
    """Ensure that the tables are those of the query's tokens."""
    batch, tokens, _, head_dim = query.shape
    for table in rotary:
        if table.shape[0] not in (1, batch) or tuple(table.shape[1:]) != (tokens, 1, head_dim):
            raise ValueError(
                f"rotary tables must be (1 or {batch}, {tokens}, 1, {head_dim}), got {tuple(table.shape)}."
            )
    if head_dim % 2:
        raise ValueError(f"RoPE rotates pairs of channels, and the head dim is {head_dim}; it must be even.")


def _check_axes(axes: Sequence[int] | None, grid: Shape, head_dim: int) -> Shape | None:
    """The channels that turn with each axis, as a tuple."""
    if axes is None:
        return None
    if len(axes) != len(grid) or sum(axes) != head_dim or any(count < 0 or count % 2 for count in axes):
        raise ValueError(
            f"rotary_axes={tuple(axes)} must be an even number of channels for each of the {len(grid)} axes of the "
            f"grid, {head_dim} in all."
        )
    return tuple(axes)


def _check_extra(extra: Any) -> Extra:
    """Return ``extra`` as a tuple."""
    counts = tuple(extra) if isinstance(extra, Sequence) else ()
    if len(counts) == 2 and all(isinstance(count, int) and count >= 0 for count in counts):
        return counts[0], counts[1]
    raise ValueError(
        f"extra={extra!r} must be two counts, how many tokens stand before and after those of the grid, for "
        "example (0, 77)."
    )


def check_causal(causal: str, grid: Shape, blocks: Shape) -> None:
    """Ensure that a grid and its blocks have such an order.

    Raises:
        ValueError: another name, or "token" where a block is no run of the sequence.
    """
    if causal not in get_args(Causal):
        raise ValueError(f"Unknown causal={causal!r}; allowed: 'token', 'block' or None.")
    if causal == "token" and math.prod(grid[1:]) > 1:
        raise ValueError(
            f"causal='token' orders the tokens of a sequence, and the grid {grid} has several axes; give it as "
            f"({math.prod(grid)},), or causal='block' for frames of which each is seen whole."
        )


def _check_beside_causal(causal: str, extra: Extra, **others: object) -> None:
    """Ensure that a causal call goes without what it has no place for; of ``others``, by name, None is not given."""
    given = {"extra": any(extra)} | {name: value is not None for name, value in others.items()}
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"{name} does not go with causal={causal!r}, which attends to its own block with softmax if "
            "linear_weight is given, to earlier ones through their states, and runs in one process."
        )


def _tokens_in_order(query: torch.Tensor, grid: Shape, blocks: Shape, causal: str) -> int:
    """How many tokens of the grid a causal call has: all those of the query, if they may be."""
    tokens = query.shape[1]
    if tokens > math.prod(grid):
        raise ValueError(
            f"The sequence has N={tokens} tokens, more than the {math.prod(grid)} of the grid {grid}; give the grid of "
            "a longer sequence, and for more blocks than were trained the mixing matrix that extend_mixing() makes."
        )
    if causal == "block" and tokens not in (ends := frame_block_starts(grid, blocks)):
        raise ValueError(
            f"With causal='block' a sequence ends behind a block of the first axis; allowed N on the grid {grid} with "
            f"blocks={blocks} are {', '.join(map(str, ends[1:]))}, got {tokens}."
        )
    return tokens


def check_call(call: Call, extra: Extra, on_grid: int, parallel: Parallel | None) -> None:
    """Ensure that all of a call fits together; ``on_grid`` are the tokens of the grid that this process has."""
    batch, tokens, heads, head_dim = call.query.shape
    share = (
        "" if parallel is None else f", of which process {parallel.whole.rank} of {parallel.whole.size} has a share,"
    )
    if any(extra) and on_grid + sum(extra) != tokens:
        raise ValueError(
            f"{extra[0]} tokens before the grid + {on_grid} of the grid {call.grid}{share} + {extra[1]} after "
            f"it are {on_grid + sum(extra)}, but query has N={tokens}; extra={extra} must be what the grid "
            "leaves of N."
        )
    if not any(extra) and on_grid != tokens:
        raise ValueError(
            f"Token grid {call.grid}{share} holds {on_grid} tokens, but query has N={tokens}; the product of the grid "
            "must be N. Tokens that have no place on it are given by extra=(before, after)."
        )
    _check_is_tensor("mixing", call.mixing)
    if not call.mixing.is_floating_point():
        raise ValueError(f"mixing must be floating point, got {call.mixing.dtype}.")
    blocks = math.prod(call.blocks)
    if tuple(call.mixing.shape) not in ((blocks, blocks), (heads, blocks, blocks)):
        raise ValueError(
            f"mixing has shape {tuple(call.mixing.shape)}; for {blocks} blocks and {heads} heads it must be "
            f"({blocks}, {blocks}) or ({heads}, {blocks}, {blocks})."
        )
    if not call.eps >= 0:
        raise ValueError(f"eps={call.eps} must not be negative; it is the floor of feature maps, such as 1e-6.")
    if call.rope not in ("after", "before"):
        raise ValueError(f"Unknown rope={call.rope!r}; allowed: 'after' or 'before' (the feature map).")
    expected = {
        "key_mask": (batch, tokens),
        "output_norm": (head_dim,),
        "output_gate": (batch, on_grid, heads, head_dim),
        "linear_weight": (heads,),
        "pooled_bias": (heads,),
    }
    for name, shape in expected.items():
        tensor = getattr(call, name)
        if tensor is not None:
            _check_is_tensor(name, tensor)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}.")
    if any(extra) and not call.normalize:
        raise ValueError("Extra tokens share one denominator with those of the grid, which needs normalize=True.")
    far = call.linear_weight
    if far is not None and _is_free_to_read(far) and not bool((far >= 0).all()):
        raise ValueError(
            f"linear_weight={far.tolist()} holds what is not a positive number; a weight of the linear branch is "
            "a factor of weights that are all positive, such as the exponential of what is trained."
        )
    if far is not None and not call.normalize:
        raise ValueError("Softmax weights share one denominator with the linear branch, which needs normalize=True.")
    has_linear_branch = far is not None or any(extra) and call.lists is None and call.rule is None
    if has_linear_branch and call.feature_map == "relu" and not call.eps > 0:
        raise ValueError(
            f"eps={call.eps} lets a query of the relu feature map have no linear branch; it must be positive."
        )
    if call.causal == "token" and call.normalize and call.feature_map == "relu" and not call.eps > 0:
        raise ValueError(
            f"eps={call.eps} lets a query of the relu feature map see nothing in its own block, which causal='token' "
            "divides by what it sees; it must be positive."
        )
    if call.causal is not None:
        return
    own = range(heads) if parallel is None else range(heads)[parallel.heads(heads)]
    _check_sparse(call, any(extra), len(own))


def _check_sparse(call: Call, has_extra: bool, heads: int) -> None:
    if call.rule is not None:
        if call.rule.fit_pooled_bias and call.pooled_bias is not None:
            raise ValueError("pooled_bias is given, and fit_pooled_bias=True would fit another; leave one of them out.")
        return
    lists = call.lists
    if lists is None:
        for name in ("pooled_bias",) if has_extra else ("pooled_bias", "linear_weight"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name} weighs what stands beside block lists; give sparse as well.")
        return
    blocks = block_count(call.grid, lists.block_size)
    if lists.blocks != blocks:
        raise ValueError(
            f"sparse has lists of {lists.blocks} blocks, but the grid {call.grid} is cut into {blocks} of "
            f"{lists.block_size} tokens."
        )
    if lists.heads != heads:
        attending = f"query has {heads}" if heads == call.query.shape[2] else f"this process attends with {heads}"
        raise ValueError(f"sparse has lists for {lists.heads} heads, but {attending}.")
    if lists.samples not in (1, call.query.shape[0]):
        raise ValueError(f"sparse has lists for {lists.samples} samples, but query has {call.query.shape[0]}.")
    if lists.keys.device != call.query.device:
        raise ValueError(f"sparse is on {lists.keys.device}, but query is on {call.query.device}.")
    if call.linear_weight is not None or call.pooled_bias is not None or has_extra:
        return
    if _is_free_to_read(lists.offsets) and not bool(lists.offsets.diff().all()):
        raise ValueError(
            "Some query blocks have an empty list, so they would attend to nothing; give linear_weight, pooled_bias, "
            "or every query block at least one key block."
        )


def _is_free_to_read(x: torch.Tensor) -> bool:
    """Whether reading values costs nothing: a device would have to be waited for, and a compiled graph would break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
