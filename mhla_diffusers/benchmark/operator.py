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
from .measure import Results, Row, Runs, time_interleaved

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
}
"""Backends of PyTorch's scaled_dot_product_attention; the first has a CPU kernel too."""
FLASH = {"flash-attn": ("flash_attn",), "FlashAttention-3": ("fa3_fwd_interface", "flash_attn_interface")}
"""Package → modules to try in order; FlashAttention-3 is in fa3-fwd and in flash-attn-3."""
Attend = Callable[[], torch.Tensor]


def softmax_attention(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Run PyTorch's softmax attention of (B, N, H, D) tensors by one backend; RuntimeError if it cannot."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def why_no_softmax(backend: str, device: torch.device) -> str | None:
    """Return why a softmax backend should not be tried; None if it should, though it may still refuse the call."""
    return "PyTorch has this backend on GPUs only" if device.type == "cpu" and backend != "flash" else None


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


def softmax_runs(inputs: Sequence[torch.Tensor]) -> dict[str, Attend | str]:
    """Return name → a call of softmax attention by every backend and package, or why it cannot run here."""
    device = inputs[0].device
    by_torch: dict[str, Attend | str] = {
        f"{SOFTMAX} {backend}": why_no_softmax(backend, device) or partial(softmax_attention, backend, *inputs)
        for backend in SOFTMAX_BACKENDS
    }
    return by_torch | {f"{SOFTMAX} {package}": flash_attention(package, inputs) for package in FLASH}


def benchmark_operator(shape: Shape, results: Results, stages: Sequence[str]) -> None:
    """Check every backend against the reference, then time all variants in turns, for each of the ``STAGES`` asked for.

    MHLA is timed with a mixing matrix per head, and with RoPE where the model has it; softmax without RoPE.
    """
    check_names(stages, STAGES, "stage")
    check_operator(shape, results.device, results.dtype)
    for stage in stages:
        results.add(time_interleaved(operator_runs(shape, results, stage), results.device, results.seconds))


def operator_runs(shape: Shape, results: Results, stage: str) -> Runs:
    """Return MHLA, sparse and plain linear attention and softmax, each by all backends."""
    device, backward = results.device, stage == "forward+backward"
    inputs = tuple(x.requires_grad_(backward) for x in shape.draw_inputs(device, results.dtype))
    upstream = torch.ones_like(inputs[0])
    rotary: dict[str, Any] = {"rotary": shape.draw_rotary(device)} if shape.rope else {}
    runs: Runs = {}

    def add(name: str, work: Work, attend: Attend | str, counted: Shape = shape, leaves: Any = ()) -> None:
        run: Callable[[], object] | str = attend
        if not isinstance(attend, str):
            run = torch.no_grad()(attend)
            if backward:
                run = lambda: torch.autograd.grad(attend(), (*inputs, *leaves), upstream)  # noqa: E731
        note = "without RoPE" if work == "softmax" and shape.rope else ""
        row = Row(name, shape.name, stage, work == "softmax", reason=note, tokens=shape.tokens)
        blocks = math.prod(counted.blocks) if work == "linear" else None
        runs[replace(row, blocks=blocks, flops=(3 if backward else 1) * counted.flops(work))] = run

    linear: Any = mhla_attention
    for backend in ("eager", "triton"):
        absent = why_no_triton(shape, device, results.dtype) if backend == "triton" else None
        for kind, counted in ((MHLA, shape), (PLAIN, shape.plain)):
            mixing = initial_mixing(counted.blocks).to(device).repeat(shape.heads, 1, 1).requires_grad_()
            run = partial(linear, *inputs, mixing, shape.grid, counted.blocks, backend=backend, **rotary)
            add(f"{kind} {backend}", "linear", absent or run, counted, (mixing,))
        if shape.block_size is not None:
            config = shape.sparse_config
            sizes: Any = {"block_size": config.block_size, "key_block_size": config.key_block_size, **rotary}
            attend: Any = sparse_attention
            run = partial(attend, *inputs, shape.grid, density=config.density, backend=backend, **sizes)
            add(f"{SPARSE} {backend}", "sparse", absent or run)
    for name, softmax in softmax_runs(inputs).items():
        add(name, "softmax", softmax)
    return runs
