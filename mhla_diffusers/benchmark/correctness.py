"""Whether an attention is right on this device and in this type, asked before anything is timed."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..patching import MHLALayer, mhla_layers
from ..patching.attended import Attended
from .problems import OUTPUT, cut, draw_problem
from .shapes import Shape

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_MOST_TOKENS = 1024


class IncorrectAttentionError(ValueError):
    """An attention is not what the reference says; nothing is timed."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def errors_of(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative error of each tensor that is expected, by its name."""
    return {name: relative_error(found[name], tensor) for name, tensor in expected.items()}


def limits_of(names: Iterable[str], dtype: torch.dtype) -> dict[str, float]:
    """The largest errors of an output, which is named ``OUTPUT``, and of gradients, against the reference."""
    return {name: (LARGEST_ERROR if name == OUTPUT else LARGEST_GRADIENT_ERROR)[dtype] for name in names}


def too_large(errors: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """The errors above their limits, in words; empty if there are none. An error that is no number is above."""
    wrong = [f"{name} {error:.1e} of {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]]
    return ", ".join(wrong)


def check_operation(
    shape: Shape, device: torch.device, dtype: torch.dtype, backend: str, *, sparse: bool = False
) -> float:
    """Compare output and gradients with the float64 reference, on some blocks of a shape.

    MHLA blocks, up to 1024 tokens, are as long as the shape's, and uniform blocks have as many tokens.

    Args:
        shape: the attention; with a block size where ``sparse`` is set.
        device: where.
        dtype: of query, key and value.
        backend: of :func:`mhla_attention`.
        sparse: check the sparse branch with lists given, pooled keys, and the linear branch beside it.

    Returns:
        Relative error of the output.

    Raises:
        IncorrectAttentionError: it, or that of a gradient, is too large.
    """
    problem = draw_problem(cut(shape, _MOST_TOKENS), device, dtype, "sparse" if sparse else "plain")
    errors = errors_of(problem.attend(backend), problem.reference())
    what = f"MHLA{' with the sparse branch' if sparse else ''} {backend}"
    _require(errors, limits_of(errors, dtype), what, device, dtype)
    return errors[OUTPUT]


def check_agreement(found: torch.Tensor, eager: torch.Tensor, what: str) -> None:
    """Compare with the eager backend at full size, where the reference would be too large.

    Raises:
        IncorrectAttentionError: they differ.
    """
    errors, limits = {OUTPUT: relative_error(found, eager)}, {OUTPUT: 2 * LARGEST_ERROR[eager.dtype]}
    _require(errors, limits, f"{what}, compared with the eager backend,", eager.device, eager.dtype)


@torch.no_grad()
def check_patched(transformer: Any, inputs: dict[str, Any]) -> float:
    """Run a model with MHLA and compare its first and last layer of it with the reference, on what they were given.

    Args:
        transformer: patched or with MHLA built in, fresh, so that gates are 1; in the type to measure.
        inputs: of its forward, few tokens.

    Returns:
        The larger relative error.

    Raises:
        IncorrectAttentionError: it is too large.
    """
    layers = list(mhla_layers(transformer).values())
    chosen = {id(layer): layer for layer in (layers[0], layers[-1])}.values()
    errors: list[float] = []
    types: list[torch.dtype] = []

    def compare(layer: MHLALayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        given = Attended(**{name: bound.arguments[name] for name in Attended._fields})
        weights, value = layer.weights(given), given.value
        expected = torch.einsum("bhqk,bkhd->bqhd", weights, value.to(weights.dtype))
        errors.append(relative_error(output, expected))
        types.append(output.dtype)

    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in chosen]
    try:
        transformer(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    device = next(transformer.parameters()).device
    _require({OUTPUT: max(errors)}, limits_of([OUTPUT], types[0]), "The attention of MHLA layers", device, types[0])
    return max(errors)


def _require(
    errors: Mapping[str, float], limits: Mapping[str, float], what: str, device: torch.device, dtype: torch.dtype
) -> None:
    if wrong := too_large(errors, limits):
        raise IncorrectAttentionError(
            f"{what} has a relative error that is too large on {device} in {dtype}: {wrong}. Nothing was timed."
        )
