"""The step ``limits``: offsets beyond 2^31, the same bits twice, a second device, and a memory checker."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...attention import BlockLists, mhla_attention
from ...config import DEFAULT_DENSITY
from ..correctness import errors_of, limits_of, too_large
from ..lists import draw_mask
from ..problems import differentiate, draw_problem
from ..shapes import shapes
from ..timing import free_bytes
from .correctness import SMALL
from .findings import Measured, Notebook, NotHereError

_DTYPE = torch.bfloat16
_SANITIZER = "compute-sanitizer"
_SANITIZER_SECONDS = 40
_SMALL_CALL = """
import sys
import torch
from mhla_diffusers.benchmark.gpu_check.correctness import SMALL
from mhla_diffusers.benchmark.problems import draw_problem
draw_problem(SMALL, torch.device(sys.argv[1]), torch.bfloat16, "exact tiles and everything").attend("triton")
torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class Large:
    """A query too large for offsets of 32 bits, in slices that do not see each other."""

    batch: int
    slices: int
    """Along the tokens: blocks of an identity mixing matrix."""
    slice_tokens: int
    heads: int
    head_dim: int
    tiles: int | None = None
    """Tile count of exact tiles, which a batch row has for itself."""

    @property
    def size(self) -> tuple[int, int, int, int]:
        """(B, N, H, D)."""
        return self.batch, self.slices * self.slice_tokens, self.heads, self.head_dim

    @property
    def bytes(self) -> int:
        """Of one forward and backward pass: 16 tensors of the size of the query, some of them float32, and a margin."""
        return 18 * math.prod(self.size) * _DTYPE.itemsize


_ON_GPU = {
    "2^31 elements along the batch": Large(65, 1, 16384, 16, 128),
    "2^31 elements along the tokens": Large(1, 65, 16384, 16, 128),
    "2^31 elements, exact tiles and means": Large(65, 1, 16384, 16, 128, tiles=256),
}
_ON_CPU = {
    "few elements along the batch": Large(3, 1, 32, 1, 16),
    "few elements along the tokens": Large(1, 3, 32, 1, 16),
    "few elements, exact tiles and means": Large(3, 1, 32, 1, 16, tiles=2),
}


def check_limits(notebook: Notebook, device: torch.device) -> None:
    """Everything that a small call on one device does not show."""
    for name, large in (_ON_CPU if device.type == "cpu" else _ON_GPU).items():
        notebook.attempt(name, partial(_check_last_slice, large, device))
    notebook.attempt("the same bits twice", partial(_same_bits_twice, device))
    notebook.attempt("a second device", partial(_second_device, device))
    notebook.attempt(_SANITIZER, partial(_run_sanitizer, device))


def _check_last_slice(large: Large, device: torch.device) -> Measured:
    """The last batch row, or the last block of tokens, of a huge call against the same one alone."""
    free = free_bytes(device)
    if large.bytes > free:
        raise NotHereError(f"it needs {large.bytes / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free")
    torch.manual_seed(0)
    query = torch.randn(large.size, device=device, dtype=_DTYPE)
    rows, tokens = slice(large.batch - 1, None), slice(-large.slice_tokens, None)
    alone = query[rows, tokens].clone()
    whole = _attend(large, query)
    last = {name: x[rows, tokens].clone() for name, x in whole.items()}
    del whole
    expected = _attend(replace(large, batch=1, slices=1), alone)
    errors = errors_of(last, expected)
    limits = limits_of(errors, _DTYPE)
    wrong = too_large(errors, limits)
    numbers = {"elements": query.numel(), "errors": errors, "limits": limits}
    telling = f"{query.numel()} elements, error at most {max(errors.values()):.1e}"
    return Measured(numbers, telling, f"the last slice differs: {wrong}" if wrong else "")


def _attend(large: Large, query: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, and gradients of query, key and value, which are one tensor to save memory."""
    settings: dict[str, Any] = {"grid": (large.size[1],), "blocks": (large.slices,)}
    settings["mixing"] = torch.eye(large.slices, device=query.device)
    if large.tiles is not None:
        mask = draw_mask((large.tiles,), large.heads, DEFAULT_DENSITY).to(query.device)
        settings["exact"] = BlockLists.from_mask((large.tiles,), mask)
        settings["pooled_bias"] = torch.zeros(large.heads, device=query.device)
    tensors = dict.fromkeys(("query", "key", "value"), query)
    return differentiate(partial(mhla_attention, backend="triton", **settings), tensors, query)


def _same_bits_twice(device: torch.device) -> Measured:
    shape = SMALL if device.type == "cpu" else shapes()["wan2.1-1.3b-480p"]
    problem = draw_problem(shape, device, _DTYPE, "exact tiles and everything")
    first, second = problem.attend("triton"), problem.attend("triton")
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    return Measured({"compared": list(first)}, "all equal", f"differ: {', '.join(differ)}" if differ else "")


def _second_device(device: torch.device) -> Measured:
    """The same call on a device that is not the current one."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise NotHereError("there is no second GPU")
    other = torch.device("cuda", 1 if (device.index or 0) == 0 else 0)
    problem = draw_problem(SMALL, device, _DTYPE, "plain")
    moved = {name: x.to(other) for name, x in problem.tensors.items()}
    found = replace(problem, tensors=moved, upstream=problem.upstream.to(other)).attend("triton")
    errors = errors_of({key: x.to(device) for key, x in found.items()}, problem.attend("triton"))
    wrong = too_large(errors, limits_of(errors, _DTYPE))
    name = torch.cuda.get_device_name(other)
    return Measured({"device": name, "errors": errors}, name, f"differ: {wrong}" if wrong else "")


def _run_sanitizer(device: torch.device) -> Measured:
    """One tiny call in a process of its own, its memory allocated by CUDA, so that every tensor has its own bounds."""
    if device.type != "cuda":
        raise NotHereError("it watches programs on NVIDIA GPUs")
    if shutil.which(_SANITIZER) is None:
        raise NotHereError(f"{_SANITIZER} is not installed")
    command = [_SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-P", "-c", _SMALL_CALL]
    command.append(str(device))
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=_SANITIZER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotHereError(f"{_SANITIZER} did not come to an end within {_SANITIZER_SECONDS} s") from None
    lines = [line for line in ended.stdout.splitlines() if line.startswith("=========")]
    wrong = f"code {ended.returncode}: {' '.join(lines[:6])}" if ended.returncode else ""
    return Measured({"lines": lines[:40]}, lines[-1] if lines else "", wrong)
