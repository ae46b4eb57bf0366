"""Block-sparse attention beside MHLA as fused kernels: the operators, and the order in which they run.

prepare     RoPE, the order of the blocks and their means: (B, N, H, D) to rows (B H, R, D), once for all that follows
weights     of all rows and blocks, by the key mask
choose      the key blocks that every query block attends to, where no lists are given
listed      softmax over the keys of the listed blocks
pooled      softmax over the means of all other blocks
states      KV states of MHLA's blocks, from the same rows
read        what queries read from the mixed states, merged with the two branches, in raster order

An operator takes the token grid as numbers and finds its tables inside, so that torch.compile never traces them, and
keeps them on the device, so that nothing waits for it. Importing this file registers the operators without importing
Triton, which the first call does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from ..block_lists import BlockLists, list_length
from ..blocks import Shape
from ..call import Call
from ..layout import Layout, block_count, layout_of
from ..linear import finish
from ..merge import least_mixing, linear_branch, under_common_sum, with_least_mask
from ..sparse import best_bias, fitting_rows, given_lists, in_order
from .linear_operators import linear_beside, linear_read, linear_states, refuse_second_derivative

BLOCK_SIZES = (16, 32, 64, 128)
"""That the kernels take."""

_GRID = "SymInt[] grid, SymInt block_size, SymInt extra"


def sparse_attention(call: Call) -> torch.Tensor:
    """Attend to the listed blocks, to the pooled keys of the others, and through MHLA to all.

    Args:
        call: as the kernels read it, with lists or a rule. With ``rope="before"`` MHLA reads the same rows as softmax;
            with "after" it reads the tokens as they come, and the merge is PyTorch operations.

    Returns:
        (B, N, H, D); with extra tokens, which norm and gate leave as they are, (B, N + n, H, D) in the order
        of the sequence.
    """
    rule = call.rule
    block_size = rule.block_size if rule is not None else given_lists(call).block_size
    query, key, value, table, mask, extra = _sequence(call)
    scale = query.shape[3] ** -0.5
    place = list(call.grid), block_size, extra
    rows = prepare(query, key, value, table, mask, *place)
    (query, key, value), (pooled_query, pooled_key, pooled_value, spread) = rows[:3], rows[3:]
    with torch.no_grad():
        bias, weight = weights(key, mask, *place)
        if rule is None:
            indices, counts, bits = given_blocks(given_lists(call), len(call.query), key.shape[1] // block_size)
        else:
            indices, counts, bits = choose(pooled_query, pooled_key, spread, weight, rule.density, scale, *place)
    of_grid = query[:, : pooled_key.shape[1] * block_size].contiguous()
    keys = key, value, bias if mask is not None else None
    near, near_lse = listed(of_grid, *keys, indices, counts, scale, *place, False)
    far: torch.Tensor | None = None
    far_lse: torch.Tensor | None = None
    fits_bias = rule is not None and rule.fit_pooled_bias
    if fits_bias or call.pooled_bias is not None:
        far, far_lse = pooled(of_grid, pooled_key, pooled_value, weight.log(), bits, scale)
        if call.pooled_bias is None:
            with torch.no_grad():
                beta = fit_bias(of_grid, *keys, near, near_lse, far, far_lse, scale, *place)
        else:
            beta = call.pooled_bias.float().expand(len(call.query), -1).flatten()
        far_lse = far_lse + beta[:, None]
    branches = Branches(near, near_lse, far, far_lse)
    if call.linear_weight is None or (table is not None and call.rope == "after"):
        output = _merged(call, block_size, branches)
    else:
        output = _read_merged(call, block_size, of_grid, key, value, branches)
    if call.extra is None:
        return output
    of_extra = query[:, of_grid.shape[1] :].contiguous()
    everything = all_blocks(len(query), of_extra.shape[1] // block_size, key.shape[1] // block_size, query.device)
    of_extra, _ = listed(of_extra, *keys, *everything, scale, *place, False)
    of_extra = of_extra[:, : call.extra.count].unflatten(0, (len(call.query), -1)).transpose(1, 2)
    return call.extra.around(output, of_extra)


def given_blocks(lists: BlockLists, batch: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Given lists as :func:`choose` returns those it finds, the extra blocks at the end of each.

    Args:
        lists: of the grid's blocks.
        batch: B.
        blocks: of the grid and of extra tokens.
    """
    entries, of_grid = lists.padded().expand(batch, -1, -1, -1), lists.blocks
    counts = (entries >= 0).sum(dim=-1)
    extra = torch.arange(of_grid, blocks, device=entries.device)
    width = max(1, lists.longest + len(extra))
    place = torch.arange(width, device=entries.device)
    # the grid's blocks come first, then the extra ones; what is behind them is not read
    behind = (of_grid + place - counts[..., None]).clamp(of_grid, max(of_grid, blocks - 1))
    padded = torch.nn.functional.pad(entries, (0, width - lists.longest))
    indices = torch.where(place < counts[..., None], padded, behind)
    group = torch.arange(batch * lists.heads, device=entries.device).view(batch, -1, 1, 1)
    indices = (indices.clamp_max(blocks - 1) + group * blocks).flatten(0, 2)
    bits = torch.nn.functional.pad(lists.mask(), (0, -of_grid % 32)).unflatten(-1, (-1, 32)).long()
    words = (bits << torch.arange(32, device=bits.device)).sum(dim=-1).expand(batch, -1, -1, -1).flatten(0, 2)
    counts = (counts + len(extra)).flatten()
    # numbers of 32 bits with the last one set are negative
    words = torch.where(words < 2**31, words, words - 2**32)
    return indices.int().contiguous(), counts.int(), words.int().contiguous()


