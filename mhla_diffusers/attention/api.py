"""The one entry to MHLA as a function: makes a call of the arguments, checks it once and attends."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from numbers import Real
from typing import Any, get_args

import torch

from . import eager
from .call import Backend, BlockLists, Call, ContentRule
from .causal import Causal, causal_attention
from .feature_maps import get_feature_map
from .layout import Extra, Shape, block_count, check_layout, frame_block_starts
from .parallel.collectives import summed
from .parallel.place import Parallel
from .parallel.ulysses import Segment
from .rope import Rotary
from .sparse import ROWS, softmax_attention
from .triton import backend as triton

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "eager", "triton")
"""What ``backend`` of :func:`mhla_attention` may be."""


def check_backend(name: str) -> None:
    """Ensure that ``name`` is a backend.

    Raises:
        ValueError: with the nearest names.
    """
    if name not in BACKENDS:
        near = get_close_matches(name, BACKENDS, n=1, cutoff=0.4) if isinstance(name, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown backend {name!r}; allowed: {', '.join(BACKENDS)}.{hint}")


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
            Beside softmax weights (``linear_weight``, extra tokens) not negative; checked on CPU only.
        grid: token grid, 1 to 3 axes whose product is N, less the extra tokens.
        blocks: block count per axis of the grid; the product is M.
        feature_map: a name registered with :func:`register_feature_map`.
        rotary: (cos, sin), each (1 or B, N, 1, D), as diffusers' Wan computes them; None for no RoPE.
        rope: "after": rotate φ(q) and φ(k), normaliser unrotated; "before": rotate q and k, then apply φ.
        normalize: divide by the normaliser. Without it the output grows with N and ``output_norm`` should fix it.
        eps: floor that the relu and elu+1 feature maps add.
        key_mask: (B, N), bool (True takes part) or weights in [0, 1] on φ(k); the range is checked on CPU only. A
            sample whose keys are all masked gets 0, as from PyTorch's attention.
        output_norm: (D,) weight of an RMSNorm over each head's output, of the grid's tokens alone.
        output_gate: (B, product of the grid, H, D); the output of the grid's tokens is multiplied with its SiLU.
        linear_weight: λ, (H,): beside ``sparse`` or extra tokens, the weights of MHLA over all blocks are multiplied
            with it; None for the sparse branch alone. Must be positive; checked on CPU only, to avoid a device sync.
        sparse: blocks of keys that every head of every query block attends to with softmax, under one denominator with
            the linear branch; see :mod:`mhla_diffusers.attention.sparse`. :class:`ContentRule` to choose them by query
            and key. Where all pairs of blocks are listed, that is softmax attention, and ``linear_weight`` and
            ``pooled_bias`` have no part. None for MHLA throughout.
        pooled_bias: β, (H,): every block that is not listed takes part in that softmax as one key, its mean, with β
            added to the logit; see :mod:`mhla_diffusers.attention.sparse`. None to leave these blocks to the linear
            branch.
        extra: how many tokens stand before, and how many after those of the grid in the sequence.
        parallel: the processes between which the tokens are split, each of which calls this with its own: all above of
            N tokens is of these, and ``extra`` counts these. What is of heads is of all H, except the lists of
            ``sparse``, which are of the heads that the process attends with (:meth:`Parallel.heads`). The gradients
            that the processes get add up to the gradient. A ring of processes runs MHLA alone. None for one process.
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
    extra = tuple(extra) if isinstance(extra, Sequence) else extra  # type: ignore[assignment]
    call = Call(
        query,
        key,
        value,
        mixing,
        grid,
        blocks,
        feature_map,
        rotary,
        rope,
        normalize,
        eps,
        key_mask,
        output_norm,
        output_gate,
        linear_weight,
        sparse,
        pooled_bias,
        extra,
        parallel,
        causal,
    )
    return attend(call, backend)


def attend(call: Call, backend: str = "auto") -> torch.Tensor:
    """Check a call and run it: (B, N, H, D).

    Raises:
        ValueError: as :func:`mhla_attention`.
    """
    check_call(call)
    call = _check_place(call)
    if call.query.numel() == 0:
        return torch.empty_like(call.query)
    module = backend_for(call, backend)
    if call.parallel is None or call.parallel.ulysses.size == 1:
        return _attend(call, module)
    segment = Segment(call)
    return segment.of_tokens(call, _attend(segment.of_heads(call), module))


def _attend(call: Call, backend: Backend) -> torch.Tensor:
    """Attend with a whole sequence, or a share of it that a process of a ring holds.

    Samples whose mask leaves no key get 0, as from PyTorch's attention. They attend to all keys meanwhile: a quotient
    of zeros would be NaN, and its gradients stay NaN when it is replaced.
    """
    has_none: torch.Tensor | None = None
    if call.key_mask is not None:
        has_none = summed((call.key_mask != 0).any(dim=1).float(), call.group)[:, None] == 0
        call = replace(call, key_mask=call.key_mask.masked_fill(has_none, 1))
    if call.causal is not None:
        output = causal_attention(call, backend)
    elif call.lists_everything:
        output = softmax_attention(call)
    elif call.sparse is not None or any(call.extra):
        output = backend.sparse(call)
    else:
        output = backend.linear(call)
    return output if has_none is None else output.masked_fill(has_none[..., None, None], 0)


def backend_for(call: Call, name: str) -> Backend:
    """The backend of a name, and for "auto" the best that can run the call."""
    if name not in BACKENDS:
        check_backend(name)
    # a call like float64's, which no kernel takes whatever its blocks, is not worth a warning
    if name == "auto" and call.query.device.type == "cuda" and triton.why_not(call.query, call.feature_map) is None:
        sizes = call.sparse.sizes if call.sparse is not None else (ROWS,) if any(call.extra) else ()
        reason = triton.why_not(call.query, call.feature_map, *sizes)
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


def check_call(call: Call) -> None:
    """Ensure that all of a call fits together, but for the number of its tokens."""
    given = {"query": call.query, "key": call.key, "value": call.value, "mixing": call.mixing}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if call.query.ndim != 4:
        raise ValueError(f"query must be (B, N, H, D), got shape {tuple(call.query.shape)}.")
    for name in ("query", "mixing"):
        if not given[name].is_floating_point():
            raise ValueError(f"{name} must be floating point, got {given[name].dtype}.")
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
        if table.shape[0] not in (1, batch) or tuple(table.shape[1:]) != (tokens, 1, head_dim):
            raise ValueError(
                f"rotary tables must be (1 or {batch}, {tokens}, 1, {head_dim}), got {tuple(table.shape)}."
            )
    if call.rotary is not None and head_dim % 2:
        raise ValueError(f"RoPE rotates pairs of channels, and the head dim is {head_dim}; it must be even.")
    extra: Any = call.extra
    if not (isinstance(extra, tuple) and len(extra) == 2 and all(isinstance(x, int) and x >= 0 for x in extra)):
        raise ValueError(
            f"extra={extra!r} must be two counts, how many tokens stand before and after those of the grid, for "
            "example (0, 77)."
        )
    blocks = math.prod(call.blocks)
    if tuple(call.mixing.shape) not in ((blocks, blocks), (heads, blocks, blocks)):
        raise ValueError(
            f"mixing has shape {tuple(call.mixing.shape)}; for {blocks} blocks and {heads} heads it must be "
            f"({blocks}, {blocks}) or ({heads}, {blocks}, {blocks})."
        )
    get_feature_map(call.feature_map)
    if call.rope not in ("after", "before"):
        raise ValueError(f"Unknown rope={call.rope!r}; allowed: 'after' or 'before' (the feature map).")
    expected_shapes = {
        "key_mask": (batch, tokens),
        "output_norm": (head_dim,),
        "output_gate": (batch, tokens - sum(extra), heads, head_dim),
        "linear_weight": (heads,),
        "pooled_bias": (heads,),
    }
    for name, shape in expected_shapes.items():
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
    _check_denominator(call)
    if call.causal is None:
        _check_sparse(call)


def _check_denominator(call: Call) -> None:
    """Ensure that what the branches of a call are divided by is positive."""
    if not (isinstance(call.eps, Real) and call.eps >= 0):
        raise ValueError(f"eps={call.eps!r} must be a number from 0 up, the floor of feature maps, such as 1e-6.")
    if any(call.extra) and not call.normalize:
        raise ValueError("Extra tokens share one denominator with those of the grid, which needs normalize=True.")
    weight = call.linear_weight
    has_linear_part = weight is not None or (any(call.extra) and call.sparse is None)
    if weight is not None and _is_free_to_read(weight) and not bool((weight > 0).all()):
        raise ValueError(
            f"linear_weight={weight.tolist()} holds what is not a positive number; a weight of the linear branch is "
            "a factor of weights that are all positive, such as the exponential of what is trained."
        )
    if has_linear_part and _is_free_to_read(call.mixing) and not bool((call.mixing >= 0).all()):
        raise ValueError(
            f"mixing has entries down to {call.mixing.min():.3g}, and beside softmax weights the logarithm of its sums "
            "is taken; they must not be negative, as after mixing.clamp(min=0)."
        )
    if weight is not None and not call.normalize:
        raise ValueError("Softmax weights share one denominator with the linear branch, which needs normalize=True.")
    if call.feature_map != "relu" or call.eps > 0:
        return
    if has_linear_part:
        raise ValueError(
            f"eps={call.eps} lets a query of the relu feature map have no linear branch; it must be positive."
        )
    if call.causal == "token" and call.normalize:
        raise ValueError(
            f"eps={call.eps} lets a query of the relu feature map see nothing in its own block, which causal='token' "
            "divides by what it sees; it must be positive."
        )


def _check_sparse(call: Call) -> None:
    """Ensure that the lists or the rule of a call fit its tensors."""
    lists = call.sparse
    if lists is None:
        for name in ("pooled_bias",) if any(call.extra) else ("pooled_bias", "linear_weight"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name} weighs what stands beside block lists; give sparse as well.")
        return
    if isinstance(lists, ContentRule):
        if lists.fit_pooled_bias and call.pooled_bias is not None:
            raise ValueError("pooled_bias is given, and fit_pooled_bias=True would fit another; leave one of them out.")
        return
    if not isinstance(lists, BlockLists):
        raise ValueError(f"sparse={lists!r} must be BlockLists, ContentRule or None.")
    blocks, all_heads = block_count(call.grid, lists.block_size), call.query.shape[2]
    key_blocks = block_count(call.grid, lists.key_block_size)
    for what, given, expected, size in (
        ("query", lists.blocks, blocks, lists.block_size),
        ("key", lists.key_blocks, key_blocks, lists.key_block_size),
    ):
        if given != expected:
            raise ValueError(
                f"sparse has lists of {given} {what} blocks, but the grid {call.grid} is cut into {expected} of {size} "
                "tokens."
            )
    heads = all_heads if call.parallel is None else len(range(all_heads)[call.parallel.heads(all_heads)])
    if lists.heads != heads:
        attending = f"query has {heads}" if heads == all_heads else f"this process attends with {heads}"
        raise ValueError(f"sparse has lists for {lists.heads} heads, but {attending}.")
    if lists.samples not in (1, call.query.shape[0]):
        raise ValueError(f"sparse has lists for {lists.samples} samples, but query has {call.query.shape[0]}.")
    if lists.keys.device != call.query.device:
        raise ValueError(f"sparse is on {lists.keys.device}, but query is on {call.query.device}.")
    if call.linear_weight is not None or call.pooled_bias is not None or any(call.extra):
        return
    if _is_free_to_read(lists.keys) and not bool((lists.keys >= 0).any(dim=-1).all()):
        raise ValueError(
            "Some query blocks have an empty list, so they would attend to nothing; give linear_weight, pooled_bias, "
            "or every query block at least one key block."
        )


def _check_place(call: Call) -> Call:
    """Ensure that a call has the tokens of its grid, or a process's share of them: the call with its first token."""
    extra, tokens, grid, parallel = call.extra, call.query.shape[1], call.grid, call.parallel
    if call.causal is not None:
        check_causal(call.causal, grid, call.blocks)
        given = {"extra": any(extra)}
        given |= {name: getattr(call, name) is not None for name in ("sparse", "pooled_bias", "parallel")}
        for name in (name for name, is_given in given.items() if is_given):
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
        if parallel.ring.size > 1 and (call.sparse is not None or any(extra)):
            raise ValueError(
                f"ring_degree={parallel.ring.size} cannot split what is attended to with softmax beside MHLA, the "
                "sparse branch and extra tokens such as text; use ContextParallelConfig(ulysses_degree=...), or MHLA "
                'alone, sparse="none".'
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
    """Whether reading values costs nothing: a device would have to be waited for, and a compiled graph would break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
