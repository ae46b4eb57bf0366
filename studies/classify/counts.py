"""Count parameters and multiply-adds of the paper's classifiers at 224 pixels, beside its Table 2.

    python studies/classify/counts.py          # seconds; writes counts.md and counts.csv

The paper's FLOPs are multiply-adds of weights only: DeiT-S has 4.2 G in projections, feed-forwards and patches, and
with the products of softmax attention 4.6 G. Both are counted here.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pooled_vit import deit
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from vlt import vlt_s, vlt_t

from mhla_diffusers import apply_mhla
from studies.tables import write_table

WEIGHTS = ("aten.addmm", "aten.mm", "aten.convolution")
"""Operators that multiply an input with weights; others multiply what attention has made of it."""


class Counts(NamedTuple):
    """Counts of a model and one image."""

    parameters: int
    weight_macs: int
    """Multiply-adds of projections, feed-forwards and convolutions."""
    attention_macs: int
    """Multiply-adds between queries, keys, values and KV states."""


def count(model: nn.Module, size: int) -> Counts:
    """Count a classifier's parameters, and the multiply-adds of a forward, operator by operator on the meta device.

    Args:
        model: takes pixels of three channels.
        size: height and width of the image in pixels.
    """
    model = model.to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    flops = {str(operator): found for operator, found in counter.get_flop_counts()["Global"].items()}
    of_weights = sum(flops.get(operator, 0) for operator in WEIGHTS)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Counts(parameters, of_weights // 2, (sum(flops.values()) - of_weights) // 2)


def with_mhla(model: nn.Module) -> nn.Module:
    """Patch DeiT as in the paper's Appendix E."""
    return apply_mhla(model, blocks=(4, 4), convolution=3)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "MHLA-VLT-T": (vlt_t, "16", "2.4"),
    "MHLA-VLT-S": (vlt_s, "27", "4.6"),
    "DeiT-T, softmax": (lambda: deit(192, 3), "5.7", "1.1"),
    "DeiT-S, softmax": (lambda: deit(384, 6), "22", "4.2"),
    "DeiT-T, MHLA": (lambda: with_mhla(deit(192, 3)), "5.7", "1.1"),
    "DeiT-S, MHLA": (lambda: with_mhla(deit(384, 6)), "22", "4.2"),
}
"""Name → what builds it; million parameters and giga multiply-adds in the paper."""


def main() -> None:
    """Write and print the table."""
    rows = []
    for name, (build, million, giga) in MODELS.items():
        parameters, weights, attention = count(build(), 224)
        rows.append([name, f"{parameters / 1e6:.2f}", million, f"{weights / 1e9:.3f}", giga, f"{attention / 1e9:.3f}"])
    header = ["model", "parameters, M", "paper", "multiply-adds of weights, G", "paper", "of attention besides, G"]
    sys.stdout.write(write_table(header, rows, Path(__file__).parent, "counts"))


if __name__ == "__main__":
    main()
