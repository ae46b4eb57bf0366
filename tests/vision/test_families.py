"""What every vision family promises beside the contract of all families."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import inject_adapter_in_model
from transformers import (
    DeiTForImageClassificationWithTeacher,
    Dinov2Backbone,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersBackbone,
    SiglipVisionModel,
    ViTForMaskedImageModeling,
    ViTModel,
)

import mhla_diffusers as mhla
from mhla_diffusers.attention import reference_attention
from mhla_diffusers.patching import attention_inputs

from ..models import assert_changed, relative_change
from ..patching.shared import lora
from .models import (
    BLOCKS,
    CASES,
    GRID,
    INTERPOLATE,
    RAGGED,
    deit,
    dinov2,
    output,
    pictures,
    registers,
    siglip_vision,
    vit,
)

ROUNDING = 2e-5
"""Relative: float32 sums in another order, through all layers."""
PLAIN = {"blocks": BLOCKS}
SPARSE = {"density": 0.25, "block_size": 4}
ALL_LISTED = {"density": 1.0}
"""Settings with which a patch computes softmax attention."""

every_family = pytest.mark.parametrize("name", CASES)


def patched(name: str, **settings: Any) -> Any:
    return mhla.apply_mhla(CASES[name].transformer(), **(PLAIN | settings))


@pytest.mark.parametrize(
    "build",
    [
        *((vit, cls) for cls in (ViTModel, ViTForMaskedImageModeling)),
        (deit, DeiTForImageClassificationWithTeacher),
        *((dinov2, cls) for cls in (Dinov2Model, Dinov2ForImageClassification, Dinov2Backbone)),
        (registers, Dinov2WithRegistersBackbone),
        (siglip_vision, SiglipVisionModel),
    ],
    ids=lambda build: build[1].__name__,
)
def test_every_other_class_of_the_families(build):
    make, cls = build
    model = make(cls)
    expected = output(model, pictures())
    mhla.apply_mhla(model, **PLAIN)
    assert_changed(output(model, pictures()), expected)
    mhla.remove_mhla(model)
    assert torch.equal(output(model, pictures()), expected)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert relative_change(output(model, pictures()), expected) < ROUNDING


@every_family
@pytest.mark.parametrize("settings", [PLAIN, SPARSE, {**SPARSE, "far": "means"}], ids=str)
def test_an_attention_is_the_reference_with_its_tokens_before_the_grid(name, settings):
    """Against float64, of the same queries, keys and values."""
    case, seen = CASES[name], {}
    model = mhla.apply_mhla(case.transformer(), **settings)
    attn = model.get_submodule(case.attentions[1])
    with torch.no_grad():
        for parameter in attn.mhla.parameters():  # of MHLA, and none of sparse attention
            parameter.uniform_(0.1, 0.9)

    def note(attn: Any, args: Any, kwargs: Any) -> None:
        seen["given"] = attention_inputs(attn, args, kwargs)

    attn.register_forward_pre_hook(note, with_kwargs=True)
    attn.get_submodule(case.output).register_forward_pre_hook(lambda _, args: seen.update(found=args[0]))
    output(model, pictures())
    given = seen["given"]
    assert given.grid == GRID and given.extra == (case.before, 0)
    inputs = replace(given, query=given.query.double(), key=given.key.double(), value=given.value.double())
    with torch.no_grad():
        expected = reference_attention(attn.mhla.call(inputs)).flatten(2)
    assert relative_change(seen["found"], expected) < 1e-5


def test_an_adapted_model_is_saved_as_what_differs_from_its_base(tmp_path):
    """The head as well, and the base is found where the model came from."""
    base = tmp_path / "base"
    CASES["vit"].transformer().save_pretrained(base)
    model = type(CASES["vit"].transformer()).from_pretrained(base)
    mhla.apply_mhla(model, **PLAIN)
    with torch.no_grad():
        model.classifier.weight.add_(1)
        model.get_submodule("vit.layers.1.attention.q_proj").weight.add_(0.1)
    expected = output(model, pictures())
    mhla.save_mhla(model, tmp_path / "patch", weights="changed")
    other = type(model).from_pretrained(base)
    before = output(other, pictures())
    mhla.load_mhla(other, tmp_path / "patch")
    assert torch.equal(output(other, pictures()), expected)
    mhla.remove_mhla(other)
    assert torch.equal(output(other, pictures()), before)


@pytest.mark.parametrize("name", ["vit", "siglip"])
def test_lora_works_under_the_patch(name):
    adapted = inject_adapter_in_model(lora("q_proj", "v_proj"), CASES[name].transformer()).eval()
    expected = output(adapted, pictures())
    assert_changed(expected, output(CASES[name].transformer(), pictures()))
    mhla.apply_mhla(adapted, **ALL_LISTED)
    assert relative_change(output(adapted, pictures()), expected) < ROUNDING


@pytest.mark.parametrize("name", ["vit", "siglip"])  # with and without extra tokens
def test_compiles_to_one_graph(name):
    model = patched(name)
    expected = output(model, pictures())
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_change(output(compiled, pictures()), expected) < ROUNDING
    if name == "vit":  # another size is another graph
        expected = output(model, pictures(RAGGED), **INTERPOLATE)
        assert relative_change(output(compiled, pictures(RAGGED), **INTERPOLATE), expected) < ROUNDING


@pytest.mark.parametrize("name", ["vit", "dinov2"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = patched(name).train()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(pixel_values=pictures()).logits.square().mean().backward()
        return [layer.mixing.grad.clone() for layer in mhla.mhla_layers(model).values()]

    expected = gradients()
    # of the last layer a head may read the class token alone, to which all is exact
    assert all(gradient.abs().sum() > 0 for gradient in expected[:-1])
    model.activation_checkpointing_enable()
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-9)
    mhla.remove_mhla(model)
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    assert any(functions) and not any("mhla" in type(function).__module__ for function in functions)
