"""``mhla bench transformer`` and ``mhla bench train`` of vision models: those that a patch changes, and VLT."""

import pytest
import torch
from transformers import PreTrainedModel

from mhla_diffusers import SparseConfig, mhla_layers
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError
from mhla_diffusers.benchmark.measure import table_of
from mhla_diffusers.benchmark.models import Size, choose_sizes, models
from mhla_diffusers.benchmark.operation import PLAIN, SPARSE
from mhla_diffusers.benchmark.transformer import (
    CLASSIFIERS,
    LINEAR_KINDS,
    MHLA,
    TRAINING_STEP,
    Case,
    Choice,
    ClassifierCase,
)
from mhla_diffusers.families import families
from mhla_diffusers.models import PooledViTConfig
from mhla_diffusers.patching import layer

from ..benchmark.commands import bench, measure, medians
from ..paper_models.test_counts import paper_counts

CPU = torch.device("cpu")
BOTH = ("--model", "tiny-pooled-vit", "--model", "tiny-vlt")
OF_PATCHES = [model for family in families() if family.kind == "vision" for model in family.models]


@pytest.mark.parametrize(
    ("model", "kind", "paper"),
    [(models()["deit-s-16"], "softmax", "DeiT-S, softmax"), (CLASSIFIERS["vlt-t"], MHLA, "MHLA-VLT-T")],
)
def test_what_is_measured_are_the_papers_models(model, kind, paper):
    """Multiply-adds of a forward of one picture of 224 pixels, and parameters."""
    of_class = ClassifierCase if model.name in CLASSIFIERS else Case
    case = of_class(model, Size(224, 224, None), None, CPU, torch.float32)
    expected = paper_counts(paper)
    assert case.flops(Choice(kind, kind)) == 2 * (expected.weight_macs + expected.attention_macs)
    assert sum(weight.numel() for weight in case.build(torch.device("meta")).parameters()) == expected.parameters


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_table_of_classifiers_says_what_their_first_stage_is(name):
    model = CLASSIFIERS[name]
    config = ClassifierCase(model, Size(64, 64, None), None, CPU, torch.float32).config(MHLA)
    first = config.num_attention_heads[0], config.hidden_sizes[0] // config.num_attention_heads[0]
    assert (model.heads, model.head_dim, model.layers) == (*first, sum(config.depths))
    assert list(model.blocks) == config.mhla[0]["blocks"]


@pytest.mark.parametrize("model", OF_PATCHES, ids=lambda model: model.name)
def test_models_of_families_are_counted_without_weights(model):
    (size,) = choose_sizes(model, None, None, "cpu")
    case = Case(model, size, 1, CPU, torch.float32)
    softmax, mhla, sparse = (case.flops(Choice(kind, kind)) for kind in ("softmax", MHLA, SPARSE))
    assert 0 < mhla < softmax and sparse > 0
    other = {"deit-t-16": PooledViTConfig.deit_t, "deit-s-16": PooledViTConfig.deit_s}.get(model.name)
    if other is not None:
        found = Case(model, size, None, CPU, torch.float32).build(torch.device("meta")).config
        assert found.to_diff_dict() == other().to_diff_dict()


def test_every_attention_has_a_row_and_a_throughput(tmp_path):
    rows = measure(tmp_path, "transformer", *BOTH, "--size", "32", "--size", "64x64", "--batch", 2)
    found = {(row.case, row.variant): row for row in rows}
    for side in (32, 64):
        for name in ("tiny-pooled-vit", "tiny-vlt"):
            case = f"{name} {side}x{side}, batch 2"
            measured = {row.variant: row for row in rows if row.case == case and row.median}
            kinds = LINEAR_KINDS if name == "tiny-pooled-vit" else (PLAIN, MHLA)
            assert {"softmax native", "softmax math", *kinds, SPARSE} <= set(measured)
            assert found[case, "softmax cudnn"].status == "absent"
            assert measured["softmax native"].baseline and not measured[MHLA].baseline
            assert (measured[MHLA].batch, measured[MHLA].stage) == (2, "forward")
            assert 0 < measured[PLAIN].flops <= measured[MHLA].flops < measured["softmax native"].flops
    assert "4 and 4 blocks" in found["tiny-vlt 64x64, batch 2", MHLA].reason
    header, _ = table_of(rows)
    assert "samples/s" in header


def test_a_step_of_every_attention_with_checkpointing(tmp_path, monkeypatch):
    asked = []
    enable = PreTrainedModel.activation_checkpointing_enable

    def watched(model):
        enable(model)
        asked.append((type(model).__name__, model.is_activation_checkpointing))

    monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", watched)
    rows = measure(tmp_path, "transformer", "--train", *BOTH, "--checkpointing")
    assert {"softmax native", PLAIN, "MHLA", SPARSE} <= set(medians(rows, TRAINING_STEP))
    assert set(asked) == {("PooledViTForImageClassification", True), ("VLTForImageClassification", True)}


def test_variants_of_vlt_differ_in_their_mhla_alone():
    case = ClassifierCase(CLASSIFIERS["tiny-vlt"], Size(64, 64, None), None, CPU, torch.bfloat16)
    model = case.build()
    weights = {name: parameter for name, parameter in model.named_parameters() if ".mhla." not in name}
    blocks = {"softmax": [], PLAIN: [(1, 1)] * 2, "MHLA": [(2, 2)] * 2, SPARSE: [None] * 2}
    for kind, expected in blocks.items():
        variant = case.variant(model, Choice(kind, kind))
        own = dict(variant.named_parameters())
        assert all(own[name] is parameter for name, parameter in weights.items())
        configs = [layer.config for layer in mhla_layers(variant).values()]
        assert [getattr(one, "blocks", None) for one in configs] == expected
        assert all(isinstance(one, SparseConfig) for one in configs) == (kind == SPARSE or not expected)
        assert {own[name].dtype for name in own if "mixing" in name} <= {torch.float32}
        assert {parameter.dtype for name, parameter in own.items() if "proj" in name} == {torch.bfloat16}


def test_wrong_built_in_attention_is_not_timed(tmp_path, monkeypatch):
    right = layer.attend
    monkeypatch.setattr(layer, "attend", lambda call, backend: 1.1 * right(call, backend))
    with pytest.raises(IncorrectAttentionError, match="patched layers"):
        measure(tmp_path, "transformer", "--model", "tiny-vlt")
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("transformer", "--model", "vlt-t", "--layers", 3), "layers=3: the layers of vlt-t differ"),
        (("transformer", "--model", "vlt-t", "--size", "226"), "height=226.*224 and 228"),
        (("transformer", "--model", "vlt-t", "--batch", 0), "batch=0 must be an integer above 0"),
        (("transformer", "--model", "vlt"), "Unknown model 'vlt'; the nearest names are vlt-t"),
        (("transformer", "--model", "deit-t-16", "--size", "200"), "height=200 is not divisible by 16 .*192 and 208"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        bench(*options, "--device", "cpu", "--output", tmp_path)
