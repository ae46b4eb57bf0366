"""One attention by itself: MHLA, sparse and plain linear attention against softmax, ``mhla bench op``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import initial_mixing, mhla_attention, sparse_attention
from ..errors import check_names
from .cases import Shape, Work
from .correctness import check_operator, why_no_triton
from .measure import Results, Row, Runs, free_bytes, time_interleaved

STAGES = ("forward", "forward+backward")
SOFTMAX = "softmax"
MHLA = "MHLA"
PLAIN = "plain linear"
SPARSE = "sparse"
"""As in a patch: keys are sorted, lists chosen, and β and γ fitted at every call."""
SOFTMAX_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Backends of PyTorch's scaled_dot_product_attention."""
FLASH = {"flash-attn": ("flash_attn",), "FlashAttention-3": ("fa3_fwd_interface", "flash_attn_interface")}
"""Package → modules to try in order; FlashAttention-3 is in fa3-fwd and in flash-attn-3."""
Attend = Callable[[], torch.Tensor]


def softmax_attention(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Run PyTorch's softmax attention of (B, N, H, D) tensors by one backend; RuntimeError if it cannot."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def why_no_softmax(backend: str, device: torch.device, tokens: int, heads: int) -> str | None:
    """Return why a softmax backend should not be tried; None if it should, though it may still refuse the call.

    Heads are those of all samples of the batch.
    """
    if device.type != "cpu":
        return None
    if backend in ("cudnn", "efficient"):
        return "PyTorch has this backend on GPUs only"
    # Linux promises memory that it does not have and ends the process that takes it, so this must be known beforehand
    needed, free = 2 * 4 * heads * tokens**2, free_bytes(device)
    if backend == "math" and needed > free:
        return f"its N x N weights need {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free"
    return None


def flash_attention(package: str, inputs: Sequence[torch.Tensor]) -> Attend | str:
    """Return a call of a package's FlashAttention of query, key and value (B, N, H, D), or why there is none."""
    if inputs[0].device.type == "cpu":
        return f"{package} runs on GPUs only"
    installed = [module for module in FLASH[package] if find_spec(module) is not None]
    if not installed:
        return f"{package} is not installed: no module {' or '.join(FLASH[package])}"

    def attend() -> torch.Tensor:
        output: Any = import_module(installed[0]).flash_attn_func(*inputs)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output  # some return the log-sum-exp too
        return found

    return attend


def benchmark_operator(shape: Shape, results: Results, stages: Sequence[str], *, compile: bool) -> None:
    """Check every MHLA backend against the reference, then time all variants in turns, for each stage.

    MHLA is timed with a mixing matrix per head, and with RoPE where the model has it. Softmax attention is timed
    without RoPE. With ``compile`` torch.compile of the eager backend is timed too.

    Raises:
        IncorrectAttentionError: a backend is wrong here; then nothing is timed.
        ValueError: an unknown stage.
    """
    device, dtype = results.device, results.dtype
    check_names(stages, STAGES, "stage")
    check_operator(shape, device, dtype)
    for stage in stages:
        torch.compiler.reset()
        runs = operator_runs(shape, device, dtype, stage, compile=compile)
        results.add(time_interleaved(runs, device, results.seconds))


def operator_runs(shape: Shape, device: torch.device, dtype: torch.dtype, stage: str, *, compile: bool) -> Runs:
    """Return MHLA, sparse and plain linear attention and softmax, each by all backends."""
    backward = stage == "forward+backward"
    inputs = tuple(x.requires_grad_(backward) for x in shape.draw_inputs(device, dtype))
    upstream = torch.ones_like(inputs[0])
    rotary: dict[str, Any] = {"rotary": shape.draw_rotary(device)} if shape.rope else {}
    runs: Runs = {}

    def add(kind: str, backend: str, work: Work, attend: Attend | str, leaves: Sequence[torch.Tensor] = ()) -> None:
        run: Callable[[], object] | str = attend
        if not isinstance(attend, str):
            run = torch.no_grad()(attend)
            if backward:
                run = lambda: torch.autograd.grad(attend(), (*inputs, *leaves), upstream)  # noqa: E731
        counted = shape.plain if kind == PLAIN else shape
        flops = (3 if backward else 1) * counted.flops(work)
        blocks = math.prod(counted.blocks) if work == "linear" else None
        note = "without RoPE" if kind == SOFTMAX and shape.rope else ""
        row = Row(f"{kind} {backend}", shape.name, stage, kind == SOFTMAX, reason=note, tokens=shape.tokens)
        runs[replace(row, blocks=blocks, flops=flops)] = run

    def add_mhla(kind: str, backend: str, absent: str | None) -> None:
        blocks = (shape.plain if kind == PLAIN else shape).blocks
        mixing = initial_mixing(blocks).to(device).repeat(shape.heads, 1, 1).requires_grad_()
        function: Any = mhla_attention
        if backend == "torch.compile" and absent is None:
            function = torch.compile(mhla_attention, dynamic=False)
        by = {"backend": "triton" if backend == "triton" else "eager"}
        attend = absent or partial(function, *inputs, mixing, shape.grid, blocks, **by, **rotary)
        add(kind, backend, "linear", attend, (mixing,))

    for backend in ("eager", "triton"):
        absent = why_no_triton(shape, device, dtype) if backend == "triton" else None
        add_mhla(MHLA, backend, absent)
        add_mhla(PLAIN, backend, absent)
        if shape.block_size is not None:
            config = shape.sparse_config
            sizes: Any = {"block_size": config.block_size, "key_block_size": config.key_block_size, **rotary}
            attend: Any = sparse_attention
            run = partial(attend, *inputs, shape.grid, density=config.density, backend=backend, **sizes)
            add(SPARSE, backend, "sparse", absent or run)
    add_mhla(MHLA, "torch.compile", None if compile else "not asked for; add --compile")
    for backend in SOFTMAX_BACKENDS:
        absent = why_no_softmax(backend, device, shape.tokens, shape.heads)
        add(SOFTMAX, backend, "softmax", absent or partial(softmax_attention, backend, *inputs))
    for package in FLASH:
        add(SOFTMAX, package, "softmax", flash_attention(package, inputs))
    return runs
