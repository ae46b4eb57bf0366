"""What a patch costs, layer by layer, head by head and step by step."""

import json

import pytest
import torch
from diffusers import SanaPAGPipeline

import mhla_diffusers as mhla
from mhla_diffusers import SparseConfig
from mhla_diffusers.attention import SparseCall, with_lists
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.sparse import key_block_of_tokens
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.families import get_family

from . import models
from .evaluation.pictures import mhla as command
from .families.cases import footprint
from .pipelines import PIPELINES, generate, quiet, sana_pipeline, wan22_pipeline
from .refusals import refused

NAMES = ["wan_vace", "sana", "dit"]
SPARSE = NOTHING_DENSE | {"block_size": 4}


def audited(name, **settings):
    model = mhla.apply_mhla(models.FAMILIES[name].build(), **(settings or {"blocks": models.FAMILIES[name].blocks}))
    return model, mhla.audit(model, lambda: models.output(model, models.inputs(name)))


def handed_on(model, name):
    """What the first self-attention hands to its output projection: its name, and (B, N, H, D)."""
    (layer, attn), found = next(iter(get_family(model).self_attentions(model).items())), []
    with attn.to_out[0].register_forward_pre_hook(
        lambda _, args: found.append(args[0].unflatten(-1, (attn.heads, -1)))
    ):
        models.output(model, models.inputs(name))
    return layer, found[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_layers_error_is_what_its_heads_hand_on(name):
    """Later layers get other inputs without the patch, so only the first can be compared from outside."""
    model, found = audited(name)
    with mhla.mhla_disabled(model):
        layer, before = handed_on(model, name)
    _, patched = handed_on(model, name)
    expected = (patched - before).square().sum(dim=(0, 1, 3)) / before.square().sum(dim=(0, 1, 3))
    first = found.layers[0]
    assert first.name == layer
    torch.testing.assert_close(first.errors_of_heads.float(), expected.sqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_moves_are_what_single_layers_and_the_whole_patch_change_and_the_model_is_left_as_it_was(name):
    model = models.patched(name)
    run = lambda: models.output(model, models.inputs(name))  # noqa: E731
    before, expected = footprint(model), run()
    found = mhla.audit(model, run)
    assert footprint(model) == before
    assert torch.equal(run(), expected)
    original = models.output(models.FAMILIES[name].build(), models.inputs(name))
    for index, layer in enumerate(found.layers):
        alone = models.output(models.patched(name, layers=[index]), models.inputs(name))
        assert layer.moves == pytest.approx(models.relative_change(alone, original) ** 2, rel=1e-4)
    assert found.moves == pytest.approx(models.relative_change(expected, original) ** 2, rel=1e-4)


@pytest.mark.parametrize("far", ["second-order", "means"])
def test_mass_is_the_softmax_weight_of_the_listed_pairs(far):
    """With all queries looked at the measured weight is the whole truth."""
    model, found = audited("dit", **SPARSE, density=0.2, far=far)
    attn, family = model.transformer_blocks[0].attn1, get_family(model)
    rule = SparseConfig(**SPARSE, density=0.2).rule_on((8, 8))
    weights = {}

    def note(_, args):
        given = family.mhla.read(attn, {"hidden_states": args[0]}, (8, 8))
        query, key = given.query, given.key
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        tensors = {"query": query, "key": key, "value": given.value, "key_mask": given.key_mask}
        call = with_lists(SparseCall(**tensors, grid=given.grid, sparse=rule, far=far))
        of_queries = call.sparse.mask()[:, :, layout_of(given.grid, 4).rows.long() // 4]
        members = key_block_of_tokens(call, call.sparse)[:, :, None].expand_as(logits)
        weights["kept"] = (logits.softmax(dim=-1) * of_queries.gather(-1, members)).sum(dim=-1).mean()

    handle = attn.register_forward_pre_hook(note)
    models.output(model, models.inputs("dit"))
    handle.remove()
    first = found.layers[0]
    assert first.mass_kept == pytest.approx(float(weights["kept"]), rel=1e-4)
    assert first.density == pytest.approx(3 / 16)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_tells_its_steps(name):
    case = PIPELINES[name]
    pipe = mhla.apply_mhla(case.build(), blocks=case.blocks, dense_first=1)
    found = mhla.audit(pipe, lambda: generate(name, pipe))
    steps = case.call["num_inference_steps"]
    assert found.knows_steps
    by_steps = torch.stack([layer.errors_of_steps for layer in found.layers])
    assert by_steps.shape[1] == steps
    assert (by_steps[:, 0][~by_steps[:, 0].isnan()] == 0).all()
    assert (by_steps[:, 1:][~by_steps[:, 1:].isnan()] > 0).all()
    assert str(found).split("\n\n")[1].splitlines()[1].split() == ["1", "dense"] and "nan" not in str(found)


def test_both_transformers_are_audited_each_in_its_steps():
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    found = mhla.audit(pipe, lambda: generate("wan22", pipe))
    assert [layer.name for layer in found.layers[::4]] == ["transformer.blocks.0.attn1", "transformer_2.blocks.0.attn1"]
    ran = torch.stack([layer.errors_of_steps for layer in found.layers]).isnan().logical_not()
    assert torch.equal(ran[0], ~ran[4]) and ran.any(dim=1).all(), "each step has one transformer"
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert written["layers"][0]["error"] == found.layers[0].error
    assert None in written["layers"][0]["errors_of_steps"]


def test_a_layer_that_guidance_perturbs_runs_no_mhla_and_is_named():
    components = sana_pipeline(mhla.apply_mhla(models.sana(), blocks=(1, 1))).components
    pipe = quiet(SanaPAGPipeline(**components, pag_applied_layers=["transformer_blocks.1"]))
    call = {**PIPELINES["sana"].call, "pag_scale": 3.0, "generator": torch.Generator().manual_seed(3)}
    with refused("transformer_blocks.1.attn1 (1 of 3"):
        mhla.audit(pipe, lambda: pipe(**call))


def test_forwards_without_steps_are_numbered():
    model = models.patched("dit")
    found = mhla.audit(model, lambda: [models.output(model, models.inputs("dit", seed=seed)) for seed in (1, 2)])
    assert not found.knows_steps and len(found.layers[0].errors_of_steps) == 2
    assert "forward  error" in str(found)


def test_a_compiled_model_is_audited():
    model = mhla.apply_mhla(models.dit(num_layers=1), blocks=(4, 2))
    compiled = torch.compile(model, backend="eager")
    models.output(compiled, models.inputs("dit"))
    found = mhla.audit(model, lambda: models.output(compiled, models.inputs("dit")))
    expected = mhla.audit(model, lambda: models.output(model, models.inputs("dit")))
    assert [layer.error for layer in found.layers] == [layer.error for layer in expected.layers]


def test_what_cannot_be_audited_is_refused():
    with refused("not patched"):
        mhla.audit(models.wan(), lambda: None)
    with refused("Linear has no family"):
        mhla.audit(mhla.apply_mhla(torch.nn.Linear(2, 2), grid=(4, 4)), lambda: None)
    model, arguments = models.patched("wan"), models.inputs("wan")
    with refused("run()"):
        mhla.audit(model, lambda: None)
    with mhla.mhla_disabled(model), refused("mhla_disabled()"):
        mhla.audit(model, lambda: None)
    arguments["hidden_states"] = arguments["hidden_states"] * float("nan")
    with refused("blocks.0.attn1"):
        mhla.audit(model, lambda: model(**arguments))
    assert not any(len(attn._forward_hooks) for attn in model.modules() if hasattr(attn, "to_out"))


def test_the_command_prints_and_writes(tmp_path):
    pytest.importorskip("matplotlib")
    asked = ("--patch", "fast", "--change", "dense_first=0", "--set", "num_inference_steps=2")
    shown = command("audit", "dit", "seven", *asked, "--output", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in ("worst head", "mass kept", "together the patch moves", "audit.png"))
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert len(written["layers"][0]["errors_of_steps"]) == 2
    assert (tmp_path / "out" / "audit.png").stat().st_size > 5000


def test_the_command_refuses_what_cannot_be(tmp_path):
    for more, message in (((), "--patch"), (("--patch", "sana-0.6b"), "'sana'")):
        shown = command("audit", "dit", "seven", *more, "--output", tmp_path / "out")
        assert message in str(shown.exception) and not (tmp_path / "out").exists()
