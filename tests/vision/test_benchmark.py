"""``mhla bench transformer`` and ``mhla bench train`` of vision models: those that a patch changes, and VLT."""

import pytest
import torch
from transformers import PreTrainedModel

from mhla_diffusers import mhla_layers
from mhla_diffusers.benchmark.cases import CLASSIFIERS, LINEAR_KINDS, Case, Choice, ClassifierCase
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError
from mhla_diffusers.benchmark.models import Size, choose_sizes, models
from mhla_diffusers.benchmark.parts import PARTS
from mhla_diffusers.benchmark.report import draw_throughput
from mhla_diffusers.benchmark.results import CONTENT, PLAIN
from mhla_diffusers.benchmark.transformer import TRAINING_STEP
from mhla_diffusers.families import families
from mhla_diffusers.models import PooledViTConfig
from mhla_diffusers.patching import layer

from ..benchmark.commands import bench, measure, medians
from ..paper_models.test_counts import paper_counts

CPU = torch.device("cpu")
BOTH = ("--model", "tiny-pooled-vit", "--model", "tiny-vlt")
OF_PATCHES = [model for family in families() if family.kind == "vision" for model in family.models]


def whole(name, only):
    """Multiply-adds of a forward of one picture of 224 pixels by the name of its attention, and parameters."""
    if name in CLASSIFIERS:
        case = ClassifierCase(CLASSIFIERS[name], Size(224, 224, None), None, CPU, torch.float32)
    else:
        case = Case(models()[name], Size(224, 224, None), None, CPU, torch.float32)
    counts = case.count([only])
    (kind,) = counts.costs
    return counts.flops(kind) / 2, counts.weight_bytes / 4


@pytest.mark.parametrize(
    ("name", "only", "paper"),
    [("deit-s-16", "softmax native", "DeiT-S, softmax"), ("vlt-t", "MHLA", "MHLA-VLT-T")],
)
def test_what_is_measured_are_the_papers_models(name, only, paper):
    expected = paper_counts(paper)
    assert whole(name, only) == (expected.weight_macs + expected.attention_macs, expected.parameters)


@pytest.mark.parametrize("model", OF_PATCHES, ids=lambda model: model.name)
def test_models_of_families_are_counted_without_weights(model):
    (size,) = choose_sizes(model, None, None, "cpu")
    case = Case(model, size, 1, CPU, torch.float32)
    counts = case.count(["softmax native", "MHLA", CONTENT])
    assert set(counts.costs) == {"softmax", "MHLA", CONTENT}
    assert 0 < counts.flops("MHLA") < counts.flops("softmax")
    other = {"deit-t-16": PooledViTConfig.deit_t, "deit-s-16": PooledViTConfig.deit_s}.get(model.name)
    if other is not None:
        found = Case(model, size, None, CPU, torch.float32).build(torch.device("meta")).config
        assert found.to_diff_dict() == other().to_diff_dict()


def test_every_attention_has_a_row_and_a_throughput(tmp_path):
    run = measure(tmp_path, "transformer", *BOTH, "--size", "32", "--size", "64x64", "--batch", 2)
    rows = {(row.model, row.height, row.variant): row for row in run.rows if row.stage == "forward"}
    for side in (32, 64):
        patched, built_in = (
            {variant: row for (model, height, variant), row in rows.items() if (model, height) == (name, side)}
            for name in ("tiny-pooled-vit", "tiny-vlt")
        )
        assert {"softmax native", "softmax math", *LINEAR_KINDS, CONTENT} <= set(patched)
        assert {"softmax native", "softmax math", PLAIN, "MHLA", CONTENT} <= set(built_in)
        for found in (patched, built_in):
            assert found["softmax cudnn"].status == "absent"
            assert found["softmax native"].baseline and not found["MHLA"].baseline
            mhla = found["MHLA"]
            assert run.times_baseline(mhla) > 0 and mhla.samples_per_second == pytest.approx(2 / mhla.median)
            assert 0 < found[PLAIN].flops <= mhla.flops < found["softmax native"].flops
    assert {row.stage for row in run.rows if row.model == "tiny-pooled-vit"} == {
        "forward",
        *(f"part: {p}" for p in PARTS),
    }
    assert {row.stage for row in run.rows if row.model == "tiny-vlt"} == {"forward"}
    assert "4 and 4 blocks" in rows["tiny-vlt", 64, "MHLA"].reason
    header, _ = run.table(list(rows.values()))
    assert "samples/s" in header
    assert [axis.get_title(loc="left") for axis in draw_throughput(run).axes[:2]] == ["tiny-pooled-vit", "tiny-vlt"]


def test_a_step_of_every_attention_with_checkpointing(tmp_path, monkeypatch):
    asked = []
    enable = PreTrainedModel.activation_checkpointing_enable

    def watched(model):
        enable(model)
        asked.append((type(model).__name__, model.is_activation_checkpointing))

    monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", watched)
    run = measure(tmp_path, "train", *BOTH, "--checkpointing")
    assert {"softmax native", PLAIN, "MHLA", CONTENT} <= set(medians(run, TRAINING_STEP))
    assert set(asked) == {("PooledViTForImageClassification", True), ("VLTForImageClassification", True)}


def test_variants_of_vlt_differ_in_their_mhla_alone():
    case = ClassifierCase(CLASSIFIERS["tiny-vlt"], Size(64, 64, None), None, CPU, torch.bfloat16)
    model = case.build()
    weights = {name: parameter for name, parameter in model.named_parameters() if ".mhla." not in name}
    blocks = {"softmax": [], PLAIN: [(1, 1)] * 2, "MHLA": [(2, 2)] * 2, CONTENT: [(2, 2)] * 2}
    for kind, expected in blocks.items():
        variant = case.variant(model, Choice(kind, kind))
        own = dict(variant.named_parameters())
        assert all(own[name] is parameter for name, parameter in weights.items())
        layers = mhla_layers(variant).values()
        assert [one.config.blocks for one in layers] == expected
        assert all(one.config.sparse == "content" for one in layers) == (kind == CONTENT or not expected)
        assert all(one.mixing.dtype == torch.float32 for one in layers)
        assert {parameter.dtype for name, parameter in own.items() if "proj" in name} == {torch.bfloat16}


def test_wrong_built_in_attention_is_not_timed(tmp_path, monkeypatch):
    right = layer.attend
    monkeypatch.setattr(layer, "attend", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(IncorrectAttentionError, match="MHLA layers.*Nothing was timed"):
        measure(tmp_path, "transformer", "--model", "tiny-vlt")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("transformer", "--model", "vlt-t", "--layers", 3), "layers=3: the layers of vlt-t differ"),
        (("transformer", "--model", "vlt-t", "--size", "16x64"), "size=16x64 must be at least 32 pixels for vlt-t"),
        (("transformer", "--model", "vlt-t", "--batch", 0), "batch=0 must be positive"),
        (("transformer", "--model", "vlt"), "Unknown model 'vlt'; the nearest names are vlt-t"),
        (("transformer", "--model", "deit-t-16", "--size", "200"), "height=200 is not divisible by 16 .*192 and 208"),
        (("pipeline", "--model", "deit-s-16"), "'deit-s-16' is a configuration .*bench transformer --model deit-s-16"),
        (("pipeline", "--model", "vlt-s"), "'vlt-s' is a configuration .*bench transformer --model vlt-s"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        bench(*options, "--device", "cpu", "--output", tmp_path)
