"""Checks that an attention is correct on this device and in this type, before anything is timed."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..attention import MHLACall, SparseCall, attend, initial_mixing, reference_weights
from ..attention.sparse import with_lists
from ..attention.triton.backend import why_not
from .cases import Shape

_LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
_LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_ROWS = 64
"""Query tokens whose rows are compared; a row of N weights in float64 is formed for each."""


def why_no_triton(shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the fused kernels cannot be timed; None if they can."""
    if device.type == "cpu":
        return "the fused kernels run on CUDA and ROCm devices"  # their interpreter is for tests and has no speed
    return why_not(torch.empty(1, 0, shape.heads, shape.head_dim, device=device, dtype=dtype), "relu")


def operator_errors(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Compare MHLA, and sparse attention where it is measured, with the float64 reference, by every backend.

    At full length, on sampled rows of the output and the gradients that they send back, with two heads at most. Returns
    attention, backend and tensor, such as "MHLA eager output" → relative error.
    """
    shape = replace(shape, heads=min(2, shape.heads))
    torch.manual_seed(0)
    inputs: dict[str, Any] = dict(zip(("query", "key", "value"), shape.draw_inputs(device, dtype), strict=True))
    rows = torch.arange(shape.tokens, device=device)[:: max(1, shape.tokens // _ROWS)][:_ROWS]
    upstream = torch.randn(1, len(rows), shape.heads, shape.head_dim, device=device, dtype=torch.float64)
    common: dict[str, Any] = {"grid": shape.grid, "rotary": shape.draw_rotary(device)}
    mixing = initial_mixing(shape.blocks).to(device)
    mhla = {**inputs, "mixing": mixing + 0.1 * torch.rand_like(mixing)}
    calls: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
        "MHLA": (partial(MHLACall, **common, blocks=shape.blocks), mhla)
    }
    if shape.sparse is not None:
        rule, half = shape.sparse.rule_on(shape.grid), torch.full((shape.heads,), 0.5, device=device)
        lists: Any = with_lists(SparseCall(**inputs, **common, sparse=rule)).sparse
        given = {**common, "pooled_bias": half, "state_weight": half}
        calls["sparse"] = partial(SparseCall, **given, sparse=lists), inputs
    errors = {}
    for kind, (call, tensors) in calls.items():
        exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
        expected = torch.einsum("bhqk,bkhd->bqhd", reference_weights(call(**exact), rows), exact["value"])
        wanted = torch.autograd.grad(expected, list(exact.values()), upstream)
        for backend in ("eager",) if why_no_triton(shape, device, dtype) else ("eager", "triton"):
            leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
            found = attend(call(**leaves), backend)[:, rows]
            gradients = torch.autograd.grad(found, list(leaves.values()), upstream.to(found.dtype))
            names = "output", *(f"gradient of {name}" for name in leaves)
            for name, one, other in zip(names, (found, *gradients), (expected, *wanted), strict=True):
                errors[f"{kind} {backend} {name}"] = ((one.double() - other).norm() / other.norm()).item()
    return errors


def too_large(errors: Mapping[str, float], dtype: torch.dtype) -> list[str]:
    """Return the relative errors of outputs and gradients that are too large in a type, each with its limit."""
    wrong = []
    for name, error in errors.items():
        limit = (_LARGEST_ERROR if name.endswith("output") else _LARGEST_GRADIENT_ERROR)[dtype]
        if not error <= limit:  # also NaN
            wrong.append(f"{name} {error:.1e} of {limit:.0e}")
    return wrong
