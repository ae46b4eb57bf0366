"""A class is known by its name and its library: copies of diffusers' classes are patched, others are refused."""

import inspect
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_flux, transformer_wan
from torch import nn

import mhla_diffusers as mhla
from mhla_diffusers.families import find_family, get_family

from ..models import FAMILIES, assert_changed, inputs, output, wan
from ..refusals import refused
from .cases import case_of


class WanTransformer3DModel(nn.Module):
    """As a library without diffusers has one."""

    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        if attention is not None:
            self.blocks.append(nn.ModuleDict({"norm": nn.LayerNorm(8)}))
            self.blocks[0].attn1 = attention


class Projections(nn.Module):
    """Attention that runs no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.heads, self.inner_dim = nn.Linear(8, 8), 2, 8


@pytest.mark.parametrize(
    ("attention", "lacking"),
    [(None, "no attn1 or attn in blocks"), (nn.MultiheadAttention(8, 2), "heads"), (Projections(), "processor")],
)
def test_a_class_of_another_library_is_refused_by_what_it_lacks(attention: Any, lacking: str) -> None:
    model = WanTransformer3DModel(attention)
    assert find_family(model) is None
    for use in (lambda: get_family(model), lambda: mhla.apply_mhla(model, blocks=(2, 2, 2))):
        with refused("WanTransformer3DModel", __name__, "diffusers", lacking, "register"):
            use()


def copied(module: Any, name: str) -> Any:
    """The class of a copy of a module of diffusers, as of code on the Hub."""
    space = {"__name__": "diffusers_modules.local.model", "__package__": module.__package__}
    exec(inspect.getsource(module), space)
    return space[name]


def test_a_copy_of_a_class_is_patched() -> None:
    model, arguments = wan(copied(transformer_wan, "WanTransformer3DModel")), inputs("wan")
    with torch.no_grad():
        before = output(model, arguments)
        expected = output(mhla.apply_mhla(FAMILIES["wan"].build(), blocks=(2, 2, 3)), arguments)
        assert torch.equal(output(mhla.apply_mhla(model, blocks=(2, 2, 3)), arguments), expected)
        assert_changed(before, expected)
        assert torch.equal(output(mhla.remove_mhla(model), arguments), before)


def test_a_copy_of_joint_attention_is_patched() -> None:
    config = case_of("flux").transformer().config
    model = copied(transformer_flux, "FluxTransformer2DModel").from_config(config)
    assert get_family(model).name == "flux" and mhla.is_patched(mhla.apply_mhla(model, blocks=(2, 2)))


def test_a_subclass_is_of_the_family_of_its_base() -> None:
    class Longer(transformer_wan.WanTransformer3DModel):
        pass

    model = wan(Longer)
    assert get_family(model).name == get_family(Longer).name == "wan"
    assert mhla.is_patched(mhla.apply_mhla(model, blocks=(2, 2, 3)))
