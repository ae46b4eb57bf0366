"""Processors that something else sets on patched attentions: guidance, a reset, layer skipping, backends."""

import logging

import pytest
import torch
from diffusers import LayerSkipConfig, SanaPAGPipeline, apply_layer_skip
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import mhla_diffusers as mhla

from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import PIPELINES, quiet, sana_pipeline
from .shared import assert_equal_up_to_order


def pag_pipeline(transformer):
    components = sana_pipeline(transformer).components
    return quiet(SanaPAGPipeline(**components, pag_applied_layers=["transformer_blocks.1"]))


@pytest.mark.parametrize("guidance", [4.5, 1.0], ids=["with guidance", "without"])
def test_perturbed_attention_guidance_keeps_mhla_in_the_branches_that_are_not_perturbed(guidance):
    """At a scale of nearly nothing the patched pipeline gives what it gives without PAG; at 3 it does not."""
    pipe = pag_pipeline(patched("sana"))
    call = PIPELINES["sana"].call | {"guidance_scale": guidance}

    def run(**settings):
        return pipe(**(call | settings), generator=torch.Generator().manual_seed(3)).images

    without = run(pag_scale=0.0)
    assert_equal_up_to_order(run(pag_scale=1e-9), without)
    assert_changed(run(pag_scale=3.0), without)
    assert all(isinstance(attn.processor, mhla.MHLAProcessor) for attn in self_attentions(pipe.transformer))
    assert torch.equal(run(pag_scale=0.0), without)
    mhla.remove_mhla(pipe)
    assert_changed(run(pag_scale=1e-9), without)


def self_attentions(model):
    return [module for path, module in model.named_modules() if path.endswith("attn1")]


def test_perturbed_attention_perturbs_as_diffusers_does():
    """With one block MHLA is SANA's own attention, up to the floor of its normaliser, and so is guidance with it."""
    images = []
    for blocks in (None, (1, 1)):
        transformer = FAMILIES["sana"].build()
        if blocks is not None:
            mhla.apply_mhla(transformer, blocks=blocks, eps=1e-12)
        call = PIPELINES["sana"].call | {"num_inference_steps": 1, "output_type": "latent"}
        pipe = pag_pipeline(transformer)
        images.append(pipe(**call, pag_scale=3.0, generator=torch.Generator().manual_seed(3)).images)
    difference = (images[0] - images[1]).norm() / images[0].norm()
    # dead queries, of which SANA's ReLU leaves 0 and MHLA the mean
    assert difference < 0.05


def test_describe_tells_what_really_runs():
    model = patched("wan", layers=[1, 2])
    assert [layer.runs_mhla for layer in mhla.describe(model)] == [False, True, True, False]
    with mhla.mhla_disabled(model):
        found = mhla.describe(model)
        assert [(layer.replaced, layer.runs_mhla, layer.processor) for layer in found[:2]] == [
            (False, False, "WanAttnProcessor"),
            (True, False, "WanAttnProcessor"),
        ]
        assert "blocks.1.attn1  off: WanAttnProcessor" in str(found)
        assert str(found).endswith("MHLA does not run in 2 of them now")
    assert "off" not in str(mhla.describe(model))
    model.set_attn_processor(WanAttnProcessor())
    assert str(mhla.describe(model)).endswith("MHLA does not run in 2 of them now")


def test_one_warning_at_the_next_forward_after_a_reset(caplog):
    model = patched("wan")
    saved = model.attn_processors
    output(model, inputs("wan"))
    with mhla.mhla_disabled(model):
        output(model, inputs("wan"))
    assert not caplog.records
    model.set_attn_processor(WanAttnProcessor())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            output(model, inputs("wan"))
    (record,) = caplog.records
    assert "4 patched layers do not run MHLA, for example blocks.0.attn1, which runs WanAttnProcessor" in record.message
    model.set_attn_processor(saved)
    output(model, inputs("wan"))
    model.set_attn_processor(WanAttnProcessor())
    output(model, inputs("wan"))
    assert len(caplog.records) == 2


def test_measuring_layers_warns_of_nothing(caplog):
    model = patched("wan")
    mhla.layer_sensitivity(model, lambda: output(model, inputs("wan")))
    assert not caplog.records


SKIPPED = {
    "attention": {"skip_attention": True, "skip_ff": False},
    "block": {"skip_attention": True, "skip_ff": True},
    "scores, as guidance by perturbed attention": {
        "skip_attention": False,
        "skip_ff": False,
        "skip_attention_scores": True,
    },
}


@pytest.mark.parametrize("what", SKIPPED)
def test_a_patched_layer_is_skipped_as_an_unpatched_one(what):
    """DiT, since diffusers skips the attention of no other family here; the one layer that is patched is skipped."""
    model, reference = patched("dit", layers=[1]), FAMILIES["dit"].build()
    for one in (model, reference):
        apply_layer_skip(one, LayerSkipConfig(indices=[1], fqn="transformer_blocks", **SKIPPED[what]))
    skipped = output(model, inputs("dit"))
    assert_equal_up_to_order(skipped, output(reference, inputs("dit")))
    assert_changed(skipped, output(patched("dit", layers=[1]), inputs("dit")))


@pytest.mark.parametrize(
    ("name", "what"),
    # diffusers knows no blocks of SANA
    [(name, what) for name in ("wan", "sana") for what in SKIPPED if (name, what) != ("sana", "block")],
)
def test_patched_layers_of_other_families_are_skipped_too(name, what):
    model = patched(name)
    before = output(model, inputs(name))
    list_name = "blocks" if name == "wan" else "transformer_blocks"
    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn=list_name, **SKIPPED[what]))
    assert_changed(output(model, inputs(name)), before)


@pytest.mark.parametrize("form", ["apply_mhla", "diffusers' own form"])
def test_an_attention_backend_set_while_patched_stays_after_removal(form):
    model = FAMILIES["wan"].build()
    if form == "apply_mhla":
        mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3), layers=[0, 1])
    else:
        model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3)))
        output(model, inputs("wan"))
    model.set_attention_backend("_native_math")
    with mhla.mhla_disabled(model):
        assert {attn.processor._attention_backend for attn in self_attentions(model)} == {"_native_math"}
    mhla.remove_mhla(model)
    backends = {path: processor._attention_backend for path, processor in model.attn_processors.items()}
    assert set(backends.values()) == {AttentionBackendName._NATIVE_MATH}


def test_an_attention_backend_set_before_the_patch_stays_too():
    model = FAMILIES["wan"].build()
    model.set_attention_backend("_native_math")
    mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3))
    mhla.remove_mhla(model)
    assert {processor._attention_backend for processor in model.attn_processors.values()} == {"_native_math"}
    mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3))
    model.reset_attention_backend()
    mhla.remove_mhla(model)
    assert {processor._attention_backend for processor in model.attn_processors.values()} == {None}


def test_guidance_that_was_interrupted_does_not_perturb_the_next_call():
    """diffusers' own processors are left behind then too, and fail by the number of parts."""
    model = patched("sana")
    pipe = pag_pipeline(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(**PIPELINES["sana"].call, pag_scale=3.0, callback_on_step_end=interrupt)
    with pytest.raises(ValueError, match="batch of 3 parts, but got 2 samples.*change_mhla"):
        output(model, inputs("sana"))
    mhla.change_mhla(model)
    assert torch.equal(output(model, inputs("sana")), output(patched("sana"), inputs("sana")))
