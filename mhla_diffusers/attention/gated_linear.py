"""Gated linear attention, which MHLA is compared with: GLA (Yang et al., 2024, arXiv 2312.06635).

A state of D_k x D_v forgets by a gate of every key channel, computed from the input::

    S_t = diag(α_t) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t / √D_k,   α_t = sigmoid(gate_t)^(1/16)
"""

from importlib.util import find_spec

import torch
from torch.nn.functional import logsigmoid

from .precision import sum_dtype, without_autocast

GATE_RANK = 16
"""Rank of the gate's projection, in all of its authors' models."""
_TEMPERATURE = 16.0
"""A gate forgets a sixteenth as fast as a sigmoid would."""


def log_decay(gate: torch.Tensor) -> torch.Tensor:
    """Logs of α from what the gate's projection gives, like it."""
    return logsigmoid(gate) / _TEMPERATURE


def gated_linear(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Attend by kernels of flash-linear-attention on a GPU where fla-core is installed, else token by token.

    Args:
        query: (B, N, H, D_k).
        key: like ``query``.
        value: (B, N, H, D_v).
        decay: like ``query``, logs of α, see :func:`log_decay`.

    Returns:
        (B, N, H, D_v) in the type of ``value``; a token sees itself and those before it.
    """
    if query.is_cuda and find_spec("fla") is not None:
        from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]

        # under autocast a projection may have another type than what a norm or a gate gives
        output: torch.Tensor = chunk_gla(*(x.to(value.dtype) for x in (query, key, value, decay)))[0]
        return output
    given, dtype, outputs = value.dtype, sum_dtype(value.dtype), []
    with without_autocast(query.device):
        query, key, value, decay = (x.to(dtype) for x in (query, key, value, decay))
        q, k, v, a = (x.unbind(dim=1) for x in (query * query.shape[-1] ** -0.5, key, value, decay.exp()))
        state = torch.zeros_like(k[0][..., None] * v[0][..., None, :])
        for token in range(len(q)):
            state = a[token][..., None] * state + k[token][..., None] * v[token][..., None, :]
            outputs.append((q[token][..., None, :] @ state)[..., 0, :])
        return torch.stack(outputs, dim=1).to(given)
