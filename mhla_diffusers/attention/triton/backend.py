"""The Triton backend of :func:`mhla_diffusers.attention.mhla_attention`: when it can run, and running it.

The files of kernels import Triton and register their operators, so they are imported when they are needed.
"""

import logging
import math
import os
from dataclasses import replace
from functools import cache

import torch

from ..call import Call
from ..causal import CausalAttention, Own
from ..layout import Shape
from ..merge import LinearAttention, merged_attention
from ..parallel.sparse import ring_sparse_attention
from ..sparse import with_lists

logger = logging.getLogger(__name__)

FEATURE_MAPS = ("relu", "elu+1", "softmax", "identity")
"""The feature maps that the kernels know; one that a user registered is a Python function."""
BLOCK_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(query: torch.Tensor, feature_map: str, block_size: int | None = None) -> str | None:
    """Why the Triton backend cannot run a call with such a query (B, N, H, D); None if it can.

    Args:
        query: of the call.
        feature_map: its name.
        block_size: rows of its uniform blocks, if there are any.
    """
    head_dim = query.shape[3]
    if block_size is not None and block_size not in BLOCK_SIZES:
        return f"the block size is {block_size}; allowed are {', '.join(map(str, BLOCK_SIZES))}"
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
    if (error := _import_error()) is not None:
        return f"its kernels cannot be imported ({error})"
    return None


def triton_attention(call: Call) -> torch.Tensor:
    """Triton backend of :func:`mhla_diffusers.attention.mhla_attention`: (B, N, H, D).

    The sparse branch and MHLA beside it are the kernels of :mod:`.sparse`. Over a ring of processes the sparse branch
    and the merge are PyTorch operations (:mod:`mhla_diffusers.attention.parallel.sparse`).

    Raises:
        ValueError: if the kernels cannot run this call, or its tensors are on several devices.
    """
    usable = usable_call(call)
    from .linear import linear_attention
    from .sparse import sparse_attention

    if usable.lists is None and usable.rule is None:
        return linear_attention(usable) if usable.group is None else LINEAR(usable)
    if usable.group is None:
        return sparse_attention(usable)
    return merged_attention(with_lists(usable), ring_sparse_attention, LINEAR)


def usable_call(call: Call) -> Call:
    """A call as the kernels read it.

    Raises:
        ValueError: as :func:`triton_attention`.
    """
    _check(call)
    angles = call.rotary_of_tokens
    return replace(
        call,
        query=_usable(call.query, "query"),
        key=_usable(call.key, "key"),
        value=_usable(call.value, "value"),
        rotary=None if angles is None else angles.float().contiguous().detach(),
        rotary_axes=None,
        key_mask=call.key_mask.float().contiguous() if call.key_mask is not None else None,
        output_norm=call.output_norm.contiguous() if call.output_norm is not None else None,
        output_gate=_usable(call.output_gate, "output_gate") if call.output_gate is not None else None,
    )


def _states(call: Call) -> torch.Tensor:
    usable = usable_call(call)
    from .linear import linear_states

    return linear_states(usable)


def _read(call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    usable = usable_call(call)
    from .linear import linear_read

    return linear_read(usable, states)


def _own_block(call: Call) -> Own:
    usable = usable_call(call)
    from .sparse import triton_own_block_attention

    return triton_own_block_attention(usable)


LINEAR = LinearAttention(_states, _read)
TRITON_CAUSAL = CausalAttention(LINEAR, _own_block)


def _check(call: Call) -> None:
    sparse = call.rule or call.lists
    reason = why_not(call.query, call.feature_map, None if sparse is None else sparse.block_size)
    if reason is not None:
        raise ValueError(f'backend="triton" cannot run this call: {reason}. Use backend="eager".')
    if call.rotary_axes is not None and call.query.shape[1] != math.prod(call.grid):
        raise ValueError(
            f"rotary_axes={call.rotary_axes} has angles by places on the grid {call.grid}, but query has a share of "
            f"its tokens, N={call.query.shape[1]}; give rotary a row for each of them, and rotary_axes=None."
        )
    for name in ("mixing", "rotary", "key_mask", "output_norm", "output_gate", "linear_weight", "pooled_bias"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.device != call.query.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but query is on {call.query.device}; they must be on the same device."
            )


@cache
def _try_import() -> str | None:
    """Why the kernels cannot be imported, said in the log too; None if they can."""
    try:
        from . import sparse  # noqa: F401
    except Exception as error:  # noqa: BLE001 - another version of Triton raises what it likes
        reason = f"{type(error).__name__}: {error}"
        logger.warning("The Triton kernels cannot be imported, so eager operations take their place: %s", reason)
        return reason
    return None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _import_error() -> str | None:
    """The same, which torch.compile does not look into."""
    return _try_import()


# the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it, for seconds
vars(_import_error)["_dynamo_marked_constant"] = True


def _usable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` itself if its channels lie side by side, as the kernels read them; else a copy."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    if not torch.compiler.is_compiling():  # a call of the logger would break the graph
        _say_copied(name, tensor.stride())
    return tensor.contiguous()


@cache
def _say_copied(name: str, strides: Shape) -> None:
    """Said once per name and strides."""
    logger.debug("%s has strides %s: its last dimension is not contiguous, so every call copies it.", name, strides)
