"""Share of softmax attention's weight on listed blocks, for an audit."""

from dataclasses import replace

import torch

from .call import BlockLists, SparseCall
from .layout import layout_of
from .precision import without_autocast
from .rope import rotated
from .sparse import key_block_of_tokens, with_lists

_CPU_NUMBERS = 2**23
_DEVICE_NUMBERS = 2**26
"""Weights that are formed at once."""


def weight_held(call: SparseCall, count: int, shift: int) -> torch.Tensor:
    """Share of softmax attention's weight on a call's listed blocks and extra tokens.

    Args:
        call: the call.
        count: queries that are looked at, evenly along the curve of uniform blocks.
        shift: another one chooses others.

    Returns:
        float64 (), mean over samples, heads and queries.
    """
    call = replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())
    with without_autocast(call.query.device):
        lists = with_lists(call).sparse
        assert isinstance(lists, BlockLists)
        order = layout_of(call.grid, lists.block_size).order.long()
        order = order[order >= 0]
        count = min(count, len(order))
        places = (torch.arange(count) * len(order) // count + shift) % len(order)
        query, key = (call.extra_last(rotated(x, call.rotary)) for x in (call.query, call.key))
        query = query[:, order[places].to(query.device)] * query.shape[-1] ** -0.5
        batch, _, heads, _ = query.shape
        listed = lists.mask()[:, :, (places // lists.block_size).to(query.device)].expand(batch, -1, -1, -1)
        member = key_block_of_tokens(call, lists).expand(batch, heads, -1)
        mask = None if call.key_mask is None else call.extra_last(call.key_mask.float()).log()[:, None]
        numbers = _CPU_NUMBERS if key.device.type == "cpu" else _DEVICE_NUMBERS
        found = torch.zeros((), dtype=torch.float64, device=key.device)
        for head in range(heads):
            for rows in torch.arange(count).split(max(1, numbers // (batch * key.shape[1]))):
                logits = query[:, rows, head] @ key[:, :, head].mT
                weights = (logits if mask is None else logits + mask).softmax(dim=-1)
                of_keys = listed[:, head, rows].gather(-1, member[:, head, None].expand(-1, len(rows), -1))
                found += (weights[..., : member.shape[-1]] * of_keys).sum().double()
                found += weights[..., member.shape[-1] :].sum().double()
        return found / (batch * heads * count)
