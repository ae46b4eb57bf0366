"""Decide whether the kernels of :mod:`.branches` can run a call.

The files of kernels import Triton and register their operators, so they are imported when they are needed.
"""

import logging
import os
from functools import cache

import torch

from .tiles import MAX_HEAD_DIM

logger = logging.getLogger(__name__)

FEATURE_MAPS = ("relu", "elu+1", "identity")
"""The feature maps that the kernels know."""
BLOCK_SIZES = (16, 32, 64, 128)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(query: torch.Tensor, feature_map: str, *block_sizes: int) -> str | None:
    """Why the Triton backend cannot run a call with such a query (B, N, H, D) and uniform blocks; None if it can."""
    head_dim = query.shape[3]
    for block_size in block_sizes:
        if block_size not in BLOCK_SIZES:
            return f"the block size is {block_size}; allowed are {', '.join(map(str, BLOCK_SIZES))}"
    if query.device.type not in ("cuda", "cpu"):
        return f"the tensors are on {query.device}; Triton runs on CUDA and ROCm devices"
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
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


@cache
def _try_import() -> str | None:
    """Why the kernels cannot be imported, said in the log too; None if they can."""
    try:
        from . import branches  # noqa: F401
    except Exception as error:  # noqa: BLE001 - another version of Triton raises what it likes
        reason = f"{type(error).__name__}: {error}"
        logger.warning("The Triton kernels cannot be imported, so eager operations take their place: %s", reason)
        return reason
    return None


def _import_error() -> str | None:
    """As :func:`_try_import`, but opaque to torch.compile."""
    return _try_import()


# the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it, for seconds
vars(_import_error)["_dynamo_marked_constant"] = True
