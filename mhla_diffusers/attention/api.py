"""MHLA and sparse attention as functions; each checks its arguments once."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, get_args

import torch
from torch.autograd import forward_ad

from ..errors import check_choice
from . import eager
from .call import (
    DEFAULT_DENSITY,
    ContentRule,
    Far,
    MHLACall,
    Order,
    SparseCall,
    check_denominator,
)
from .causal import Causal, causal_attention
from .feature_maps import get_feature_map
from .layout import Extra, Shape, check_grid, check_layout, frame_block_starts
from .precision import without_autocast
from .rope import Rotary
from .sparse import softmax_attention
from .triton import backend as triton

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "eager", "triton")
"""What ``backend`` of :func:`mhla_attention` and :func:`sparse_attention` may be."""


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
    causal: Causal | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-Head Linear Attention (paper, Eq. 3-5).

    For a query q in block i, with φ the feature map, S_b = Σ φ(k_t) v_tᵀ and z_b = Σ φ(k_t) over the tokens t of
    block b::

        o = φ(q)ᵀ Σ_b m_ib S_b  /  φ(q)ᵀ Σ_b m_ib z_b

    The weights that a query gives to all tokens sum to 1, except with RoPE after the feature map, which rotates the
    numerator alone. Differentiable in query, key, value, mixing, output_norm and output_gate.

    Shapes: B batch, N tokens, H heads, D head dim, M blocks.

    Args:
        query: (B, N, H, D) floating point, tokens in raster order of the grid.
        key: like ``query``.
        value: like ``query``.
        mixing: (M, M), or (H, M, M) for one matrix per head, of any float type; row i belongs to query block i. With
            ``linear_weight`` not negative; checked on CPU only.
        grid: token grid, 1 to 3 axes whose product is N.
        blocks: block count per axis of the grid; the product is M.
        feature_map: a name registered with :func:`register_feature_map`.
        rotary: (cos, sin), each (1 or B, N, 1, D), as diffusers' Wan computes them; None for no RoPE.
        rope: "after": rotate φ(q) and φ(k), normaliser unrotated; "before": rotate q and k, then apply φ.
        normalize: divide by the normaliser. Without it the output grows with N and ``output_norm`` should fix it.
        eps: floor that the relu and elu+1 feature maps add; softmax has its own, 1e-18.
        key_mask: (B, N), bool (True takes part) or weights in [0, 1] on φ(k); the range is checked on CPU only. A
            query gets 0, as from PyTorch's attention, where all keys that it sees, or that its row of the mixing matrix
            gives weight to, are masked. Not with ``causal``.
        output_norm: (D,) weight of an RMSNorm over each head's output.
        output_gate: (B, N, H, D); the output is multiplied with its SiLU.
        linear_weight: λ, (H,), with ``causal``: the own block is attended to with softmax, and MHLA's weights of
            earlier ones are multiplied with λ. Must be positive; checked on CPU only. None for MHLA within the own
            block too.
        causal: "token": a query sees no later token of its sequence, the one axis of the grid. "block": it sees no
            later block of the first axis, and of its own and earlier ones every token. The sequence may end before the
            grid does, with "block" behind a whole block (:mod:`mhla_diffusers.attention.causal`).
        backend: "triton": fused kernels, for float32, bfloat16 and float16 on CUDA and ROCm devices, D up to 256 and
            the feature maps relu, elu+1 and identity. "eager": torch operations, for everything. "auto": triton on a
            CUDA or ROCm device if it can run the call, else eager.

    Returns:
        (B, N, H, D) in the type of ``query``; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, types, devices, grid, blocks, feature map, rope or backend do not fit, or the backend
            asked for cannot run the call.
        NotImplementedError: forward-mode derivatives or a transform of ``torch.func`` are active.
    """
    grid, blocks = check_layout(grid, blocks)
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
        causal=causal,
    )
    return attend(call, backend)


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: Sequence[int],
    *,
    density: float = DEFAULT_DENSITY,
    block_size: int | None = None,
    key_block_size: int | None = None,
    order: Order = "content",
    far: Far = "second-order",
    rotary: Rotary | None = None,
    key_mask: torch.Tensor | None = None,
    extra: Extra = (0, 0),
    backend: str = "auto",
) -> torch.Tensor:
    """Compute exact softmax over the key blocks that matter most, and approximate the others to second order.

    Three parts, which :mod:`mhla_diffusers.attention.sparse` derives: the keys of listed blocks, the mean key and value
    of every other block, weighed by the spread of its keys too, and MHLA's states of these blocks, mixed by content.
    Nothing is trained. Differentiable in query, key and value; lists, order, β and γ are constants then.

    Shapes: B batch, N tokens, H heads, D head dim.

    Args:
        query: (B, N, H, D) floating point, tokens in raster order of the grid.
        key: like ``query``.
        value: like ``query``.
        grid: token grid, 1 to 3 axes whose product is N, less the extra tokens.
        density: part of all pairs of blocks that is listed, more than 0 and at most 1, which is softmax attention.
            Every query block lists at least one key block.
        block_size: tokens per block of queries, which follow a Hilbert curve through the grid; None fits it to the
            grid, 64 for videos.
        key_block_size: tokens per block of keys; must divide ``block_size``. None means ``block_size``, or fits the
            grid if that is None too.
        order: "content": every head sorts the keys of each stretch of the curve, so that a block holds keys that
            are alike. "curve": a block holds neighbours.
        far: "second-order", or "means" without spread and states.
        rotary: as for :func:`mhla_attention`.
        key_mask: likewise. A sample whose keys are all masked gets 0, as from PyTorch's attention.
        extra: tokens before and after those of the grid in the sequence, such as text; all queries attend to them, and
            they to everything.
        backend: see :func:`mhla_attention`; the kernels take blocks of 16, 32, 64 and 128 tokens.

    Returns:
        (B, N, H, D) in the type of ``query``; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, types, devices, grid or block sizes do not fit, or the backend asked for cannot run
            the call.
        NotImplementedError: forward-mode derivatives or a transform of ``torch.func`` are active.
    """
    grid = check_grid(grid)
    call = SparseCall(
        query=query,
        key=key,
        value=value,
        grid=grid,
        sparse=ContentRule.on(grid, density, block_size, key_block_size, order),
        far=far,
        rotary=rotary,
        key_mask=key_mask,
        extra=tuple(extra) if isinstance(extra, Sequence) else extra,  # type: ignore[arg-type]
    )
    return attend(call, backend)


