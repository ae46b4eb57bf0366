"""A family from outside of the package, the one that the page "Add a model" shows, keeps the contract of all."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mhla_diffusers as mhla
from mhla_diffusers import families
from mhla_diffusers.families import get_family, register_family
from mhla_diffusers.generation import PipelineChoice

from ..refusals import refused
from . import cases, cogview3plus, test_contract, test_pipelines
from .cogview3plus import COGVIEW3PLUS
from .cogview3plus_tiny import CASE, cogview3plus_pipeline

NAME = CASE.name


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that the contract finds; what a test registers is forgotten after it."""
    monkeypatch.setitem(cases.CASES, NAME, CASE)
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))


@pytest.fixture
def family(unregistered: None) -> families.Family:
    register_family(COGVIEW3PLUS)
    return COGVIEW3PLUS


def of(module: Any) -> list[Callable[[str], None]]:
    """Tests that take the name of a case alone."""
    tests = [one for name, one in vars(module).items() if name.startswith("test_")]
    return [one for one in tests if list(inspect.signature(one).parameters) == ["name"]]


LACKING = ("methods", "own_form", "step_of_the_pipeline", "compiles", "calibration")
"""What CogView3-Plus is not an example of, or few families are asked for."""
CHECKS = [one for module in (test_contract, test_pipelines) for one in of(module)]


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("check", [one for one in CHECKS if not any(word in one.__name__ for word in LACKING)])
def test_contract_of_all_families(check: Callable[[str], None]) -> None:
    check(NAME)


def test_file_is_short_enough_to_be_read() -> None:
    assert len(inspect.getsource(cogview3plus).splitlines()) <= 60


@pytest.mark.usefixtures("family")
def test_folder_of_the_pipeline_can_be_chosen_as_a_model(tmp_path: Any) -> None:
    cogview3plus_pipeline().save_pretrained(tmp_path)
    choice = PipelineChoice(NAME, model=str(tmp_path))
    choice.check()
    assert get_family(choice.load().transformer).name == NAME


class OwnAttention(nn.Module):
    """What the page asks of an attention, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner_dim, self.processor = 2, 32, self.attend
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(32, 32), nn.Dropout(0.0)])

    @staticmethod
    def attend(attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = [to(hidden_states).unflatten(2, (2, 16)).transpose(1, 2) for to in (attn.to_q, attn.to_k, attn.to_v)]
        found: torch.Tensor = attn.to_out[0](scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return found

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.processor(self, hidden_states)
        return found


class OwnTransformer(nn.Module):
    """A module of no library, without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn1": OwnAttention()}) for _ in range(2)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block["attn1"](x)
        return x


def test_a_module_of_ones_own_is_patched_saved_and_loaded(tmp_path: Any) -> None:
    of_own = {"name": "own", "transformers": ("OwnTransformer",), "block_lists": ("blocks",)}
    register_family(families.Family(**of_own, grid=lambda model, given: tuple(given["hidden_states"].shape[2:])))
    torch.manual_seed(0)
    model, x = OwnTransformer().eval(), torch.randn(1, 32, 8, 6)
    expected = model(x)
    mhla.apply_mhla(model, blocks=(2, 2))
    changed = model(x)
    mhla.save_mhla(model, tmp_path)
    assert torch.equal(mhla.remove_mhla(model)(x), expected) and not torch.equal(changed, expected)
    assert torch.equal(mhla.load_mhla(model, tmp_path)(x), changed)


def test_a_family_is_known_once_it_is_registered_and_again() -> None:
    """As a notebook registers it when its cell is run again; one of its name for other transformers is refused."""
    with refused("CogView3PlusTransformer2DModel", "register_family()"):
        mhla.apply_mhla(CASE.transformer())

    first, second = replace(COGVIEW3PLUS), replace(COGVIEW3PLUS)
    register_family(first)
    register_family(second)
    assert get_family(CASE.transformer()) is second
    with refused("'cogview3plus'", "CogView3PlusTransformer2DModel", "OtherModel"):
        register_family(replace(COGVIEW3PLUS, transformers=("OtherModel",)))
