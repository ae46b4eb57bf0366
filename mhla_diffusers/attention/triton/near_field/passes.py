"""Forward and backward pass of the near field, with the far field's kernels around it."""

from dataclasses import dataclass

import torch

from ..arguments import like
from ..launches import key_value_gradient_launch, summary_gradient_launch, summary_launch
from ..operators import mix, mixing_gradient, sum_parts
from .call import NearFieldCall
from .launches import (
    OutputSide,
    far_query_gradient_launch,
    near_field_launch,
    near_key_value_gradient_launch,
    near_query_gradient_launch,
)


def forward(call: NearFieldCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator returns."""
    summary = mixed = None
    if call.has_far_field:
        launch, parts = summary_launch(call.far)
        launch.run()
        summary = sum_parts(parts)
        mixed = mix(call.far.mixing, summary)
    launch, output, log_sums = near_field_launch(call, mixed)
    launch.run()
    return output, log_sums, summary if summary is not None else log_sums.new_empty(0)


@dataclass(frozen=True)
class Gradients:
    """Of each differentiable argument, in its shape and type."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    far_field_weight: torch.Tensor


def backward(call: NearFieldCall, output: OutputSide, summary: torch.Tensor) -> Gradients:
    """Gradients of a call, given what :func:`forward` returned and the gradient of the output."""
    if call.has_far_field:
        gradients = _far_field_gradients(call, output, summary)
    else:
        unused = (torch.zeros_like(x) for x in (call.far.mixing, call.far_field_weight))
        gradients = Gradients(like(call.far.query), like(call.far.key), like(call.far.value), *unused)
    launch, output_products = near_query_gradient_launch(call, output, gradients.query)
    launch.run()
    near_key_value_gradient_launch(call, output, output_products, gradients.key, gradients.value).run()
    return gradients


def _far_field_gradients(call: NearFieldCall, output: OutputSide, summary: torch.Tensor) -> Gradients:
    """The far field's share of the gradients."""
    mixing = call.far.mixing
    mixed = mix(mixing, summary)
    launch, of_query = far_query_gradient_launch(call, mixed, output)
    launch.run()
    launch, parts = summary_gradient_launch(call.far, mixed, output.gradient, of_query.token_numbers)
    launch.run()
    mixed_gradient = sum_parts(parts)
    launch, (of_key, of_value) = key_value_gradient_launch(call.far, mix(mixing.mT, mixed_gradient))
    launch.run()
    of_weight = of_query.weight.sum(dim=(0, 1, 2))
    return Gradients(of_query.query, of_key, of_value, mixing_gradient(mixing, summary, mixed_gradient), of_weight)