def attend(call: MHLACall | SparseCall, backend: str = "auto") -> torch.Tensor:
    """Check a call and run it: (B, N, H, D).

    Raises:
        ValueError: as :func:`mhla_attention` and :func:`sparse_attention`.
    """
    check_call(call)
    _check_tokens(call)
    check_choice("backend", backend, BACKENDS)
    return run(call, backend)


def run(call: MHLACall | SparseCall, backend: str = "auto") -> torch.Tensor:
    """Run a call that fits: (B, N, H, D).

    Queries whose mask leaves no key get 0, as from PyTorch's attention. They attend to all keys meanwhile: a quotient
    of zeros would be NaN, and its gradients stay NaN when it is replaced.
    """
    chosen, has_none = backend_for(call, backend), None
    if isinstance(call, MHLACall) and call.causal is not None:
        with without_autocast(call.query.device):
            return causal_attention(call, chosen)
    if call.key_mask is not None:
        has_none = ~(call.key_mask != 0).any(dim=1, keepdim=True)
        call = replace(call, key_mask=call.key_mask.masked_fill(has_none, 1))
    if isinstance(call, SparseCall) and isinstance(call.sparse, ContentRule) and call.sparse.density == 1:
        output = softmax_attention(call)  # whose precision autocast may say
    else:
        with without_autocast(call.query.device):
            output = chosen.sparse(call) if isinstance(call, SparseCall) else chosen.linear(call)
    return output if has_none is None else output.masked_fill(has_none[..., None, None], 0)


