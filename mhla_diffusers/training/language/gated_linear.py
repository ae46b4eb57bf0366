"""Gated linear attention in the place of Llama's, written out to be compared with: GLA (Yang et al., 2024).

A state of D x D forgets by a gate of every key channel, which the input tells::

    S_t = diag(α_t) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t / √D,   α_t = sigmoid(W₂ W₁ x_t)^(1/16)

with an RMSNorm over each head and a gate of the output, without RoPE. flash-linear-attention has kernels for it that
need a GPU; this is the chunkwise form in PyTorch operations, for small models on any device.
"""

from typing import Any

import torch
from torch import nn

_CHUNK = 16
"""Tokens: within a chunk decays are divided by each other, and their range stays that of 16 steps."""
_TEMPERATURE = 16.0
"""GLA's: a gate forgets a sixteenth as fast as a sigmoid would."""
_RANK = 16
"""Of the projection of the gate."""


class GatedLinearAttention(nn.Module):
    """Takes Llama's projections and adds a gate of the state and one of the output.

    Args:
        attn: the attention whose projections it takes.
    """

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.head_dim = int(attn.head_dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        width, inner = attn.q_proj.in_features, attn.q_proj.out_features
        keys = attn.k_proj.out_features
        self.decay = nn.Sequential(nn.Linear(width, _RANK, bias=False), nn.Linear(_RANK, keys))
        self.norm = nn.RMSNorm(self.head_dim)
        self.gate = nn.Linear(width, inner, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """As Llama's attention is called; what it is told besides has no place here.

        Args:
            hidden_states: (B, N, hidden size).
        """
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        decay = nn.functional.logsigmoid(self.decay(hidden_states)).unflatten(-1, (-1, self.head_dim)) / _TEMPERATURE
        groups = query.shape[2] // key.shape[2]
        key, value, decay = (x.repeat_interleave(groups, dim=2) for x in (key, value, decay))
        output = self.norm(gated_linear(query, key, value, decay)).flatten(2)
        return self.o_proj(output * nn.functional.silu(self.gate(hidden_states))), None


def gated_linear(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The output of every token, chunk after chunk.

    Args:
        query: (B, N, H, D).
        key: like ``query``.
        value: like ``query``.
        decay: like ``query``, logs of α.

    Returns:
        (B, N, H, D).
    """
    count = query.shape[1]
    missing = -count % _CHUNK
    query, key, value, decay = (
        nn.functional.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, _CHUNK)).movedim(3, 1)
        for x in (query * query.shape[-1] ** -0.5, key, value, decay)
    )
    total = decay.cumsum(dim=-2)
    last = total[..., -1:, :]
    seen, left = query * total.exp(), key * (last - total).exp()
    within = (seen @ (key * (-total).exp()).mT).tril() @ value
    added = left.mT @ value
    state, outputs = torch.zeros_like(added[:, :, 0]), []
    for chunk in range(added.shape[2]):
        outputs.append(seen[:, :, chunk] @ state)
        state = last[:, :, chunk].exp().mT * state + added[:, :, chunk]
    output = (within + torch.stack(outputs, dim=2)).movedim(1, 3).flatten(1, 2)
    return output[:, :count]


def give_gated_linear(model: Any) -> None:
    """Put gated linear attention in the place of all attentions of a Llama."""
    for layer in model.model.layers:
        attn = layer.self_attn
        layer.self_attn = GatedLinearAttention(attn).to(attn.q_proj.weight)
