"""Parameters and multiply-adds of a classifier.

The paper's FLOPs (Table 2) are multiply-adds of weights only; products between queries, keys, values and KV states are
not included. DeiT-S confirms this: 4.2 G are its projections, feed-forwards and patches, and with softmax attention's
own products they are 4.6 G. Both are counted here.
"""

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_WEIGHTS = ("aten.addmm", "aten.mm", "aten.convolution")
"""Operators that multiply an input with weights; others multiply what attention has made of it."""


class Counts(NamedTuple):
    """Counts of a model and one image."""

    parameters: int
    weight_macs: int
    """Multiply-adds of projections, feed-forwards and convolutions."""
    attention_macs: int
    """Multiply-adds between queries, keys, values and KV states."""


def count(model: nn.Module, height: int, width: int) -> Counts:
    """Count the parameters of a classifier, and the multiply-adds of a forward, operator by operator.

    A copy on the meta device is called, where nothing is computed and no kernel hides its products. Sums, such
    as those of keys, are none.

    Args:
        model: takes ``pixel_values`` of three channels.
        height: of the image, in pixels.
        width: in pixels.
    """
    copied = copy.deepcopy(model).to("meta").eval()
    pixel_values = torch.empty(1, 3, height, width, dtype=next(copied.parameters()).dtype, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        copied(pixel_values)
    flops = {str(operator): found for operator, found in counter.get_flop_counts()["Global"].items()}
    of_weights = sum(flops.get(operator, 0) for operator in _WEIGHTS)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Counts(parameters, of_weights // 2, (sum(flops.values()) - of_weights) // 2)
