"""``mhla bench transformer`` of vision models."""

import pytest
import torch
from transformers import PreTrainedModel

from mhla_diffusers.benchmark.cases import Case, choose_cases, models
from mhla_diffusers.benchmark.counts import count_forward
from mhla_diffusers.benchmark.forward import LINEAR_KINDS, TRAINING_STEP, patch_settings
from mhla_diffusers.benchmark.measure import table_of
from mhla_diffusers.benchmark.operator import MHLA, PLAIN, SPARSE
from mhla_diffusers.families import families
from mhla_diffusers.models import PooledViTConfig

from ..benchmark.commands import bench, measure, medians
from ..paper_models.test_counts import paper_counts

META = torch.device("meta")
MODELS = [model.name for family in families() if family.kind == "vision" for model in family.models]


def test_what_is_measured_is_the_papers_model():
    """Multiply-adds of a forward of one picture of 224 pixels, and parameters."""
    case, expected = Case(models()["deit-s-16"], 224, 224), paper_counts("DeiT-S, softmax")
    assert sum(count_forward(case).values()) == 2 * (expected.weight_macs + expected.attention_macs)
    assert sum(weight.numel() for weight in case.build(META, torch.float32).parameters()) == expected.parameters


@pytest.mark.parametrize("name", MODELS)
def test_models_are_counted_without_weights(name):
    (case,) = choose_cases([name], smallest=True, layers=1)
    configs = [case.family.complete(patch_settings(kind, case.model.blocks)) for kind in (MHLA, SPARSE)]
    softmax, mhla, sparse = (sum(count_forward(case, config).values()) for config in (None, *configs))
    assert 0 < mhla < softmax and sparse > 0
    other = {"deit-t-16": PooledViTConfig.deit_t, "deit-s-16": PooledViTConfig.deit_s}.get(name)
    if other is not None:
        (case,) = choose_cases([name], smallest=True)
        assert case.build(META, torch.float32).config.to_diff_dict() == other().to_diff_dict()


def test_every_attention_has_a_row_and_a_throughput(tmp_path):
    options = ("--model", "tiny-pooled-vit", "--size", "32", "--size", "64x64", "--batch", 2)
    rows = measure(tmp_path, "transformer", *options)
    for side in (32, 64):
        found = {row.variant: row for row in rows if row.case == f"tiny-pooled-vit {side}x{side}, batch 2"}
        times = {name for name, row in found.items() if row.median}
        assert {"softmax native", "softmax math", *LINEAR_KINDS, SPARSE} <= times
        assert found["softmax cudnn"].status == "absent"
        assert found["softmax native"].baseline and not found[MHLA].baseline
        assert (found[MHLA].batch, found[MHLA].stage) == (2, "forward")
        assert 0 < found[PLAIN].flops <= found[MHLA].flops < found["softmax native"].flops
    header, _ = table_of(rows)
    assert "samples/s" in header


def test_a_step_of_every_attention_with_checkpointing(tmp_path, monkeypatch):
    checkpointed = []
    enable = PreTrainedModel.activation_checkpointing_enable

    def watched(model):
        enable(model)
        checkpointed.append(model.is_activation_checkpointing)

    monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", watched)
    rows = measure(tmp_path, "transformer", "--train", "--model", "tiny-pooled-vit", "--checkpointing")
    assert {"softmax native", PLAIN, MHLA, SPARSE} <= set(medians(rows, TRAINING_STEP))
    assert checkpointed and all(checkpointed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("transformer", "--model", "deit"), "'deit'; .*deit-t-16"),
        (("transformer", "--model", "deit-t-16", "--size", "200"), "height=200 .* 16 .*192 and 208"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        bench(*options, "--device", "cpu", "--output", tmp_path)
