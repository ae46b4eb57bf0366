"""The Triton backend of :func:`mhla_diffusers.attention.mhla_attention`: when it can run, and running it."""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

from ..blocks import Shape
from ..eager import finish
from ..near_field import without_own_block
from ..rotary import Rotary, pair_tables
from .near_field.operators import near_field_attention as near_field_operator
from .operators import attention

logger = logging.getLogger(__name__)

FEATURE_MAPS = ("relu", "elu+1", "softmax", "identity")
"""The feature maps that the kernels know; one that a user registered is a Python function."""
MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(query: torch.Tensor, feature_map: str, rotary: Rotary | None) -> str | None:
    """Why the Triton backend cannot run a call; None if it can."""
    head_dim = query.shape[3]
    if not _installed():
        return "Triton is not installed (pip install triton)"
    if query.device.type not in ("cuda", "cpu"):
        return f"the tensors are on {query.device}; Triton runs on CUDA and ROCm devices"
    if query.device.type == "cpu" and not _interpreting():
        return "the tensors are on the CPU, where the kernels run only under TRITON_INTERPRET=1, for tests"
    if query.dtype not in _DTYPES:
        return f"the inputs are {query.dtype}; allowed are float32, bfloat16 and float16"
    if head_dim > MAX_HEAD_DIM:
        return f"the head dim is {head_dim}; at most {MAX_HEAD_DIM} is allowed"
    if feature_map not in FEATURE_MAPS:
        return f"its kernels know the feature maps {', '.join(FEATURE_MAPS)} and not {feature_map!r}"
    if rotary is not None and head_dim % 2:
        return f"RoPE turns pairs of channels and the head dim is {head_dim}; it must be even"
    return None


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Shape,
    blocks: Shape,
    *,
    feature_map: str,
    rotary: Rotary | None,
    rope: str,
    normalize: bool,
    eps: float,
    key_mask: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    output_gate: torch.Tensor | None,
) -> torch.Tensor:
    """Triton backend of :func:`mhla_diffusers.attention.mhla_attention`, which has checked the arguments.

    Raises:
        ValueError: if the kernels cannot run this call, or its tensors are on several devices.
    """
    tensors = {"mixing": mixing, "key_mask": key_mask, "output_norm": output_norm, "output_gate": output_gate}
    _check(query, feature_map, rotary, tensors)
    output: torch.Tensor
    output, _ = attention(
        _usable(query, "query"),
        _usable(key, "key"),
        _usable(value, "value"),
        mixing,
        grid,
        blocks,
        feature_map,
        _rotary_table(rotary) if rotary is not None else None,
        rope == "before",
        normalize,
        eps,
        key_mask.float().contiguous() if key_mask is not None else None,
        output_norm.contiguous() if output_norm is not None else None,
        _usable(output_gate, "output_gate") if output_gate is not None else None,
    )
    return output


def triton_near_field_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Shape,
    blocks: Shape,
    far_field_weight: torch.Tensor,
    *,
    feature_map: str,
    rotary: Rotary | None,
    rope: str,
    eps: float,
    key_mask: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    output_gate: torch.Tensor | None,
) -> torch.Tensor:
    """The same with a near field (:mod:`mhla_diffusers.attention.near_field`); norm and gate follow in PyTorch.

    Raises:
        ValueError: if the kernels cannot run this call, or its tensors are on several devices.
    """
    tensors = {"mixing": mixing, "key_mask": key_mask, "output_norm": output_norm, "output_gate": output_gate}
    _check(query, feature_map, rotary, tensors | {"far_field_weight": far_field_weight})
    output: torch.Tensor
    output, *_ = near_field_operator(
        _usable(query, "query"),
        _usable(key, "key"),
        _usable(value, "value"),
        without_own_block(mixing),
        far_field_weight.float().contiguous(),
        grid,
        blocks,
        feature_map,
        _rotary_table(rotary) if rotary is not None else None,
        rope == "before",
        eps,
        key_mask.float().contiguous() if key_mask is not None else None,
    )
    if output_norm is None and output_gate is None:
        return output
    return finish(output.float(), output_norm, output_gate).to(query.dtype)


def _check(
    query: torch.Tensor, feature_map: str, rotary: Rotary | None, tensors: dict[str, torch.Tensor | None]
) -> None:
    reason = why_not(query, feature_map, rotary)
    if reason is not None:
        raise ValueError(f'backend="triton" cannot run this call: {reason}. Use backend="eager".')
    for name, tensor in (tensors | dict(zip(("rotary cos", "rotary sin"), rotary or (), strict=False))).items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but query is on {query.device}; they must be on the same device."
            )


def _installed() -> bool:
    return find_spec("triton") is not None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _rotary_table(rotary: Rotary) -> torch.Tensor:
    """(1 or B, N, D) float32: (cos, sin) of each channel pair side by side, which the kernels read in one piece."""
    cos, sin = pair_tables(rotary)
    return torch.stack((cos.float(), sin.float()), dim=-1).flatten(-2).squeeze(2).detach()


def _usable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` itself if its channels lie side by side, as the kernels read them; else a copy."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    _say_copied(name, tensor.stride())
    return tensor.contiguous()


@cache
def _say_copied(name: str, strides: Shape) -> None:
    """Said once per name and strides."""
    logger.debug("%s has strides %s: its last dimension is not contiguous, so every call copies it.", name, strides)
