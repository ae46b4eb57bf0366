"""Gated linear attention, which MHLA is compared with: GLA (Yang et al., 2024, arXiv 2312.06635).

A state of D_k x D_v forgets by a gate of every key channel, computed from the input::

    S_t = diag(α_t) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t / √D_k,   α_t = sigmoid(gate_t)^(1/16)
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import logsigmoid, pad

from .precision import sum_dtype, without_autocast

GATE_RANK = 16
"""Of the projection of the gate, in all of its authors' models."""
_TEMPERATURE = 16.0
"""A gate forgets a sixteenth as fast as a sigmoid would."""
_CHUNK = 8
"""Tokens: within a chunk decays are divided by each other, so their range is that of 4 steps before and after."""
_STRONGEST = -20.0
"""Log of the strongest decay distinguished from 0: 4 steps of it stay in float32, which does not resolve less."""
_BACKENDS = ("auto", "fla", "eager")


def log_decay(gate: torch.Tensor) -> torch.Tensor:
    """Logs of α from what the gate's projection gives, like it."""
    return logsigmoid(gate) / _TEMPERATURE


def gated_linear(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    """The output of every token; a token sees itself and those before it.

    Args:
        query: (B, N, H, D_k).
        key: like ``query``.
        value: (B, N, H, D_v).
        decay: like ``query``, logs of α, see :func:`log_decay`.
        backend: "fla" for the kernels of flash-linear-attention, of which the signature was read (fla-core 0.6) but
            which have not been run here; "eager" for PyTorch operations, chunk after chunk, on any device; "auto" for
            the kernels on a GPU where they are installed, else eager.

    Returns:
        (B, N, H, D_v) in the type of ``value``.

    Raises:
        ValueError: an unknown backend, or kernels asked for without a GPU.
        ImportError: kernels asked for that are not installed, or are older than 0.6.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(_BACKENDS)}.")
    if backend == "fla" and not query.is_cuda:
        raise ValueError(f"backend='fla' needs tensors on a GPU; got {query.device}. 'eager' runs on any device.")
    if backend == "fla" or (backend == "auto" and query.is_cuda and _has_kernels()):
        # under autocast a projection may have another type than what a norm or a gate gives
        query, key, decay = (x.to(value.dtype) for x in (query, key, decay))
        output: torch.Tensor = _kernel()(query, key, value, decay)[0]
        return output
    with without_autocast(query.device):
        return _in_chunks(query, key, value, decay)


@cache
def _has_kernels() -> bool:
    return find_spec("fla") is not None


@cache
def _kernel() -> Callable[..., tuple[Any, ...]]:
    """``chunk_gla`` of flash-linear-attention, looked for once and not at every call."""
    try:
        from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "backend='fla' needs flash-linear-attention: pip install 'mhla_diffusers[gla]'; 'eager' runs without it."
        ) from error
    if "head_first" in inspect.signature(chunk_gla).parameters:
        raise ImportError(
            "This flash-linear-attention is so old that it takes heads before tokens: pip install --upgrade "
            "'mhla_diffusers[gla]'; backend='eager' runs without it."
        )
    found: Callable[..., tuple[Any, ...]] = chunk_gla
    return found


def _in_chunks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    count, dtype = query.shape[1], sum_dtype(value.dtype)
    missing = -count % _CHUNK
    query, key, values, decay = (
        pad(x.to(dtype), (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, _CHUNK)).movedim(3, 1)
        for x in (query, key, value, decay)
    )
    query = query * query.shape[-1] ** -0.5
    total = decay.clamp(min=_STRONGEST).cumsum(dim=-2)
    middle, last = total[..., _CHUNK // 2 - 1, None, :], total[..., -1:, :]
    seen, left = query * total.exp(), key * (last - total).exp()
    within = ((query * (total - middle).exp()) @ (key * (middle - total).exp()).mT).tril() @ values
    added = left.mT @ values
    state, outputs = torch.zeros_like(added[:, :, 0]), []
    for chunk in range(added.shape[2]):
        outputs.append(seen[:, :, chunk] @ state)
        state = last[:, :, chunk].exp().mT * state + added[:, :, chunk]
    output = (within + torch.stack(outputs, dim=2)).movedim(1, 3).flatten(1, 2)
    return output[:, :count].to(value.dtype)
