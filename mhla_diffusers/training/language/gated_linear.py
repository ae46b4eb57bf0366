"""Gated linear attention in the place of Llama's, to be compared with: GLA (Yang et al., 2024).

As :mod:`mhla_diffusers.attention.gated_linear` has it, with an RMSNorm over each head and a gate of the output, without
RoPE.
"""

from typing import Any

import torch
from torch import nn

from ...attention.gated_linear import GATE_RANK, gated_linear, log_decay


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
        self.decay = nn.Sequential(nn.Linear(width, GATE_RANK, bias=False), nn.Linear(GATE_RANK, keys))
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
        decay = log_decay(self.decay(hidden_states)).unflatten(-1, (-1, self.head_dim))
        groups = query.shape[2] // key.shape[2]
        key, value, decay = (x.repeat_interleave(groups, dim=2) for x in (key, value, decay))
        output = self.norm(gated_linear(query, key, value, decay)).flatten(2)
        return self.o_proj(output * nn.functional.silu(self.gate(hidden_states))), None


def give_gated_linear(model: Any) -> None:
    """Put gated linear attention in the place of all attentions of a Llama."""
    for layer in model.model.layers:
        attn = layer.self_attn
        layer.self_attn = GatedLinearAttention(attn).to(attn.q_proj.weight)
