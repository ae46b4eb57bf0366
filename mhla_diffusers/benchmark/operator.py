"""``mhla bench op``: time one attention, MHLA, sparse and plain linear against softmax."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import initial_mixing, mhla_attention, sparse_attention
from ..config import MHLAConfig
from .cases import Case, Shape
from .correctness import why_no_triton
from .measure import Results, Row, Runs, time_interleaved

SOFTMAX = "softmax"
MHLA = "MHLA"
PLAIN = "plain linear"
"""MHLA with one block."""
SPARSE = "sparse"
"""As in a patch: keys are sorted, lists chosen, and β and γ fitted at every call."""
SOFTMAX_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Backends of PyTorch's scaled_dot_product_attention; the first has a CPU kernel too."""
_FLASH = {"flash-attn": ("flash_attn",), "FlashAttention-3": ("fa3_fwd_interface", "flash_attn_interface")}
"""Package → modules to try in order; FlashAttention-3 is in fa3-fwd and in flash-attn-3."""
Attend = Callable[[], torch.Tensor]


def softmax_runs(inputs: Sequence[torch.Tensor]) -> dict[str, Attend | str]:
    """Return name → softmax attention of query, key and value (B, N, H, D) by every backend, or why it cannot run."""
    runs: dict[str, Attend | str] = {}
    for name, backend in SOFTMAX_BACKENDS.items():
        runs[f"{SOFTMAX} {name}"] = partial(_torch_attention, backend, *inputs)
    for package, modules in _FLASH.items():
        installed = [module for module in modules if find_spec(module) is not None]
        missing = f"{package} is not installed: no module {' or '.join(modules)}"
        runs[f"{SOFTMAX} {package}"] = partial(_flash_attention, installed[0], *inputs) if installed else missing
    return runs


def _torch_attention(backend: SDPBackend, *inputs: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([backend]):
        q, k, v = (x.transpose(1, 2) for x in inputs)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _flash_attention(module: str, *inputs: torch.Tensor) -> torch.Tensor:
    output: Any = import_module(module).flash_attn_func(*inputs)
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output  # some return the log-sum-exp too
    return found


def benchmark_operator(case: Case, results: Results, seconds: float) -> None:
    """Time all variants in turns, without and with their gradients.

    MHLA is timed with a mixing matrix per head, and with RoPE where the model has it; softmax without RoPE.
    """
    for backward in (False, True):
        runs = operator_runs(case.shape, results.device, results.dtype, backward)
        results.add(time_interleaved(runs, results.device, seconds))


def operator_runs(shape: Shape, device: torch.device, dtype: torch.dtype, backward: bool) -> Runs:
    """Return MHLA, sparse and plain linear attention and softmax, each by all backends."""
    inputs = tuple(x.requires_grad_(backward) for x in shape.draw_inputs(device, dtype))
    query, key, value = inputs
    upstream, rotary = torch.ones_like(query), shape.draw_rotary(device)
    runs: Runs = {}

    def add(name: str, attend: Attend | str, flops: int, leaves: tuple[torch.Tensor, ...] = (), **about: Any) -> None:
        stage, flops = ("forward+backward", 3 * flops) if backward else ("forward", flops)
        row = Row(name, shape.name, stage, tokens=shape.tokens, flops=flops, **about)
        if isinstance(attend, str):
            runs[row] = attend
        elif backward:
            runs[row] = lambda: torch.autograd.grad(attend(), (*inputs, *leaves), upstream)
        else:
            runs[row] = torch.no_grad()(attend)

    for backend in ("eager", "triton"):
        absent = why_no_triton(shape, device, dtype) if backend == "triton" else None
        given: dict[str, Any] = {"grid": shape.grid, "rotary": rotary, "backend": backend}
        for kind, blocks in ((MHLA, shape.blocks), (PLAIN, (1,) * len(shape.blocks))):
            mixing = initial_mixing(blocks).to(device).repeat(shape.heads, 1, 1).requires_grad_()
            linear = partial(mhla_attention, query, key, value, mixing, blocks=blocks, **given)
            flops = shape.sizes(MHLAConfig(blocks=blocks)).flops
            add(f"{kind} {backend}", absent or linear, flops, (mixing,))
        if shape.sparse is not None:
            given |= {name: getattr(shape.sparse, name) for name in ("density", "block_size", "key_block_size")}
            sparse = partial(sparse_attention, query, key, value, **given)
            add(f"{SPARSE} {backend}", absent or sparse, shape.sizes(shape.sparse).flops)
    softmax_flops = shape.sizes(MHLAConfig(blocks=shape.blocks)).softmax_flops
    note = "without RoPE" if shape.rope else ""
    for name, softmax in softmax_runs(inputs).items():
        add(name, softmax, softmax_flops, baseline=True, reason=note)
    return runs
