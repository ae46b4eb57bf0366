"""Parameters and multiply-adds of a classifier, and the paper's models beside the numbers of its Table 2.

    python -m mhla_diffusers.models.counts

The paper's FLOPs are multiply-adds of weights only; products between queries, keys, values and KV states are not
included. DeiT-S confirms this: 4.2 G are its projections, feed-forwards and patches, and with softmax attention's own
products they are 4.6 G. Both are counted here.
"""

import copy
import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..config import MHLAConfig
from ..patching import apply_mhla
from .pooled_vit import PooledViTConfig, PooledViTForImageClassification
from .vlt import VLTConfig, VLTForImageClassification

_WEIGHTS = ("aten.addmm", "aten.mm", "aten.convolution")
"""Operators that multiply an input with weights; others multiply what attention has made of it."""
PAPER = {
    "MHLA-VLT-T": (16, 2.4),
    "MHLA-VLT-S": (27, 4.6),
    "DeiT-T, softmax": (5.7, 1.1),
    "DeiT-S, softmax": (22, 4.2),
    "DeiT-T, MHLA": (5.7, 1.1),
    "DeiT-S, MHLA": (22, 4.2),
}
"""Models of the paper's Table 2, at 224 pixels and 1,000 classes → million parameters and giga multiply-adds there."""


class Counts(NamedTuple):
    """Of a model and one image."""

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


@cache
def paper_counts(name: str) -> Counts:
    """Counts of one of :data:`PAPER`."""
    model, _, attention = name.partition(", ")
    with torch.device("meta"):
        if model.startswith("MHLA-VLT"):
            config = VLTConfig.vlt_t() if model.endswith("T") else VLTConfig.vlt_s()
            return count(VLTForImageClassification(config), 224, 224)
        deit = PooledViTConfig.deit_t() if model.endswith("T") else PooledViTConfig.deit_s()
        built = PooledViTForImageClassification(deit)
        if attention == "MHLA":  # 16 blocks, one matrix for all heads, a convolution of 3 (paper, Appendix E)
            apply_mhla(built, MHLAConfig(blocks=(4, 4), convolution=3))
        return count(built, 224, 224)


def table() -> str:
    """Counts of the paper's models in Markdown."""
    rows = [
        "| model | parameters, M | paper | multiply-adds of weights, G | paper | of attention besides, G |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, (million_parameters, giga_macs) in PAPER.items():
        counts = paper_counts(name)
        rows.append(
            f"| {name} | {counts.parameters / 1e6:.2f} | {million_parameters} | {counts.weight_macs / 1e9:.3f} | "
            f"{giga_macs} | {counts.attention_macs / 1e9:.3f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
