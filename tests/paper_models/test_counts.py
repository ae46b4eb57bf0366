"""Parameters and multiply-adds beside those of the paper's Table 2, and by hand."""

from functools import cache
from pathlib import Path

import pytest
import torch

from mhla_diffusers import apply_mhla
from mhla_diffusers.attention.costs import AttentionSizes
from mhla_diffusers.models import PooledViTConfig, PooledViTForImageClassification, VLTConfig, VLTForImageClassification
from mhla_diffusers.models.counts import count

from .shared import tiny_config, tiny_vlt

PAPER = {
    "MHLA-VLT-T": (16, 2.4),
    "MHLA-VLT-S": (27, 4.6),
    "DeiT-T, softmax": (5.7, 1.1),
    "DeiT-S, softmax": (22, 4.2),
    "DeiT-T, MHLA": (5.7, 1.1),
    "DeiT-S, MHLA": (22, 4.2),
}
"""Models at 224 pixels and 1,000 classes → million parameters and giga multiply-adds in the paper."""


@cache
def paper_counts(name):
    """Counts of one of the paper's models; DeiT's MHLA is that of Appendix E."""
    model, _, attention = name.partition(", ")
    size = model[-1].lower()
    with torch.device("meta"):
        if model.startswith("MHLA-VLT"):
            return count(VLTForImageClassification(getattr(VLTConfig, f"vlt_{size}")()), 224, 224)
        built = PooledViTForImageClassification(getattr(PooledViTConfig, f"deit_{size}")())
        if attention == "MHLA":
            apply_mhla(built, blocks=(4, 4), convolution=3)
        return count(built, 224, 224)


@pytest.mark.parametrize("name", PAPER)
def test_counts_are_those_of_the_paper(name):
    """As near as its two digits are: 16.45 M stands there as 16 M, and 1.07 G as 1.1 G."""
    counts, (million_parameters, giga_macs) = paper_counts(name), PAPER[name]
    near = {"MHLA-VLT-T": (0.03, 0.02), "DeiT-T, softmax": (0.02, 0.03), "DeiT-T, MHLA": (0.02, 0.03)}
    parameters, macs = near.get(name, (0.02, 0.02))
    assert counts.parameters / 1e6 == pytest.approx(million_parameters, rel=parameters)
    assert counts.weight_macs / 1e9 == pytest.approx(giga_macs, rel=macs)


@pytest.mark.parametrize("name", PAPER)
def test_the_page_on_classification_holds_these_counts(name):
    page = (Path(__file__).parents[2] / "docs" / "classify.md").read_text()
    (row,) = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| {name} |")]
    parameters, macs, attention = paper_counts(name)
    shown = f"{parameters / 1e6:.2f}", f"{macs / 1e9:.3f}", f"{attention / 1e9:.3f}"
    assert (row[1], row[3], row[5]) == shown


def test_multiply_adds_of_attention_are_those_of_its_sizes():
    """VLT-T has two layers of MHLA in each of two stages, six and two layers of softmax attention."""
    linear = [AttentionSizes(56**2, 1, 64, 49), AttentionSizes(28**2, 2, 64, 16)]
    softmax = [6 * AttentionSizes(14**2, 4, 64).softmax_flops, 2 * AttentionSizes(7**2, 8, 64).softmax_flops]
    macs = sum(sizes.flops for sizes in linear) + sum(softmax) // 2
    sums_of_keys = 2 * sum(sizes.tokens * sizes.heads * sizes.head_dim for sizes in linear)
    assert paper_counts("MHLA-VLT-T").attention_macs == macs - sums_of_keys


def test_multiply_adds_of_weights_by_hand():
    """A stem, one layer of one stage, and the head, at 16 pixels: 4 x 4 tokens of 8 channels."""
    settings = {"hidden_sizes": (8,), "depths": (1,), "num_attention_heads": (2,), "head_size": 32}
    model = VLTForImageClassification(tiny_config(mhla=[{"blocks": [2, 2]}], **settings))
    stem = 9 * (3 * 4 * 64 + 2 * 4 * 4 * 64 + 4 * 8 * 16)
    layer = 16 * (9 * 8 + 5 * 64 + 25 * 8 + 2 * 8 * 28 + 9 * 28)
    assert count(model, 16, 16).weight_macs == stem + layer + 16 * 8 * 32 + 32 * 5


def test_mhla_adds_next_to_nothing_to_deit():
    channels = 192
    before, after = (paper_counts(f"DeiT-T, {kind}") for kind in ("softmax", "MHLA"))
    # a mixing matrix for all heads, and a convolution with a bias
    assert after.parameters - before.parameters == 12 * (16**2 + 10 * channels)
    assert after.weight_macs - before.weight_macs == 12 * 196 * 9 * channels
    assert after.attention_macs < before.attention_macs


def test_sparse_attention_is_counted_and_the_model_is_left_as_it_is():
    model = tiny_vlt(mhla=[{"density": 0.05}, None, None, None]).train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    sparse, softmax = count(model, 256, 256), count(tiny_vlt(mhla=[None] * 4), 256, 256)
    assert 0 < sparse.attention_macs < softmax.attention_macs and sparse.weight_macs == softmax.weight_macs
    assert sparse.parameters == softmax.parameters
    assert model.training and all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
