"""What the arguments of the operator must be: every check raises a ValueError that names what was given."""

import math
from collections.abc import Sequence

import torch

from .blocks import Shape, frame_block_starts
from .call import Call
from .extra import Extra
from .layout import block_count
from .parallel.place import Parallel
from .rope import Rotary


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise unless they are (B, N, H, D) of one kind."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_is_tensor(name, tensor)
    if query.ndim != 4:
        raise ValueError(f"query must be (B, N, H, D), got shape {tuple(query.shape)}.")
    if not query.is_floating_point():
        raise ValueError(f"query must be floating point, got {query.dtype}.")
    for name, tensor in (("key", key), ("value", value)):
        for what in ("shape", "dtype", "device"):
            expected, found = getattr(query, what), getattr(tensor, what)
            if found != expected:
                raise ValueError(f"{name} has {what} {found}, but query has {expected}; they must be the same.")


def check_is_tensor(name: str, value: object) -> None:
    """Raise unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_rotary(rotary: Rotary, query: torch.Tensor) -> None:
    """Raise unless the tables are those of the query's tokens."""
    batch, tokens, _, head_dim = query.shape
    for table in rotary:
        if table.shape[0] not in (1, batch) or tuple(table.shape[1:]) != (tokens, 1, head_dim):
            raise ValueError(
                f"rotary tables must be (1 or {batch}, {tokens}, 1, {head_dim}), got {tuple(table.shape)}."
            )
    if head_dim % 2:
        raise ValueError(f"RoPE turns pairs of channels, and the head dim is {head_dim}; it must be even.")


def check_axes(axes: Sequence[int] | None, grid: Shape, head_dim: int) -> Shape | None:
    """The channels that turn with each axis, as a tuple."""
    if axes is None:
        return None
    if len(axes) != len(grid) or sum(axes) != head_dim or any(count < 0 or count % 2 for count in axes):
        raise ValueError(
            f"rotary_axes={tuple(axes)} must be an even number of channels for each of the {len(grid)} axes of the "
            f"grid, {head_dim} in all."
        )
    return tuple(axes)


def check_beside_causal(causal: str, extra: Extra, **others: object) -> None:
    """Raise unless a causal call goes without what it has no place for; of ``others``, by name, None is not given."""
    given = {"extra": any(extra)} | {name: value is not None for name, value in others.items()}
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f"{name} does not go with causal={causal!r}, which attends to its own block with softmax if "
            "linear_weight is given, to earlier ones through their states, and runs in one process."
        )


def tokens_in_order(query: torch.Tensor, grid: Shape, blocks: Shape, causal: str) -> int:
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
    """Raise unless all of a call fits together; ``on_grid`` are the tokens of the grid that this process has."""
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
    check_is_tensor("mixing", call.mixing)
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
            check_is_tensor(name, tensor)
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