def backend_for(call: MHLACall | SparseCall, name: str) -> ModuleType:
    """Module of a backend by name, :mod:`.eager` or that of the kernels; "auto" chooses the best one for the call.

    Raises:
        ValueError: the kernels that were asked for cannot run the call.
        NotImplementedError: forward-mode derivatives or a transform of ``torch.func`` are active.
    """
    is_eager = not torch.compiler.is_compiling()  # torch.compile sees through transforms itself
    if forward_ad._current_level >= 0 or (is_eager and torch._C._are_functorch_transforms_active()):
        # custom operators would lose their tangents without a word
        raise NotImplementedError(
            "MHLA and sparse attention support neither forward-mode derivatives nor transforms of torch.func; use "
            "backward() or torch.autograd.grad()."
        )
    if name == "eager" or (name == "auto" and call.query.device.type != "cuda"):
        return eager
    feature_map, sizes = (call.feature_map, ()) if isinstance(call, MHLACall) else ("relu", call.sparse.sizes)
    reason = triton.why_not(call.query, feature_map, *sizes)
    if reason is None:
        from .triton import branches

        return branches
    if name == "triton":
        raise ValueError(f'backend="triton" cannot run this call: {reason}. Use backend="eager".')
    # no warning where no kernel takes the call, as in float64, nor while compiling, where logging would break the graph
    if not torch.compiler.is_compiling() and triton.why_not(call.query, feature_map) is None:
        _say_eager(reason)
    return eager


@cache
def _say_eager(reason: str) -> None:
    """Warn, once per reason."""
    logger.warning("Running in PyTorch instead of the Triton kernels: %s.", reason)


# Checks


def _described(x: Any) -> str:
    """Describe a tensor by type, shape and device; anything else by its class."""
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__


def _is_tensor_like(x: Any, query: torch.Tensor, shapes: tuple[Shape, ...]) -> bool:
    """Whether ``x`` is a tensor of one of these shapes, on the device of the query."""
    return isinstance(x, torch.Tensor) and tuple(x.shape) in shapes and x.device == query.device


def check_call(call: MHLACall | SparseCall) -> None:
    """Raise ValueError unless the arguments of a call fit together, apart from the number of tokens."""
    query: Any = call.query
    if not (isinstance(query, torch.Tensor) and query.ndim == 4 and query.is_floating_point()):
        raise ValueError(f"query must be a floating point tensor (B, N, H, D), got {_described(query)}.")
    batch, tokens, heads, head_dim = query.shape
    for name, x in (("key", call.key), ("value", call.value)):
        is_tensor = isinstance(x, torch.Tensor)
        if not (is_tensor and x.shape == query.shape and x.dtype == query.dtype and x.device == query.device):
            raise ValueError(f"{name} is {_described(x)}, but query is {_described(query)}; they must be the same.")
    if (tables := call.rotary) is not None:
        given = tables if isinstance(tables, tuple | list) else (tables,)
        table_shapes = (1, tokens, 1, head_dim), (batch, tokens, 1, head_dim)
        fits = len(given) == 2 and head_dim % 2 == 0
        if not (fits and all(_is_tensor_like(x, query, table_shapes) for x in given)):
            raise ValueError(
                f"rotary must be None for no RoPE, or two tables (cos, sin) of shape (1 or {batch}, {tokens}, 1, "
                f"{head_dim}) for an even head dim on {query.device}, got {', '.join(map(_described, given))}."
            )
    shapes: dict[str, tuple[Shape, ...]] = {"key_mask": ((batch, tokens),)}
    if isinstance(call, MHLACall):
        blocks = math.prod(call.blocks)
        shapes["mixing"] = (blocks, blocks), (heads, blocks, blocks)
        shapes |= {"output_norm": ((head_dim,),), "output_gate": (tuple(query.shape),)}
        shapes["linear_weight"] = ((heads,),)
    else:
        shapes |= {"pooled_bias": ((heads,),), "state_weight": ((heads,),)}
    for name, allowed in shapes.items():
        x = getattr(call, name)
        fits = _is_tensor_like(x, query, allowed) and (name != "mixing" or x.is_floating_point())
        if not fits and (x is not None or name == "mixing"):
            kind = "floating point tensor" if name == "mixing" else "tensor"
            shape = " or ".join(map(str, allowed))
            raise ValueError(f"{name} must be a {kind} of shape {shape} on {query.device}, got {_described(x)}.")
    words = "be bool or hold weights in [0, 1]; of a mask that is added to logits that is mask.exp()"
    _check_values("key_mask", call.key_mask, lambda mask: (mask >= 0) & (mask <= 1), words)
    if isinstance(call, MHLACall):
        _check_mhla(call)
    else:
        _check_sparse(call)


