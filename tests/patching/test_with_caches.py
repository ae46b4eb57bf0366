"""Caches and attention backends of diffusers."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched
from .shared import assert_equal_up_to_order


def test_first_block_cache():
    """A threshold of 0 never skips; with a high one the second step runs the first block only."""
    expected = output(patched("wan"), inputs("wan"))
    later = inputs("wan") | {"timestep": torch.tensor([490, 240])}
    for threshold, runs in ((0.0, 4), (10.0, 1)):
        model = patched("wan")
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        with model.cache_context("cond"):
            assert torch.equal(output(model, inputs("wan")), expected)
            counted = []
            for layer in mhla.mhla_layers(model).values():
                layer.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
            found = output(model, later)
        assert len(counted) == runs
        assert found.isfinite().all()
        model.disable_cache()
        assert torch.equal(output(model, inputs("wan")), expected)


def test_a_model_with_a_cache_is_patched_and_restored():
    model = FAMILIES["wan"].build()
    original = output(model, inputs("wan"))
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    mhla.apply_mhla(model, sparse="none", blocks=FAMILIES["wan"].blocks)
    with model.cache_context("cond"):
        assert torch.equal(output(model, inputs("wan")), output(patched("wan"), inputs("wan")))
    mhla.remove_mhla(model)
    with model.cache_context("cond"):
        assert torch.equal(output(model, inputs("wan")), original)


@pytest.mark.parametrize("name", ["sana", "dit"])
def test_diffusers_has_no_caches_for_sana_and_dit(name):
    """When that changes, test them above."""
    assert not hasattr(FAMILIES[name].build(), "enable_cache")


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
        mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3), layers=[0, 1])
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


@pytest.mark.parametrize("name", ["sana", "dit"])
def test_attention_backend_leaves_the_rest_working(name):
    """SANA's and DiT's own processors do not look at it; nor does MHLA."""
    model = patched(name)
    expected = output(model, inputs(name))
    model.set_attention_backend("_native_math")
    assert torch.equal(output(model, inputs(name)), expected)
