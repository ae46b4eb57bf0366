"""Arguments of the wrong kind are refused with their value, what is allowed, and the way out."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import mhla_diffusers as mhla
from mhla_diffusers.attention import MHLAState
from mhla_diffusers.families import Family, get_family, register_family
from mhla_diffusers.patching import (
    attn_processors,
    calibrate_output_norm,
    call_context,
    layer_sensitivity,
)
from mhla_diffusers.tiny import pipeline_folder

from ..models import FAMILIES, inputs, patched
from ..pipelines import PIPELINES, dit_pipeline, wan_pipeline
from ..refusals import refused


def with_class_as_processor(name):
    model = FAMILIES[name].build()
    model.set_attn_processor(mhla.MHLAProcessor)
    model(**inputs(name))


def dit():
    return FAMILIES["dit"].build()


def nothing_known():
    with call_context(grid=(1, 2), gird=(2, 2)):
        pass


WAN, IS_CLASS = WanTransformer3DModel, "WanTransformer3DModel is a class"
REFUSED = {
    # call, offending value
    "size as text": (lambda: mhla.describe(dit_pipeline(), height="64", width=64), "height='64'"),
    "size as a float": (lambda: mhla.describe(dit_pipeline(), height=64, width=64.0), "width=64.0"),
    "truth as a size": (lambda: mhla.describe(dit_pipeline(), height=True, width=True), "height=True"),
    "negative size": (lambda: mhla.suggest_blocks(wan_pipeline(), -480, 832), "height=-480"),
    "half a frame": (lambda: mhla.suggest_blocks(wan_pipeline(), 480, 832, 8.5), "num_frames=8.5"),
    "blocks of a transformer": (
        lambda: mhla.suggest_blocks(FAMILIES["wan"].build(), 480, 832),
        "describe()",
    ),
    "grid as text": (lambda: mhla.describe(dit(), grid="88"), "grid='88'"),
    "grid of a number": (lambda: mhla.describe(dit(), grid=8), "grid=8 "),
    "grid of other axes": (lambda: mhla.describe(dit(), grid=(8,)), "grid=(8,)"),
    "sensitivity without a run": (lambda: layer_sensitivity(patched("dit"), 3), "run=3 "),
    "output norm without a run": (
        lambda: calibrate_output_norm(patched("dit", output_norm=True), None),
        "run=None ",
    ),
    "audit without a run": (lambda: mhla.audit(patched("dit"), "wan"), "run='wan' "),
    "run of nothing": (
        lambda: layer_sensitivity(patched("dit"), lambda: None),
        "run()",
    ),
    "configuration of a processor": (lambda: mhla.MHLAProcessor(3), "got int"),
    "processors of a pipeline": (lambda: attn_processors(wan_pipeline()), "WanPipeline is a pipeline"),
    "tiny pipeline": (lambda: pipeline_folder("flux"), "'flux'...dit, sana, wan"),
    "class of a family": (lambda: register_family(Family), "Family'>"),
    "no family": (lambda: register_family(None), "family=None"),
    "family with blocks of other axes": (
        lambda: replace(get_family("wan"), mhla_blocks=(4, 4)),
        "mhla_blocks=(4, 4)...3",
    ),
    "family of one name": (
        lambda: register_family(replace(get_family("wan"), transformers="SomeTransformer2DModel")),
        "transformers='SomeTransformer2DModel'",
    ),
    "family of a pipeline": (lambda: get_family(wan_pipeline()), "WanPipeline is a pipeline"),
    "family of no name": (lambda: get_family("wam"), "'wam'"),
    "family that left the package": (lambda: get_family("dinov2"), "studies/real_weights"),
    "class of a transformer": (lambda: mhla.set_attn_processor(WAN, mhla.MHLAProcessor(blocks=(2, 2, 3))), IS_CLASS),
    "other processor for a class": (lambda: mhla.set_attn_processor(WAN, WanAttnProcessor()), IS_CLASS),
    "processors of a class": (lambda: attn_processors(WAN), IS_CLASS),
    "class of a pipeline": (lambda: mhla.apply_mhla(WanPipeline), "WanPipeline is a class"),
    "class of a processor": (lambda: with_class_as_processor("wan"), "instance"),
    "class of a processor in SANA": (lambda: with_class_as_processor("sana"), "instance"),
    "empty name of a patch": (lambda: mhla.apply_mhla(dit(), ""), "patch ''"),
    "no truth to keep": (lambda: mhla.load_mhla(dit(), "x", keep_replaced="x"), "keep_replaced='x'"),
    "layers of no pipeline": (lambda: mhla.apply_mhla(dit(), layers="auto:1/2"), "'auto:1/2'...calibration=run"),
    "a field that no call has": (nothing_known, "gird"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_named(case):
    call, value = REFUSED[case]
    with refused(value):
        call()


def test_sizes_may_be_numpys():
    pipe = dit_pipeline()
    assert mhla.suggest_blocks(pipe, np.int64(256), np.int32(256)) == mhla.suggest_blocks(pipe, 256, 256)


def test_samples_are_reordered_by_a_list():
    def run():
        torch.manual_seed(0)
        state = MHLAState(torch.rand(4, 4), (12,), (4,), causal="token")
        generator = torch.Generator().manual_seed(0)
        state.step(*(torch.randn(2, 5, 2, 8, generator=generator) for _ in range(3)))
        return state, [torch.randn(2, 1, 2, 8, generator=generator) for _ in range(3)]

    (by_list, step), (by_tensor, _) = run(), run()
    by_list.reorder([1, 0])
    by_tensor.reorder(torch.tensor([1, 0]))
    assert torch.equal(by_list.step(*step), by_tensor.step(*step))


@pytest.mark.parametrize(("side", "says"), [(16, True), (256, False)])
def test_a_size_too_small_for_blocks_is_told(caplog, side, says):
    with caplog.at_level(logging.WARNING, "mhla_diffusers"):
        blocks = mhla.suggest_blocks(PIPELINES["dit"].build(), side, side)
    assert (blocks == (1, 1)) == says
    assert ("MHLA is plain linear attention there" in caplog.text) == says
