"""MHLA and sparse attention as functions: each makes a call of its arguments, checks it once and attends."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from numbers import Real
from typing import Any, get_args

import torch

from ..settings import said_allowed
from . import eager
from .call import DEFAULT_DENSITY, Backend, BlockLists, ContentRule, Far, MHLACall, Order, SparseCall, check_denominator
from .causal import Causal, causal_attention, frame_block_ends, see_nothing
from .derivatives import is_transformed
from .extra import ROWS
from .feature_maps import get_feature_map
from .layout import Extra, Shape, block_count, check_grid, check_layout, frame_block_starts
from .parallel.collectives import summed
from .parallel.place import Parallel
from .parallel.ulysses import Segment
from .precision import without_autocast
from .rope import Rotary, in_all_rows
from .sparse import softmax_attention
from .triton import backend as triton

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "eager", "triton")
"""What ``backend`` of :func:`mhla_attention` and :func:`sparse_attention` may be."""


def check_backend(name: str) -> None:
    """Ensure that ``name`` is a backend.

    Raises:
        ValueError: with the nearest names.
    """
    if name not in BACKENDS:
        raise ValueError(f"Unknown backend {name!r}; {said_allowed(name, BACKENDS)}")


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
    rope: str = "after",
    normalize: bool = True,
    eps: float = 1e-6,
    key_mask: torch.Tensor | None = None,
    output_norm: torch.Tensor | None = None,
    output_gate: torch.Tensor | None = None,
    linear_weight: torch.Tensor | None = None,
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
    each of them with softmax, under one denominator with all else, and they attend to all N tokens with softmax
    (:mod:`mhla_diffusers.attention.extra`).

    Shapes: B batch, N tokens, H heads, D head dim, M blocks.

    Args:
        query: (B, N, H, D) floating point, tokens in raster order of the grid.
        key: like ``query``.
        value: like ``query``.
        mixing: (M, M), or (H, M, M) for one matrix per head; row i belongs to query block i. Any float type.
            Beside softmax weights (``linear_weight``, extra tokens) not negative; checked on CPU only.
        grid: token grid, 1 to 3 axes whose product is N, less the extra tokens.
        blocks: block count per axis of the grid; the product is M.
        feature_map: a name registered with :func:`register_feature_map`.
        rotary: (cos, sin), each (1 or B, 1 or N, 1, D), as diffusers' Wan computes them; None for no RoPE.
        rope: "after": rotate φ(q) and φ(k), normaliser unrotated; "before": rotate q and k, then apply φ.
        normalize: divide by the normaliser. Without it the output grows with N and ``output_norm`` should fix it.
        eps: floor that the relu and elu+1 feature maps add; softmax has one of its own, 1e-18.
        key_mask: (B, N), bool (True takes part) or weights in [0, 1] on φ(k); the range is checked on CPU only. A
            query gets 0, as from PyTorch's attention, where all keys that it sees, or that its row of the mixing matrix
            gives weight to, are masked.
        output_norm: (D,) weight of an RMSNorm over each head's output, of the grid's tokens alone.
        output_gate: (B, product of the grid, H, D); the output of the grid's tokens is multiplied with its SiLU.
        linear_weight: λ, (H,): beside softmax over extra tokens, and over the own block with ``causal``, the weights of
            MHLA are multiplied with it. Must be positive; checked on CPU only, to avoid a device sync. None for 1
            beside extra tokens, and with ``causal`` for MHLA within the own block too.
        extra: how many tokens stand before, and how many after those of the grid in the sequence.
        parallel: the processes between which the tokens are split, each of which calls this with its own: all above of
            N tokens is of these, and ``extra`` counts these. The gradients that the processes get add up to the
            gradient. A ring of processes runs MHLA without extra tokens. None for one process.
        causal: "token": a query sees no later token of its sequence, the one axis of the grid. "block": it sees no
            later block of the first axis, and of its own and earlier ones every token. The sequence may end before the
            grid does, with "block" behind a whole block. With ``linear_weight`` the own block along the first axis
            is attended to with softmax, and the earlier ones with these weights;
            :mod:`mhla_diffusers.attention.causal`. None for attention that knows no order.
        backend: "triton": fused kernels, for float32, bfloat16 and float16 on CUDA and ROCm devices, D up to 256 and
            the built-in feature maps. "eager": torch operations, for everything. "auto": triton on a CUDA or ROCm
            device if it can run the call, else eager.

    Returns:
        (B, N, H, D) in the type of ``query``; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, types, devices, grid, blocks, feature map, rope or backend do not fit, or the backend
            asked for cannot run the call.
    """
    grid, blocks = check_layout(grid, blocks, is_causal=causal is not None)
    call = MHLACall(
        query=query,
        key=key,
        value=value,
        mixing=mixing,
        grid=grid,
        blocks=blocks,
        feature_map=feature_map,
        rotary=rotary,
        rope=rope,
        normalize=normalize,
        eps=eps,
        key_mask=key_mask,
        output_norm=output_norm,
        output_gate=output_gate,
        linear_weight=linear_weight,
        extra=tuple(extra) if isinstance(extra, Sequence) else extra,  # type: ignore[arg-type]
        parallel=parallel,
        causal=causal,
    )
    return attend(call, backend)


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: Sequence[int],
    *,
    density: float | None = None,
    block_size: int | None = None,
    key_block_size: int | None = None,
    order: Order | None = None,
    lists: BlockLists | None = None,
    far: Far = "first-order",
    pooled_bias: torch.Tensor | None = None,
    state_weight: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    key_mask: torch.Tensor | None = None,
    extra: Extra = (0, 0),
    parallel: Parallel | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Softmax attention to the blocks of keys that matter most, and to all others through their means and states.

    Three parts, which :mod:`mhla_diffusers.attention.sparse` derives: the keys of listed blocks, the mean key and value
    of every other block, and MHLA's states of these blocks, mixed by content, as the first-order term. Nothing is
    trained. Differentiable in query, key and value; lists, order, β and γ are constants then.

    Shapes: B batch, N tokens, H heads, D head dim.

    Args:
        query: (B, N, H, D) floating point, tokens in raster order of the grid.
        key: like ``query``.
        value: like ``query``.
        grid: token grid, 1 to 3 axes whose product is N, less the extra tokens.
        density: part of all pairs of blocks that is listed, more than 0 and at most 1, which is softmax attention;
            None for 0.025. Every query block lists at least one key block.
        block_size: tokens per block of queries, which follow a Hilbert curve through the grid; None fits it to the
            grid, 64 for videos.
        key_block_size: tokens per block of keys; must divide ``block_size``. None means ``block_size``, or fits the
            grid if that is None too.
        order: "content" (None): every head sorts the keys of each stretch of the curve, so that a block holds keys that
            are alike. "curve": a block holds neighbours.
        lists: key blocks of every query block, in place of those chosen by content and the four arguments before.
        far: "first-order", or "means" without the states.
        pooled_bias: β, (H,), added to the logits of the means. None to fit it, and γ, within the call.
        state_weight: γ, (H,), weight of the first-order term; given exactly where ``pooled_bias`` is, except with
            ``far="means"``.
        rotary: (cos, sin), each (1 or B, 1 or N, 1, D), as diffusers' Wan computes them; None for no RoPE.
        key_mask: (B, N), bool (True takes part) or weights in [0, 1]; the range is checked on CPU only. A sample whose
            keys are all masked gets 0, as from PyTorch's attention.
        extra: tokens before and after those of the grid in the sequence, such as text; all queries attend to them, and
            they to everything.
        parallel: the processes between which the tokens are split, as in :func:`mhla_attention`; ``lists`` are of the
            heads that a process attends with. None for one process.
        backend: see :func:`mhla_attention`; the kernels take blocks of 16, 32, 64 and 128 tokens.

    Returns:
        (B, N, H, D) in the type of ``query``; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, types, devices, grid, block sizes or lists do not fit, or the backend asked for cannot run
            the call.
    """
    grid = check_grid(grid)
    given = {"density": density, "block_size": block_size, "key_block_size": key_block_size, "order": order}
    if lists is not None and (both := [name for name, value in given.items() if value is not None]):
        raise ValueError(f"lists say what {', '.join(both)} would choose; give one of the two.")
    density = DEFAULT_DENSITY if density is None else density
    call = SparseCall(
        query=query,
        key=key,
        value=value,
        grid=grid,
        sparse=lists or ContentRule.on(grid, density, block_size, key_block_size, order or "content"),
        far=far,
        pooled_bias=pooled_bias,
        state_weight=state_weight,
        rotary=rotary,
        key_mask=key_mask,
        extra=tuple(extra) if isinstance(extra, Sequence) else extra,  # type: ignore[arg-type]
        parallel=parallel,
    )
    return attend(call, backend)


def attend(call: MHLACall | SparseCall, backend: str = "auto") -> torch.Tensor:
    """Check a call and run it: (B, N, H, D).

    Raises:
        ValueError: as :func:`mhla_attention` and :func:`sparse_attention`.
    """
    check_call(call)
    call = _check_place(call)
    if call.query.numel() == 0:
        return empty_output(call)
    call = replace(call, rotary=in_all_rows(call.rotary, call.query.shape[1]))
    module = backend_for(call, backend)
    if isinstance(call, SparseCall) and call.lists_everything:  # PyTorch's attention, whose precision autocast may say
        return _with_processes(call, module)
    with without_autocast(call.query.device):
        return _with_processes(call, module)


def _with_processes(call: MHLACall | SparseCall, backend: Backend) -> torch.Tensor:
    """Attend, with others that hold tokens of the sequence, if there are any."""
    if call.parallel is None or call.parallel.ulysses.size == 1:
        return _attend(call, backend)
    segment = Segment(call)
    return segment.of_tokens(call, _attend(segment.of_heads(call), backend))


def empty_output(call: MHLACall | SparseCall) -> torch.Tensor:
    """The output of a call without a sample, head or channel: all that is learned gets a gradient, of zeros."""
    output = call.query + call.key + call.value
    if isinstance(call, MHLACall):
        for learned in (call.mixing, call.output_norm, call.output_gate, call.linear_weight):
            if learned is not None:
                output = output + (0 * learned.sum()).to(output.dtype)
    return output


def _attend(call: MHLACall | SparseCall, backend: Backend) -> torch.Tensor:
    """Attend with a whole sequence, or a share of it that a process of a ring holds.

    Queries whose mask leaves no key get 0, as from PyTorch's attention. They attend to all keys meanwhile, causal ones
    to those that they see: a quotient of zeros would be NaN, and its gradients stay NaN when it is replaced.
    """
    if isinstance(call, MHLACall) and call.causal is not None:
        output = causal_attention(call, backend)
        if call.key_mask is None:
            return output
        return output.masked_fill(see_nothing(call.key_mask, frame_block_ends(call))[..., None, None], 0)
    has_none: torch.Tensor | None = None
    if call.key_mask is not None:
        has_none = summed((call.key_mask != 0).any(dim=1).float(), call.group)[:, None] == 0
        call = replace(call, key_mask=call.key_mask.masked_fill(has_none, 1))
    if isinstance(call, SparseCall):
        output = softmax_attention(call) if call.lists_everything else backend.sparse(call)
    else:
        output = backend.beside_extra(call) if any(call.extra) else backend.linear(call)
    return output if has_none is None else output.masked_fill(has_none[..., None, None], 0)


def backend_for(call: MHLACall | SparseCall, name: str) -> Backend:
    """The backend of a name, and for "auto" the best that can run the call."""
    if name not in BACKENDS:
        check_backend(name)
    feature_map = call.feature_map if isinstance(call, MHLACall) else "relu"
    # a call like float64's, which no kernel takes whatever its blocks, is not worth a warning
    if name == "auto" and call.query.device.type == "cuda" and triton.why_not(call.query, feature_map) is None:
        sizes = call.sparse.sizes if isinstance(call, SparseCall) else (ROWS,) if any(call.extra) else ()
        reason = triton.why_not(call.query, feature_map, *sizes)
        if reason is None:
            return triton
        if not torch.compiler.is_compiling():  # a call of the logger would break the graph
            _say_eager(reason)
    return triton if name == "triton" else eager


@cache
def _say_eager(reason: str) -> None:
    """Warn, once per reason."""
    logger.warning("Eager operations take the place of the Triton kernels: %s.", reason)


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


def check_call(call: MHLACall | SparseCall) -> None:
    """Ensure that all of a call fits together, but for the number of its tokens."""
    given = {"query": call.query, "key": call.key, "value": call.value}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if call.query.ndim != 4:
        raise ValueError(f"query must be (B, N, H, D), got shape {tuple(call.query.shape)}.")
    if not call.query.is_floating_point():
        raise ValueError(f"query must be floating point, got {call.query.dtype}.")
    for name, tensor in (("key", call.key), ("value", call.value)):
        for what in ("shape", "dtype", "device"):
            expected, found = getattr(call.query, what), getattr(tensor, what)
            if found != expected:
                raise ValueError(f"{name} has {what} {found}, but query has {expected}; they must be the same.")
    batch, tokens, heads, head_dim = call.query.shape
    tables: Any = () if call.rotary is None else call.rotary
    is_pair = isinstance(tables, tuple | list) and len(tables) == 2
    if call.rotary is not None and not (is_pair and all(isinstance(x, torch.Tensor) for x in tables)):
        got = [type(x).__name__ for x in tables] if isinstance(tables, tuple | list) else type(tables).__name__
        raise ValueError(f"rotary must be two tensors, (cos, sin), or None for no RoPE, got {got}.")
    for table in tables:
        shape = tuple(table.shape)
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, tokens) or shape[2:] != (1, head_dim):
            raise ValueError(
                f"rotary tables must be (1 or {batch}, {tokens}, 1, {head_dim}), got {shape}; one row is allowed for "
                "all tokens."
            )
    if call.rotary is not None and head_dim % 2:
        raise ValueError(f"RoPE rotates pairs of channels, and the head dim is {head_dim}; it must be even.")
    extra: Any = call.extra
    if not (isinstance(extra, tuple) and len(extra) == 2 and all(isinstance(x, int) and x >= 0 for x in extra)):
        raise ValueError(
            f"extra={extra!r} must be two counts, how many tokens stand before and after those of the grid, for "
            "example (0, 77)."
        )
    shapes: dict[str, Shape] = {"key_mask": (batch, tokens)}
    if isinstance(call, MHLACall):
        shapes |= {"output_norm": (head_dim,), "output_gate": (batch, tokens - sum(extra), heads, head_dim)}
        shapes |= {"linear_weight": (heads,)}
    else:
        shapes |= {"pooled_bias": (heads,), "state_weight": (heads,)}
    for name, shape in shapes.items():
        tensor = getattr(call, name)
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}.")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}.")
    mask = call.key_mask
    if mask is not None and _is_free_to_read(mask) and mask.numel() and not bool(((mask >= 0) & (mask <= 1)).all()):
        raise ValueError(
            f"key_mask has values from {mask.min():g} to {mask.max():g}; it must be bool or hold weights in [0, 1]. Of "
            "a mask that is added to logits that is mask.exp()."
        )
    if isinstance(call, MHLACall):
        _check_mhla(call)
    else:
        _check_sparse(call)


def _check_mhla(call: MHLACall) -> None:
    """Ensure that the mixing matrix fits, and that what the output is divided by is positive."""
    blocks, heads, mixing = math.prod(call.blocks), call.query.shape[2], call.mixing
    if not isinstance(mixing, torch.Tensor) or not mixing.is_floating_point():
        got = mixing.dtype if isinstance(mixing, torch.Tensor) else type(mixing).__name__
        raise ValueError(f"mixing must be a floating point tensor, got {got}.")
    if tuple(mixing.shape) not in ((blocks, blocks), (heads, blocks, blocks)):
        raise ValueError(
            f"mixing has shape {tuple(mixing.shape)}; for {blocks} blocks and {heads} heads it must be "
            f"({blocks}, {blocks}) or ({heads}, {blocks}, {blocks})."
        )
    get_feature_map(call.feature_map)
    if call.rope not in ("after", "before"):
        raise ValueError(f"Unknown rope={call.rope!r}; allowed: 'after' or 'before' (the feature map).")
    if not (isinstance(call.eps, Real) and call.eps >= 0):
        raise ValueError(f"eps={call.eps!r} must be a number from 0 up, the floor of feature maps, such as 1e-6.")
    weight, is_beside = call.linear_weight, call.linear_weight is not None or any(call.extra)
    if weight is not None and call.causal is None and not any(call.extra):
        raise ValueError(
            "linear_weight weighs MHLA beside softmax, which only extra tokens and causal attention have; leave it out."
        )
    if weight is not None and _is_free_to_read(weight) and not bool((weight > 0).all()):
        raise ValueError(
            f"linear_weight={weight.tolist()} must hold positive numbers, such as the exponential of what is trained."
        )
    if is_beside and _is_free_to_read(mixing) and not bool((mixing >= 0).all()):
        raise ValueError(
            f"mixing has entries down to {mixing.min():.3g}, and beside softmax weights the logarithm of its sums "
            "is taken; they must not be negative, as after mixing.clamp(min=0)."
        )
    check_denominator(call.feature_map, call.eps, call.normalize, is_beside, call.causal)


def _check_sparse(call: SparseCall) -> None:
    """Ensure that the lists and weights of a call fit its tensors."""
    if call.far not in get_args(Far):
        raise ValueError(f"Unknown far={call.far!r}; allowed: {', '.join(map(repr, get_args(Far)))}.")
    wanted = call.pooled_bias is not None and call.far == "first-order"
    if (call.state_weight is not None) != wanted:
        raise ValueError(
            "pooled_bias and state_weight are given both, or neither, and then fitted within the call; far='means' "
            "has no state_weight."
        )
    lists = call.sparse
    if isinstance(lists, ContentRule):
        return
    if not isinstance(lists, BlockLists):
        raise ValueError(f"lists={lists!r} must be BlockLists, or None to choose them by content.")
    blocks, all_heads = block_count(call.grid, lists.block_size), call.query.shape[2]
    key_blocks = block_count(call.grid, lists.key_block_size)
    for what, given, expected, size in (
        ("query", lists.blocks, blocks, lists.block_size),
        ("key", lists.key_blocks, key_blocks, lists.key_block_size),
    ):
        if given != expected:
            raise ValueError(
                f"lists are of {given} {what} blocks, but the grid {call.grid} is cut into {expected} of {size} tokens."
            )
    heads = all_heads if call.parallel is None else len(range(all_heads)[call.parallel.heads(all_heads)])
    if lists.heads != heads:
        attending = f"query has {heads}" if heads == all_heads else f"this process attends with {heads}"
        raise ValueError(f"lists are for {lists.heads} heads, but {attending}.")
    if lists.samples not in (1, call.query.shape[0]):
        raise ValueError(f"lists are for {lists.samples} samples, but query has {call.query.shape[0]}.")
    if lists.keys.device != call.query.device:
        raise ValueError(f"lists are on {lists.keys.device}, but query is on {call.query.device}.")


def _check_place(call: MHLACall | SparseCall) -> MHLACall | SparseCall:
    """Ensure that a call has the tokens of its grid, or a process's share of them: the call with its first token."""
    extra, tokens, grid, parallel = call.extra, call.query.shape[1], call.grid, call.parallel
    if isinstance(call, MHLACall) and call.causal is not None:
        check_causal(call.causal, grid, call.blocks)
        for name in [
            name for name, is_given in (("extra", any(extra)), ("parallel", parallel is not None)) if is_given
        ]:
            raise ValueError(
                f"{name} does not go with causal={call.causal!r}, which attends to its own block with softmax if "
                "linear_weight is given, to earlier ones through their states, and runs in one process."
            )
        if tokens > math.prod(grid):
            raise ValueError(
                f"The sequence has N={tokens} tokens, more than the {math.prod(grid)} of the grid {grid}; give the "
                "grid of a longer sequence, and for more blocks than were trained the mixing matrix that "
                "extend_mixing() makes."
            )
        if call.causal == "block" and tokens not in (ends := frame_block_starts(grid, call.blocks)):
            raise ValueError(
                f"With causal='block' a sequence ends behind a block of the first axis; allowed N on the grid {grid} "
                f"with blocks={call.blocks} are {', '.join(map(str, ends[1:]))}, got {tokens}."
            )
        return call
    first, count, share = 0, math.prod(grid), ""
    if parallel is not None:
        first, count = parallel.own_share(count)
        share = f", of which process {parallel.whole.rank} of {parallel.whole.size} has a share,"
        if parallel.ring.size > 1 and (isinstance(call, SparseCall) or any(extra)):
            raise ValueError(
                f"ring_degree={parallel.ring.size} splits MHLA alone, and neither sparse attention nor extra tokens "
                "such as text; use ContextParallelConfig(ulysses_degree=...)."
            )
    if any(extra) and count + sum(extra) != tokens:
        raise ValueError(
            f"{extra[0]} tokens before the grid + {count} of the grid {grid}{share} + {extra[1]} after "
            f"it are {count + sum(extra)}, but query has N={tokens}; extra={extra} must be what the grid "
            "leaves of N."
        )
    if not any(extra) and count != tokens:
        raise ValueError(
            f"Token grid {grid}{share} holds {count} tokens, but query has N={tokens}; the product of the grid "
            "must be N. Tokens that have no place on it are given by extra=(before, after)."
        )
    return call if parallel is None else replace(call, first=first)


def _is_free_to_read(x: torch.Tensor) -> bool:
    """Whether reading values costs nothing: a device would have to be waited for, and a compiled graph would break.

    Under a transform of ``torch.func`` a tensor may stand for many, and has no values to read.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()
