"""The output norm takes the scale of the replaced attention."""

import pytest
import torch

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched
from ..pipelines import PIPELINES, generate, wan22_pipeline
from .shared import MODELS, assert_same_footprint, footprint


def head_channel_rms(model, arguments):
    """Root mean square of every head channel that an unpatched model's self-attentions hand to ``to_out``."""
    seen = {}
    handles = []
    for path, attn in model.named_modules():
        if path.endswith("attn1"):

            def note(_, args, path=path, heads=attn.heads):
                seen[path] = args[0].unflatten(-1, (heads, -1)).square().mean(dim=(0, 1, 2)).sqrt()

            handles.append(attn.to_out[0].register_forward_pre_hook(note))
    output(model, arguments)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_calibration_gives_the_output_norm_the_scale_of_the_replaced_attention(name):
    expected = head_channel_rms(FAMILIES[name].build(), inputs(name))
    model = patched(name, output_norm=True, normalize=False)
    before = footprint(model)
    mhla.calibrate_output_norm(model, lambda: model(**inputs(name)))
    for path, layer in mhla.mhla_layers(model).items():
        torch.testing.assert_close(layer.output_norm, expected[path.removesuffix(".mhla")], rtol=1e-4, atol=1e-6)
    after = footprint(model)
    for part in before.keys() - {"state"}:
        assert after[part] == before[part], part


def test_calibration_reaches_both_transformers_of_a_pipeline():
    pipe = mhla.apply_mhla(wan22_pipeline(), sparse="none", blocks=PIPELINES["wan22"].blocks, output_norm=True)
    mhla.calibrate_output_norm(pipe, lambda: generate("wan22", pipe))
    for layer in mhla.mhla_layers(pipe).values():
        assert layer.output_norm.isfinite().all()
        assert not torch.equal(layer.output_norm, torch.ones_like(layer.output_norm))


def test_calibration_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="output_norm=True"):
        mhla.calibrate_output_norm(patched("sana"), lambda: None)
    with pytest.raises(ValueError, match="output_norm=True"):
        mhla.calibrate_output_norm(FAMILIES["sana"].build(), lambda: None)
    model = patched("sana", output_norm=True)
    before = footprint(model)
    with pytest.raises(ValueError, match=r"did not reach 3 of 3 layers.*transformer_blocks\.0\.attn1"):
        mhla.calibrate_output_norm(model, lambda: None)
    with pytest.raises(RuntimeError, match="out of prompts"):
        mhla.calibrate_output_norm(model, lambda: (_ for _ in ()).throw(RuntimeError("out of prompts")))
    assert_same_footprint(model, before)
