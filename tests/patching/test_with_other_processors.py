"""Processors that something else sets on patched attentions: guidance, a reset, layer skipping, backends."""

import pytest
import torch
from diffusers import LayerSkipConfig, SanaPAGPipeline, apply_layer_skip
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import mhla_diffusers as mhla

from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import PIPELINES, quiet, sana_pipeline
from ..refusals import refused
from .shared import assert_equal_up_to_order


def pag_pipeline(transformer):
    components = sana_pipeline(transformer).components
    return quiet(SanaPAGPipeline(**components, pag_applied_layers=["transformer_blocks.1"]))


SKIPPED = {
    "attention": {"skip_attention": True, "skip_ff": False},
    "block": {"skip_attention": True, "skip_ff": True},
    "scores": {"skip_attention": False, "skip_ff": False, "skip_attention_scores": True},  # perturbed attention
}


@pytest.mark.parametrize(
    ("name", "what"),
    # diffusers knows no blocks of SANA
    [(name, what) for name in ("dit", "wan", "sana") for what in SKIPPED if (name, what) != ("sana", "block")],
)
def test_a_patched_layer_is_skipped_as_an_unpatched_one(name, what):
    """The layer that is patched; of other families than DiT, diffusers skips no attention that it runs itself."""
    model, list_name = patched(name, layers=[1]), "blocks" if name == "wan" else "transformer_blocks"
    settings = LayerSkipConfig(indices=[1], fqn=list_name, **SKIPPED[what])
    before = output(model, inputs(name))
    apply_layer_skip(model, settings)
    skipped = output(model, inputs(name))
    assert_changed(skipped, before)
    if name == "dit":
        reference = FAMILIES[name].build()
        apply_layer_skip(reference, settings)
        assert_equal_up_to_order(skipped, output(reference, inputs(name)))


def backends(model):
    return {processor._attention_backend for processor in model.attn_processors.values()}


@pytest.mark.parametrize("form", ["apply_mhla", "diffusers' own form"])
def test_an_attention_backend_set_while_patched_stays_after_removal(form):
    model = FAMILIES["wan"].build()
    if form == "apply_mhla":
        mhla.apply_mhla(model, blocks=(2, 2, 3), layers=[0, 1])
    else:
        model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3)))
        output(model, inputs("wan"))
    model.set_attention_backend("_native_math")
    with mhla.mhla_disabled(model):
        assert backends(model) == {"_native_math"}
    mhla.remove_mhla(model)
    assert backends(model) == {AttentionBackendName._NATIVE_MATH}


def test_an_attention_backend_set_before_the_patch_stays_too():
    model = FAMILIES["wan"].build()
    model.set_attention_backend("_native_math")
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    mhla.remove_mhla(model)
    assert backends(model) == {"_native_math"}
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    model.reset_attention_backend()
    mhla.remove_mhla(model)
    assert backends(model) == {None}


def test_guidance_that_was_interrupted_does_not_perturb_the_next_call():
    """diffusers' own processors are left behind then too, and fail by the number of parts."""
    model = patched("sana")
    pipe = pag_pipeline(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(**PIPELINES["sana"].call, pag_scale=3.0, callback_on_step_end=interrupt)
    with refused("batch of 3", "2 samples", "change_mhla"):
        output(model, inputs("sana"))
    mhla.change_mhla(model)
    assert torch.equal(output(model, inputs("sana")), output(patched("sana"), inputs("sana")))


def softmax_kernels(model, arguments):
    """How often each implementation of softmax attention ran."""
    with torch.profiler.profile() as profile:
        output(model, arguments)
    names = [event.name for event in profile.events()]
    return {
        "flash": names.count("aten::_scaled_dot_product_flash_attention_for_cpu"),
        "math": names.count("aten::_scaled_dot_product_attention_math"),
    }


@pytest.mark.parametrize("form", ["apply_mhla", "single instance"])
def test_attention_backend_reaches_kept_layers_and_cross_attention(form):
    model, arguments = FAMILIES["wan"].build(), inputs("wan")
    if form == "apply_mhla":
        mhla.apply_mhla(model, blocks=(2, 2, 3), layers=[0, 1])
        softmax = 2 + 4
    else:
        model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=FAMILIES["wan"].grid))
        softmax = 4
    expected = output(model, arguments)
    assert softmax_kernels(model, arguments) == {"flash": softmax, "math": 0}
    model.set_attention_backend("_native_math")
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    assert softmax_kernels(model, arguments) == {"flash": 0, "math": softmax}
    assert_equal_up_to_order(output(model, arguments), expected)


def test_perturbed_guidance_runs_the_original_attention_where_the_patch_is_off():
    call = PIPELINES["sana"].call | {"pag_scale": 3.0}
    expected = pag_pipeline(FAMILIES["sana"].build())(**call).images
    pipe = pag_pipeline(patched("sana"))
    with mhla.mhla_disabled(pipe):
        assert torch.equal(pipe(**call).images, expected)