def _check_values(
    name: str, x: torch.Tensor | None, allowed: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    """Raise ValueError for values that are not allowed, if reading them costs nothing.

    A device would have to be waited for, and a compiled graph would break.
    """
    if x is None or x.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if x.numel() and not bool(allowed(x).all()):
        raise ValueError(f"{name} has values from {x.min():g} to {x.max():g}; it must {words}.")


def _check_mhla(call: MHLACall) -> None:
    """Raise ValueError for invalid settings of MHLA, or a normaliser that may be 0."""
    get_feature_map(call.feature_map)
    check_choice("rope", call.rope, ("after", "before"))
    is_beside = call.linear_weight is not None
    if is_beside and call.causal is None:
        raise ValueError("linear_weight needs causal attention; leave it out.")
    _check_values("linear_weight", call.linear_weight, lambda x: x > 0, "be positive, as the exponential is")
    if is_beside:
        words = "not be negative with linear_weight, as after mixing.clamp(min=0)"
        _check_values("mixing", call.mixing, lambda x: x >= 0, words)
    check_denominator(call.feature_map, call.eps, call.normalize, is_beside, call.causal)
    if call.causal is not None:
        check_choice("causal", call.causal, get_args(Causal))
        if call.key_mask is not None:
            raise ValueError(f"key_mask does not work with causal={call.causal!r}; leave one of them out.")
        if call.causal == "token" and len(call.grid) > 1 and math.prod(call.grid[1:]) > 1:
            raise ValueError(
                f"causal='token' needs a grid with one axis, got {call.grid}; give ({math.prod(call.grid)},), or "
                "causal='block', in which a query sees whole frames."
            )


def _check_sparse(call: SparseCall) -> None:
    """Raise ValueError for invalid weights or counts of extra tokens."""
    check_choice("far", call.far, get_args(Far))
    extra: Any = call.extra
    if not (isinstance(extra, tuple) and len(extra) == 2 and all(isinstance(x, int) and x >= 0 for x in extra)):
        raise ValueError(
            f"extra={extra!r} must be two counts of tokens, before and after the grid, for example (0, 77)."
        )
    wanted = call.pooled_bias is not None and call.far == "second-order"
    if (call.state_weight is not None) != wanted:
        raise ValueError(
            "Give both pooled_bias and state_weight, or neither to have them fitted; with far='means' give no "
            "state_weight."
        )


def _check_tokens(call: MHLACall | SparseCall) -> None:
    """Raise ValueError unless a call has the tokens of its grid, or a causal call the first of them."""
    extra = call.extra if isinstance(call, SparseCall) else (0, 0)
    tokens, grid, count = call.query.shape[1], call.grid, math.prod(call.grid)
    if not (isinstance(call, MHLACall) and call.causal is not None):
        if count + sum(extra) != tokens:
            raise ValueError(
                f"Token grid {grid} has {count} tokens, but query has N={tokens} with extra={extra}; the grid must "
                "have N tokens minus the extra ones."
            )
    elif tokens > count:
        raise ValueError(
            f"The sequence has N={tokens} tokens, more than the {count} of the grid {grid}. Give a longer grid; "
            "for more blocks than trained, extend_mixing() makes the mixing matrix."
        )
    elif call.causal == "block" and tokens not in (ends := frame_block_starts(grid, call.blocks)):
        raise ValueError(
            "With causal='block' a sequence must end with a whole block of the first axis; allowed N on the grid "
            f"{grid} with blocks={call.blocks} are {', '.join(map(str, ends[1:]))}, got {tokens}."
        )
