"""LoRA on patched models, and the LoRA that belongs to a patch."""

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

import mhla_diffusers as mhla
from mhla_diffusers.patching import find_patched

from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import wan_pipeline
from ..refusals import refused
from .shared import ONE_PER_CLASS, PROJECTIONS, assert_equal_up_to_order, with_lora


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_patching_and_removing_under_lora(name, tmp_path):
    """In either order; removal leaves the adapter in place, and its file holds nothing else."""
    only_lora, both = (with_lora(one, *PROJECTIONS) for one in (FAMILIES[name].build(), patched(name)))
    before, expected = output(only_lora, inputs(name)), output(both, inputs(name))
    assert_changed(expected, output(patched(name), inputs(name)))
    mhla.apply_mhla(only_lora, find_patched(both)["transformer"].config)
    assert torch.equal(output(only_lora, inputs(name)), expected)
    if name != "dit":  # diffusers has no LoRA files of DiT
        both.save_lora_adapter(tmp_path)
        (file,) = tmp_path.glob("*.safetensors")
        assert all("lora_" in key and "mhla" not in key for key in load_file(file))
    for model in (only_lora, both):
        assert torch.equal(output(mhla.remove_mhla(model), inputs(name)), before)


def saved_with_lora(folder):
    """A sparse patch with a LoRA of its own, as one of few steps has."""
    model = with_lora(patched("wan", density=0.2), "to_q", "to_k")
    find_patched(model)["transformer"].lora = "default"
    return mhla.save_mhla(model, folder)


@pytest.mark.parametrize("first", ["style", "patch"])
def test_the_lora_of_a_patch_and_that_of_a_user_run_together(first, tmp_path, caplog):
    folder, pipe = saved_with_lora(tmp_path), wan_pipeline()
    style = get_peft_model_state_dict(with_lora(FAMILIES["wan"].build(), "to_v", "to_k"), adapter_name="default")
    weights = {f"transformer.{key}": value for key, value in style.items()}
    if first == "style":
        pipe.load_lora_weights(weights, adapter_name="style")
        mhla.load_mhla(pipe, folder)
    else:
        mhla.load_mhla(pipe, folder)
        pipe.load_lora_weights(weights, adapter_name="style")  # which leaves it active alone
        assert "not active" in str(mhla.describe(pipe))
        pipe.set_adapters(["mhla", "style"])
    both = output(pipe.transformer, inputs("wan"))
    reference = mhla.load_mhla(wan_pipeline(), folder)
    reference.load_lora_weights(weights, adapter_name="style")
    reference.set_adapters(["style", "mhla"])
    assert_equal_up_to_order(both, output(reference.transformer, inputs("wan")))
    assert not caplog.messages and "not active" not in str(mhla.describe(pipe))
    mhla.remove_mhla(pipe)
    unpatched = wan_pipeline()
    unpatched.load_lora_weights(weights, adapter_name="style")
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), output(unpatched.transformer, inputs("wan")))


@pytest.mark.parametrize("change", ["disable_lora", "unload_lora_weights"])
def test_a_forward_without_the_lora_of_its_patch_is_told_once(change, tmp_path, caplog):
    pipe = mhla.load_mhla(wan_pipeline(), saved_with_lora(tmp_path))
    getattr(pipe, change)()
    with mhla.mhla_disabled(pipe):
        output(pipe.transformer, inputs("wan"))
    assert not caplog.messages
    for _ in range(2):
        output(pipe.transformer, inputs("wan"))
    assert sum("'mhla', which is not active" in line for line in caplog.messages) == 1
    if change == "unload_lora_weights":
        with refused("'mhla'", "load_mhla() again"):
            mhla.save_mhla(pipe, tmp_path / "again")
