"""diffusers' own saving, pickle and copies of patched models."""

import copy
import json
import shutil

import pytest
import torch
from diffusers import DiTPipeline
from safetensors.torch import load_file

import mhla_diffusers as mhla
from mhla_diffusers.tiny import load_tiny

from ..models import FAMILIES, inputs, output, patched
from ..pipelines import dit_pipeline
from .shared import ONE_PER_CLASS, PROJECTIONS, with_lora


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_save_pretrained_writes_the_weights_and_from_pretrained_opens_the_unpatched_model(name, tmp_path):
    """diffusers knows nothing of the patch: it reports the MHLA tensors as unexpected and ignores them.
    ``save_mhla`` and ``load_mhla`` keep them.
    """
    model, base = patched(name), FAMILIES[name].build()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert set(saved) == set(model.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == type(base).__name__
    opened, report = type(base).from_pretrained(tmp_path, output_loading_info=True)
    assert sorted(report["unexpected_keys"]) == sorted(f"{layer}.mixing" for layer in mhla.mhla_layers(model))
    assert not report["missing_keys"]
    assert not mhla.is_patched(opened)
    assert torch.equal(output(opened, inputs(name)), output(base, inputs(name)))
    # patched again, it takes the whole state dict
    mhla.apply_mhla(opened, blocks=FAMILIES[name].blocks, mixing_per_head=False)
    opened.load_state_dict(saved)
    assert torch.equal(output(opened, inputs(name)), output(model, inputs(name)))


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_saved_pipeline_of_a_patched_dit_names_the_class_of_diffusers(made, tmp_path):
    """Whoever opens it need not have this package, whether the pipeline was made before or after the patch."""
    pipe = mhla.apply_mhla(dit_pipeline(), blocks=(4, 2))
    if made == "after":
        pipe = DiTPipeline(transformer=pipe.transformer, vae=pipe.vae, scheduler=pipe.scheduler)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "DiTTransformer2DModel"]


def test_a_patch_beside_diffusers_own_files_opens_without_a_warning(tmp_path, recwarn):
    """The pipeline was loaded from the folder that its patch lies in, so the two belong together."""
    pipe = load_tiny("dit")
    mhla.save_mhla(mhla.apply_mhla(pipe, blocks=(4, 2)), tmp_path)
    pipe.save_pretrained(tmp_path)
    for again in (DiTPipeline.from_pretrained(tmp_path), DiTPipeline.from_pretrained(tmp_path).transformer):
        mhla.load_mhla(again, tmp_path)
    assert not [one for one in recwarn if "belong together" in str(one.message)]
    with pytest.warns(UserWarning, match="belong together"):  # of another folder
        mhla.load_mhla(DiTPipeline.from_pretrained(tmp_path), shutil.copytree(tmp_path, tmp_path / "other"))


def test_a_deep_copy_of_an_adapted_model_is_independent():
    model = with_lora(patched("wan"), *PROJECTIONS)
    clone = copy.deepcopy(model)
    expected = output(model, inputs("wan"))
    assert torch.equal(output(clone, inputs("wan")), expected)
    clone.unload_lora()
    mhla.remove_mhla(clone)
    assert torch.equal(output(model, inputs("wan")), expected)
