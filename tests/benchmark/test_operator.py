"""``mhla bench op``: costs, what is timed, and that it is right before it is timed."""

from dataclasses import replace

import pytest
import torch

from mhla_diffusers.attention import SparseCall
from mhla_diffusers.benchmark import correctness
from mhla_diffusers.benchmark.cases import choose_cases
from mhla_diffusers.benchmark.correctness import operator_errors, too_large
from mhla_diffusers.benchmark.operator import SPARSE
from mhla_diffusers.config import MHLAConfig

from ..refusals import refused
from .commands import measure, medians

CPU = torch.device("cpu")
SMALL = ("--model", "tiny-wan")


def shape_of(model, size):
    (case,) = choose_cases(model, size)
    return case.shape


def test_costs_are_those_of_the_paper():
    """Sec. 5.3: N = 31 500, D = 128, M = 105: mixing is about a sixth more arithmetic, and softmax 123 times plain."""
    shape = shape_of("wan2.1-1.3b", "480x800")
    plain, mixed = (shape.sizes(MHLAConfig(blocks=blocks)) for blocks in ((1, 1, 1), shape.blocks))
    assert (shape.tokens, shape.blocks) == (31_500, (7, 3, 5))
    assert mixed.flops / plain.flops == pytest.approx(1 + 105**2 / (2 * 31_500))
    assert mixed.softmax_flops / plain.flops == pytest.approx(31_500**2 / (31_500 * 129))
    # 98 of 985 blocks of keys are listed, each has a mean, and 493 blocks of queries mix the states of 124 stretches
    listed = mixed.softmax_flops * 98 / 985
    means, states = 4 * shape.tokens * 985 * 128, (4 * shape.tokens + 2 * 493 * 124) * 128**2
    assert shape.sizes(shape.sparse).flops == pytest.approx(listed + 12 * (means + states))
    assert shape_of("sana-1.6b", "1024").sparse is None, "SANA's own attention is linear"


def test_every_variant_has_a_row(tmp_path):
    rows = measure(tmp_path, "op", "--model", "tiny-wan")
    for stage in ("forward", "forward+backward"):
        measured = set(medians(rows, stage))
        assert {"MHLA eager", f"{SPARSE} eager", "plain linear eager", "softmax flash"} <= measured
    absent = {row.variant: row.reason for row in rows if not row.median}
    gpu_only = ("softmax cudnn", "softmax flash-attn", "softmax FlashAttention-3", "MHLA triton")
    assert all(absent[name] for name in gpu_only)
    assert {row.variant.split()[0] for row in rows if row.baseline} == {"softmax"}
    forward, backward = (row for row in rows if row.variant == "MHLA eager")
    assert (forward.tokens, backward.flops) == (576, 3 * forward.flops)


@pytest.mark.parametrize(("wrong", "kind"), [("output", "MHLA"), ("query", "sparse")])
def test_a_wrong_attention_is_not_timed(monkeypatch, tmp_path, wrong, kind):
    """The output, or the gradient of the query alone."""
    right = correctness.attend

    def attend_wrongly(call, backend):
        if isinstance(call, SparseCall) != (kind == "sparse"):
            return right(call, backend)
        twice = 2 * call.query - call.query.detach()  # the right value and a doubled gradient
        return right(replace(call, query=twice), backend) if wrong == "query" else 1.1 * right(call, backend)

    monkeypatch.setattr(correctness, "attend", attend_wrongly)
    with refused(f"{kind} eager ", wrong):
        measure(tmp_path, "op", *SMALL)
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_passes_at_the_blocks_of_real_models(dtype):
    errors = operator_errors(replace(shape_of("dit-xl-2", "1024"), head_dim=16), CPU, dtype)
    assert len(errors) == 9 and not too_large(errors, dtype)