def all_blocks(
    groups: int, query_blocks: int, key_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and counts of lists that hold all blocks of their group."""
    everything = torch.arange(groups * key_blocks, dtype=torch.int32, device=device).view(groups, 1, key_blocks)
    indices = everything.expand(-1, query_blocks, -1).flatten(0, 1).contiguous()
    return indices, torch.full_like(indices[:, 0], key_blocks)


def _sequence(
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]:
    """Query, key, value, RoPE and key mask of the grid's tokens with the extra ones behind them, and their number."""
    query, key, value, table, mask = call.query, call.key, call.value, call.rotary_of_tokens, call.key_mask
    others = call.extra
    if others is None:
        return query, key, value, table, mask, 0
    query, key, value, mask = others.after(query, key, value, mask)
    if table is not None:  # theirs have been turned already
        unturned = table.new_zeros(len(table), others.count, 1, table.shape[-1])
        unturned[..., 0::2] = 1
        table = torch.cat([table, unturned], dim=1)
    return query, key, value, table, mask, others.count


@torch.library.custom_op(
    "mhla_diffusers::block_weights",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor? key_mask, {_GRID}) -> (Tensor, Tensor)",
)
def weights(
    rows: torch.Tensor, key_mask: torch.Tensor | None, grid: Sequence[int], block_size: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logs of the weights of rows (B, R), of none without a mask; and weights of the grid's blocks (1 or B, T)."""
    layout = _layout(grid, block_size, extra, rows)
    if key_mask is None:
        return rows.new_empty(0, dtype=torch.float32), layout.valid[None, : layout.grid_blocks].float()
    of_rows = key_mask.index_select(1, layout.order.clamp_min(0)) * (layout.order >= 0)
    of_blocks = of_rows.unflatten(1, (-1, block_size)).sum(dim=-1)
    return of_rows.log(), of_blocks[:, : layout.grid_blocks].contiguous()


@weights.register_fake
def _weight_shapes(
    rows: torch.Tensor, key_mask: torch.Tensor | None, grid: Sequence[int], block_size: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, of_rows = (1, [0]) if key_mask is None else (len(key_mask), [len(key_mask), rows.shape[1]])
    of_blocks = [samples, block_count(grid, block_size)]
    return rows.new_empty(of_rows, dtype=torch.float32), rows.new_empty(of_blocks, dtype=torch.float32)


def _layout(grid: Sequence[int], block_size: int, extra: int, like: torch.Tensor) -> Layout:
    return layout_of(tuple(grid), block_size, (0, extra), device=str(like.device))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


@torch.library.custom_op(
    "mhla_diffusers::prepare_blocks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? table, Tensor? key_mask, {_GRID}) -> "
    f"({', '.join(['Tensor'] * 7)})",
)
def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    grid: Sequence[int],
    block_size: int,
    extra: int,
) -> tuple[torch.Tensor, ...]:
    """See :func:`mhla_diffusers.attention.triton.prepare.prepare_launch`; ``table`` is cosines and sines in one."""
    from .prepare import prepare_launch

    layout = _layout(grid, block_size, extra, query)
    tables = layout.order, layout.valid, layout.blocks, layout.grid_blocks
    launch, prepared = prepare_launch(query, key, value, table, key_mask, *tables)
    launch.run()
    return tuple(prepared)


@prepare.register_fake
def _prepared_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_, grid, block_size, extra = arguments
    blocks, grid_blocks = _block_counts(grid, block_size, extra)
    batch, _, heads, head_dim = query.shape
    rows = [(batch * heads, blocks * block_size, head_dim)] * 3 + [(batch * heads, grid_blocks, head_dim)] * 4
    return tuple(query.new_empty(shape) for shape in rows)


def _block_counts(grid: Sequence[int], block_size: int, extra: int) -> tuple[int, int]:
    """Blocks of all tokens, and of the grid's."""
    of_grid = block_count(grid, block_size)
    return of_grid + (extra + block_size - 1) // block_size, of_grid


@torch.library.custom_op(
    "mhla_diffusers::prepare_blocks_backward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? pooled_key, Tensor? pooled_value, Tensor? table, "
    f"Tensor? key_mask, {_GRID}, SymInt[] shape) -> (Tensor, Tensor, Tensor)",
)
def prepare_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pooled_key: torch.Tensor | None,
    pooled_value: torch.Tensor | None,
    table: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    grid: Sequence[int],
    block_size: int,
    extra: int,
    shape: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value (B, N, H, D) from those of rows and means."""
    from .prepare import prepare_backward_launch

    layout = _layout(grid, block_size, extra, query)
    about = table, key_mask, layout.order, layout.valid, shape, query.dtype
    launch, gradients = prepare_backward_launch(query, key, value, pooled_key, pooled_value, *about)
    launch.run()
    return gradients


@prepare_backward.register_fake
def _prepare_backward_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(query.new_empty(tuple(arguments[-1])) for _ in range(3))


def _save_prepare(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, _, _, table, key_mask, *ctx.place = inputs
    ctx.save_for_backward(table, key_mask)
    ctx.shape = query.shape
    ctx.mark_non_differentiable(output[3], output[6])
    ctx.set_materialize_grads(False)
    ctx.rows = output[0].shape


def _differentiate_prepare(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    given = next((x for x in gradients if x is not None), None)
    if given is None:
        return (None,) * 8
    of_rows = (given.new_zeros(ctx.rows) if x is None else x.contiguous() for x in gradients[:3])
    of_means: list[torch.Tensor | None] = [gradients[4], gradients[5]]
    if any(x is not None for x in of_means):
        shape = next(x.shape for x in of_means if x is not None)
        of_means = [given.new_zeros(shape) if x is None else x.contiguous() for x in of_means]
    found = prepare_backward(*of_rows, *of_means, *ctx.saved_tensors, *ctx.place, list(ctx.shape))
    return *found, *(None,) * 5


prepare.register_autograd(_differentiate_prepare, setup_context=_save_prepare)
prepare_backward.register_autograd(refuse_second_derivative)


@torch.library.custom_op(
    "mhla_diffusers::choose_blocks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor spread, Tensor weight, float density, float scale, {_GRID}) -> "
    "(Tensor, Tensor, Tensor)",
)
def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    spread: torch.Tensor,
    weight: torch.Tensor,
    density: float,
    scale: float,
    grid: Sequence[int],
    block_size: int,
    extra: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`mhla_diffusers.attention.triton.choose.choose_blocks`."""
    from .choose import choose_blocks

    blocks, of_grid = _block_counts(grid, block_size, extra)
    return choose_blocks(query, key, spread, weight, list_length(density, of_grid), blocks - of_grid, scale, blocks)


@choose.register_fake
def _list_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *_, density, _, grid, block_size, extra = arguments
    blocks, of_grid = _block_counts(grid, block_size, extra)
    lists = query.shape[0] * query.shape[1]
    shapes = (lists, list_length(density, of_grid) + blocks - of_grid), (lists,), (lists, (of_grid + 31) // 32)
    return tuple(query.new_empty(shape, dtype=torch.int32) for shape in shapes)


_LISTED = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor indices, Tensor counts, float scale, "
    f"{_GRID}, bool causal"
)


@torch.library.custom_op("mhla_diffusers::listed", mutates_args=(), schema=f"({_LISTED}) -> (Tensor, Tensor)")
def listed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    grid: Sequence[int],
    block_size: int,
    extra: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the keys of listed blocks: output (G, Q, D) and LSE (G, Q).

    Args:
        query: (G, Q, D), Tq blocks of rows.
        key: (G, R, D).
        value: likewise.
        bias: (B, R), log of the weight of every key; None for 1.
        indices: int32 (G Tq, n), on the flat axis of all key blocks.
        counts: int32 (G Tq,).
        scale: of logits.
        grid: token grid.
        block_size: rows of a block.
        extra: extra tokens.
        causal: also hide keys whose row is beyond the query's, of queries that have all rows.
    """
    from .listed import listed_forward

    valid, bias = _flat_weights(query, bias, grid, block_size, extra)
    output, lse = listed_forward(_flat(query), _flat(key), _flat(value), valid, bias, indices, counts, scale, causal)
    return output.view(query.shape), lse.view(query.shape[:2])


def _flat_weights(
    query: torch.Tensor, bias: torch.Tensor | None, grid: Sequence[int], block_size: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Valid rows of every block and log weights of every row, of samples and heads along one axis."""
    groups = len(query)
    valid = _layout(grid, block_size, extra, query).valid.repeat(groups)
    return valid, None if bias is None else bias.repeat_interleave(groups // len(bias), dim=0).flatten()


@listed.register_fake
def _branch_shapes(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op(
    "mhla_diffusers::listed_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? lse_gradient, Tensor output, Tensor lse, {_LISTED}) -> "
    "(Tensor, Tensor, Tensor)",
)
def listed_backward(
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value, given the inputs of :func:`listed`."""
    from .listed import listed_backward as backward

    query, key, value, bias, indices, counts, scale, *place, causal = inputs
    rows = _flat(query), _flat(key), _flat(value), *_flat_weights(query, bias, *place), indices, counts
    lse_gradient = None if lse_gradient is None else lse_gradient.flatten()
    found = backward(_flat(output_gradient), lse_gradient, *rows, _flat(output), lse.flatten(), scale, causal)
    return tuple(x.view(like.shape) for x, like in zip(found, inputs[:3], strict=True))


@listed_backward.register_fake
def _gradient_shapes(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[4:7])


def _save_branch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors = [x for x in inputs if x is None or isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = inputs[len(tensors) :]
    ctx.set_materialize_grads(False)


def _differentiate(
    backward: Callable[..., tuple[torch.Tensor, ...]],
    ctx: Any,
    output_gradient: torch.Tensor | None,
    lse_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of query, key and value, and None for all other inputs of a branch."""
    output, lse, *inputs = ctx.saved_tensors
    others = (None,) * (len(inputs) + len(ctx.settings) - 3)
    if output_gradient is None and lse_gradient is None:
        return None, None, None, *others
    output_gradient = torch.zeros_like(output) if output_gradient is None else output_gradient.contiguous()
    lse_gradient = None if lse_gradient is None else lse_gradient.contiguous()
    return *backward(output_gradient, lse_gradient, output, lse, *inputs, *ctx.settings), *others


listed.register_autograd(partial(_differentiate, listed_backward), setup_context=_save_branch)
listed_backward.register_autograd(refuse_second_derivative)

_POOLED = "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor bits, float scale"


@torch.library.custom_op("mhla_diffusers::pooled", mutates_args=(), schema=f"({_POOLED}) -> (Tensor, Tensor)")
def pooled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    bits: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`mhla_diffusers.attention.triton.pooled.pooled_forward`."""
    from .pooled import pooled_forward

    return pooled_forward(query, key, value, bias, bits, scale)


pooled.register_fake(_branch_shapes)


@torch.library.custom_op(
    "mhla_diffusers::pooled_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? lse_gradient, Tensor output, Tensor lse, {_POOLED}) -> "
    "(Tensor, Tensor, Tensor)",
)
def pooled_backward(
    output_gradient: torch.Tensor,
    lse_gradient: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value, given the inputs of :func:`pooled`."""
    from .pooled import pooled_backward as backward

    query, key, value, bias, bits, scale = inputs
    return backward(output_gradient, lse_gradient, query, key, value, bias, bits, output, lse, scale)


pooled_backward.register_fake(_gradient_shapes)
pooled.register_autograd(partial(_differentiate, pooled_backward), setup_context=_save_branch)
pooled_backward.register_autograd(refuse_second_derivative)


@torch.library.custom_op(
    "mhla_diffusers::fit_bias",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor near, Tensor near_lse, Tensor far, "
    f"Tensor far_lse, float scale, {_GRID}) -> Tensor",
)
def fit_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    near: torch.Tensor,
    near_lse: torch.Tensor,
    far: torch.Tensor,
    far_lse: torch.Tensor,
    scale: float,
    grid: Sequence[int],
    block_size: int,
    extra: int,
) -> torch.Tensor:
    """β with which the two branches come closest to softmax attention, of the β tried: float32 (G,).

    The queries are those of :func:`mhla_diffusers.attention.sparse.fit_pooled_bias`.
    """
    layout = _layout(grid, block_size, extra, query)
    some, samples = fitting_rows(tuple(grid), query.device), 1 if bias is None else len(bias)
    of_query, of_key, of_value = (x.unflatten(0, (samples, -1)) for x in (query[:, some], key, value))
    mask = None
    if bias is not None or int(layout.order.shape[0]) != math.prod(grid) + extra:
        # padding is left out, of which there is none where a block size divides the tokens
        weights = bias if bias is not None else _padding_bias(tuple(grid), block_size, extra, query.device)
        mask = weights[:, None, None].to(query.dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    truth = attend(of_query, of_key, of_value, attn_mask=mask, scale=scale).flatten(0, 1).float()
    near, far = near[:, some].float(), far[:, some].float()
    return best_bias(truth, near, near_lse[:, some], far, far_lse[:, some])


@fit_bias.register_fake
def _bias_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[:1], dtype=torch.float32)


@lru_cache(maxsize=64)
def _padding_bias(grid: Shape, block_size: int, extra: int, device: torch.device) -> torch.Tensor:
    """(1, R): −∞ for rows without a token."""
    return (layout_of(grid, block_size, (0, extra)).order >= 0).float().log()[None].to(device)


class Branches(NamedTuple):
    """Softmax over listed blocks, and over the means of others: outputs (G, Q, D) and LSEs (G, Q)."""

    listed: torch.Tensor
    listed_lse: torch.Tensor
    pooled: torch.Tensor | None
    pooled_lse: torch.Tensor | None


def _read_merged(
    call: Call, block_size: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, branches: Branches
) -> torch.Tensor:
    """All branches under one denominator, with norm and gate, in raster order: (B, N, H, D)."""
    weighed = replace(with_least_mask(call), mixing=least_mixing(call.mixing))
    query, key, value = (x.unflatten(0, (len(call.query), -1)) for x in (query, key, value))
    return linear_beside(weighed, query, key, value, block_size, branches)


def _merged(call: Call, block_size: int, branches: Branches) -> torch.Tensor:
    """The same in PyTorch operations, of a call without MHLA or whose RoPE comes after the feature map."""
    output, lse = branches.listed.float(), branches.listed_lse
    if branches.pooled is not None and branches.pooled_lse is not None:
        share = torch.sigmoid(branches.pooled_lse - lse)[..., None]
        output = (1 - share) * output + share * branches.pooled.float()
        lse = torch.logaddexp(lse, branches.pooled_lse)
    batch = len(call.query)
    of_blocks = (x.unflatten(1, (-1, block_size)).unflatten(0, (batch, -1)) for x in (output, lse[..., None]))
    output, lse = (in_order(x, call.grid, block_size, 0) for x in of_blocks)
    if call.linear_weight is not None:
        all_else = linear_branch(call)
        far, normaliser = linear_read(all_else, linear_states(all_else))
        log_far = (call.linear_weight.float()[:, None] * normaliser).log()
        output = under_common_sum(output, lse, far.float(), log_far)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)
