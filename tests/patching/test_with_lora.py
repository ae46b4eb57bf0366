"""LoRA and fused projections on patched models."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file

import mhla_diffusers as mhla
from mhla_diffusers.patching import MHLALayer, register_mixing_clip
from mhla_diffusers.patching.finding import find_patched

from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import wan_pipeline
from ..refusals import refused
from .shared import ONE_PER_CLASS, PROJECTIONS, assert_equal_up_to_order, mixings, self_attentions, with_lora


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in ONE_PER_CLASS), ("wan", {"density": 0.2})])
def test_patching_and_removing_under_lora(name, settings, tmp_path):
    """In either order, merged and unmerged; removal leaves the adapter in place, and its file holds nothing else."""
    only_lora = with_lora(FAMILIES[name].build(), *PROJECTIONS)
    before = output(only_lora, inputs(name))
    mhla.apply_mhla(only_lora, **settings or {"blocks": FAMILIES[name].blocks})
    both = with_lora(patched(name, **settings), *PROJECTIONS)
    expected = output(both, inputs(name))
    assert_changed(expected, output(patched(name, **settings), inputs(name)))
    assert torch.equal(output(only_lora, inputs(name)), expected)
    merged = copy.deepcopy(both)
    for change in ("merge", "unmerge"):
        for layer in lora_layers(merged):
            getattr(layer, change)()
        assert_equal_up_to_order(output(merged, inputs(name)), expected)
    if name != "dit":  # diffusers has no LoRA files of DiT
        both.save_lora_adapter(tmp_path)
        (file,) = tmp_path.glob("*.safetensors")
        assert all("lora_" in key and "mhla" not in key for key in load_file(file))
        other = patched(name, **settings)
        other.load_lora_adapter(tmp_path, prefix=None, weight_name=file.name)
        assert torch.equal(output(other, inputs(name)), expected)
    for model in (only_lora, both):
        mhla.remove_mhla(model)
        assert torch.equal(output(model, inputs(name)), before)


def test_lora_loads_into_a_patched_pipeline():
    """The form in which users have them: ``pipe.load_lora_weights``, a scale, fuse, unload."""
    weights = get_peft_model_state_dict(with_lora(FAMILIES["wan"].build(), *PROJECTIONS), adapter_name="default")
    pipe = mhla.apply_mhla(wan_pipeline(), blocks=FAMILIES["wan"].blocks)
    expected = output(pipe.transformer, inputs("wan"))
    pipe.load_lora_weights({f"transformer.{key}": value for key, value in weights.items()}, adapter_name="style")
    adapted = output(pipe.transformer, inputs("wan"))
    assert_changed(adapted, expected)
    pipe.set_adapters("style", 0.0)
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), expected)
    pipe.set_adapters("style", 1.0)
    pipe.fuse_lora(components=["transformer"])
    assert all(layer.merged for layer in lora_layers(pipe.transformer))
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), adapted)
    pipe.unfuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), expected)
    assert mhla.is_patched(pipe)


def with_copies(model):
    """An adapter with a copy of every MHLA layer, which PEFT trains and saves along with LoRA."""
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], modules_to_save=["mhla"]))
    return model


def test_lora_with_mixing_trains_the_copy_at_every_size():
    """PEFT copies the layers; the copies see the grid of the input, and are what is found, clipped and trained."""
    model, reference = (patched("wan", blocks=(2, 2, 2), convolution=3) for _ in range(2))
    output(model, inputs("wan"))
    layers = mhla.mhla_layers(with_copies(model))
    assert list(layers) == [f"blocks.{index}.attn1.mhla" for index in range(4)]
    with torch.no_grad():
        for layer in layers.values():
            layer.convolution.weight.add_(0.1)
            layer.mixing.mul_(0.5)
    for layer in mhla.mhla_layers(reference).values():
        layer.load_state_dict(next(iter(layers.values())).state_dict())
    wide = inputs("wan")
    tall = wide | {"hidden_states": wide["hidden_states"].mT}
    for arguments in (wide, tall, inputs("wan", ragged=True)):
        assert torch.equal(output(model, arguments), output(reference, arguments))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    register_mixing_clip(optimizer, model)
    model(**tall).sample.square().mean().backward()
    assert all(layer.mixing.grad is not None for layer in layers.values())


def test_lora_with_mixing_is_saved_under_plain_names_and_loads(tmp_path):
    model, original = with_copies(patched("wan")), FAMILIES["wan"].build()
    with torch.no_grad():
        for matrix in mixings(model):
            matrix.mul_(0.5)
    mhla.save_mhla(model, tmp_path)
    loaded = mhla.load_mhla(FAMILIES["wan"].build(), tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(mixings(model), mixings(loaded), strict=True))
    with refused("LoRA...weights='all'"):
        mhla.save_mhla(model, tmp_path, weights="all")
    assert str(mhla.describe(model)) == str(mhla.describe(loaded))
    mhla.remove_mhla(model)
    assert not mhla.is_patched(model)
    kinds = [[type(one) for one in each.attn_processors.values()] for each in (model, original)]
    assert kinds[0] == kinds[1]


def test_lora_with_mixing_that_is_switched_off_uses_the_layer_itself():
    model = patched("wan")
    expected = output(model, inputs("wan"))
    with torch.no_grad():
        for matrix in mixings(with_copies(model)):
            matrix.mul_(torch.rand_like(matrix))
    assert_changed(output(model, inputs("wan")), expected)
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):  # diffusers' disable_adapters() leaves these on
            module.enable_adapters(False)
    model.disable_adapters()
    assert torch.equal(output(model, inputs("wan")), expected)
    assert all(isinstance(layer, MHLALayer) for layer in mhla.mhla_layers(model).values())


def test_an_adapter_freezes_mhla_like_every_other_weight_until_it_is_unfrozen():
    """PEFT leaves the adapter alone trainable; whoever trains both says so after ``add_adapter``."""
    model = with_lora(patched("wan"), *PROJECTIONS)
    assert not any(matrix.requires_grad for matrix in mixings(model))
    for matrix in mixings(model):
        matrix.requires_grad_(True)
    model(**inputs("wan")).sample.square().mean().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert all(name.endswith("mhla.mixing") or "lora_" in name for name in trained)
    assert len(trained) == 4 + 2 * len(lora_layers(model))


@torch.no_grad()
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_fused_query_key_and_value(name):
    """Fuse every attention by itself: ``fuse_qkv_projections`` skips ``Attention``, which SANA and DiT are made of."""
    model = patched(name, layers="2/3")
    expected = output(model, inputs(name))
    replaced = [attn for attn in self_attentions(model) if isinstance(attn.processor, mhla.MHLAProcessor)]
    for attn in replaced:
        attn.fuse_projections()
    assert_equal_up_to_order(output(model, inputs(name)), expected)
    weight = replaced[0].to_qkv.weight
    weight.mul_(2)
    assert_changed(output(model, inputs(name)), expected)
    weight.div_(2)
    if name.startswith("wan"):
        model.unfuse_qkv_projections()
        assert not any(hasattr(attn, "to_qkv") for attn in replaced)
        assert torch.equal(output(model, inputs(name)), expected)


def saved_with_lora(folder):
    """A sparse patch with a LoRA of its own, as one of few steps has."""
    model = with_lora(patched("wan", density=0.2), "to_q", "to_k")
    find_patched(model)["transformer"].lora = "default"
    return mhla.save_mhla(model, folder)


def style():
    """A LoRA of a user, by its names in files."""
    model = with_lora(FAMILIES["wan"].build(), "to_v", "to_k", "to_out.0")
    return get_peft_model_state_dict(model, adapter_name="default")


@pytest.mark.parametrize("first", ["style", "patch"])
def test_the_lora_of_a_patch_and_that_of_a_user_run_together(first, tmp_path, caplog):
    folder, pipe = saved_with_lora(tmp_path), wan_pipeline()
    weights = {f"transformer.{key}": value for key, value in style().items()}
    if first == "style":
        pipe.load_lora_weights(weights, adapter_name="style")
        mhla.load_mhla(pipe, folder)
    else:
        mhla.load_mhla(pipe, folder)
        pipe.load_lora_weights(weights, adapter_name="style")  # which leaves it active alone
        alone = output(pipe.transformer, inputs("wan"))
        output(pipe.transformer, inputs("wan"))
        assert sum("'mhla' is not active" in line for line in caplog.messages) == 1
        assert "'mhla' is not active" in str(mhla.describe(pipe))
        pipe.set_adapters(["mhla", "style"])
        assert_changed(output(pipe.transformer, inputs("wan")), alone)
    caplog.clear()
    assert "not active" not in str(mhla.describe(pipe))
    both = output(pipe.transformer, inputs("wan"))
    reference = mhla.load_mhla(wan_pipeline(), folder)
    reference.load_lora_weights(weights, adapter_name="style")
    reference.set_adapters(["style", "mhla"])
    assert_equal_up_to_order(both, output(reference.transformer, inputs("wan")))
    assert not caplog.messages
    mhla.remove_mhla(pipe)
    unpatched = wan_pipeline()
    unpatched.load_lora_weights(weights, adapter_name="style")
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), output(unpatched.transformer, inputs("wan")))


@pytest.mark.parametrize(("change", "words"), [("disable_lora", "not active"), ("unload_lora_weights", "was unloaded")])
def test_a_forward_without_the_lora_of_its_patch_is_told_once(change, words, tmp_path, caplog):
    pipe = mhla.load_mhla(wan_pipeline(), saved_with_lora(tmp_path))
    getattr(pipe, change)()
    with mhla.mhla_disabled(pipe):
        output(pipe.transformer, inputs("wan"))
    assert not caplog.messages
    for _ in range(2):
        output(pipe.transformer, inputs("wan"))
    assert sum(words in line for line in caplog.messages) == 1
