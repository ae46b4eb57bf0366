"""A family from outside of the package: the one of the page "Add a model", and its complete example, CogView3-Plus."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from diffusers.models.attention_dispatch import dispatch_attention_fn
from PIL import Image
from torch import nn

import mhla_diffusers as mhla
from mhla_diffusers import families
from mhla_diffusers.families import get_family, register_family
from mhla_diffusers.generation.pipelines import PipelineChoice
from mhla_diffusers.training.data.cache import LatentCache

from ..evaluation.pictures import mhla as command
from ..models import assert_changed
from ..refusals import refused
from . import cases, cogview3plus, test_contract, test_inputs, test_pipelines
from .cases import ALL_LISTED, SPARSE, handle, tally
from .cogview3plus import COGVIEW3PLUS
from .cogview3plus_tiny import CASE, save_cogview3plus

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that the contract finds; what a test registers is forgotten after it."""
    monkeypatch.setitem(cases.CASES, CASE.name, CASE)
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))


class Processor:
    """As those of diffusers that dispatch."""

    _attention_backend, _parallel_config = None, None

    def __call__(self, attn: Any, x: torch.Tensor) -> torch.Tensor:
        heads = [to(x).unflatten(2, (attn.heads, -1)) for to in (attn.to_q, attn.to_k, attn.to_v)]
        return attn.to_out(dispatch_attention_fn(*heads, backend=self._attention_backend).flatten(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner_dim, self.processor = 2, 32, Processor()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self, x)


class MyTransformer3DModel(nn.Module):
    """What the page has in mind: text, then a video's tokens, in joint attention."""

    config = SimpleNamespace(patch_size=(1, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn1": Attention()}) for _ in range(2))

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        x = torch.cat([encoder_hidden_states, hidden_states.flatten(2).mT], dim=1)
        for block in self.blocks:
            x = x + block["attn1"](x)
        return x[:, encoder_hidden_states.shape[1] :]


@torch.no_grad()
def test_the_family_of_the_page_is_fifteen_lines_and_all_that_sparse_attention_needs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?register_family\(.*?\n\)\n)```", PAGE.read_text(), re.DOTALL)[:1]
    code = code[code.index("register_family(") :]
    assert len(code.splitlines()) <= 15
    exec(code, {"Family": families.Family, "grids": families.grids, "register_family": register_family})
    torch.manual_seed(0)
    model, call = MyTransformer3DModel().eval(), (torch.randn(1, 32, 4, 8, 6), torch.randn(1, 5, 32))
    expected = model(*call)
    assert torch.equal(mhla.apply_mhla(model, **ALL_LISTED)(*call), expected)
    found = mhla.change_mhla(model, **SPARSE)(*call)
    assert_changed(found, expected)
    assert (handle(model).latest_grid, tally(model)) == ((4, 8, 6), (2, {}))
    mhla.save_mhla(model, tmp_path)
    assert torch.equal(mhla.remove_mhla(model)(*call), expected)
    assert torch.equal(mhla.load_mhla(model, tmp_path)(*call), found)
    with refused("density"):
        mhla.remove_mhla(model) and mhla.apply_mhla(model, blocks=(2, 2, 2))


CHECKS: list[Callable[[str], None]] = [
    test_contract.test_a_patch_that_lists_all_pairs_is_the_models_own_attention,
    test_contract.test_tokens_beside_the_grid_stand_where_the_table_says,
    test_contract.test_samples_of_a_batch_do_not_mix,
    test_pipelines.test_a_pipeline_runs_the_patch_in_the_steps_that_are_not_dense,
    partial(test_inputs.test_forward_gets_what_the_pipeline_gives, config={}, size={}),
    test_inputs.test_latents_are_of_the_scale_of_the_pipeline,
    test_inputs.test_size_in_pixels_tells_the_grid,
]


@pytest.mark.parametrize("check", CHECKS)
def test_contract_of_all_families(check: Callable[[str], None]) -> None:
    register_family(COGVIEW3PLUS)
    check(CASE.name)


def test_the_complete_example_is_short_enough_to_be_read_and_its_folder_a_model(tmp_path: Path) -> None:
    assert len(inspect.getsource(cogview3plus).splitlines()) <= 50
    register_family(COGVIEW3PLUS)
    save_cogview3plus(tmp_path)
    choice = PipelineChoice(CASE.name, model=str(tmp_path))
    choice.check()
    assert get_family(choice.load().transformer).name == CASE.name


def test_a_family_is_known_once_it_is_registered_and_again() -> None:
    """As a notebook registers it when its cell is run again; one of its name for other transformers is refused."""
    with refused("CogView3PlusTransformer2DModel"):
        mhla.apply_mhla(CASE.transformer())
    first, second = replace(COGVIEW3PLUS), replace(COGVIEW3PLUS)
    register_family(first)
    register_family(second)
    assert get_family(CASE.transformer()) is second
    with refused("'cogview3plus'", "CogView3PlusTransformer2DModel", "OtherModel"):
        register_family(replace(COGVIEW3PLUS, transformers=("OtherModel",)))


def test_commands_encode_for_it_and_adapt_it(tmp_path: Path) -> None:
    """Pictures; then attention transfer, and distillation with the loss that the model was trained with."""
    register_family(COGVIEW3PLUS)

    def run(*arguments: object) -> None:
        ended = command(*arguments)
        assert ended.exit_code == 0, f"{ended.output}\n{ended.exception!r}"

    pictures, latents, model = tmp_path / "pictures", tmp_path / "latents", save_cogview3plus(tmp_path / "model")
    pictures.mkdir()
    for number in range(3):
        Image.new("RGB", (70, 80), (50 * number, 90, 120)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a cat")
    run("encode", "--model", model, "--source", pictures, "--output", latents, "--size", "64x64", "--dtype", "float32")
    assert LatentCache(latents).shapes == [(4, 8, 8)] * 3
    config = {
        **{"model": str(model), "data": str(latents), "output": str(tmp_path / "run")},
        **{"patch": {"density": 0.2, "block_size": 4}, "prompt_dropout": 0.2, "steps": 1, "learning_rate": 1e-3},
        "validation": {"samples": 1, "every": 1, "prompts": ["a cat"], "inference_steps": 2},
        **{"trainable": "attention", "objectives": {"transfer": 1.0}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    run("finetune", file, f"output={tmp_path / 'transfer'}")
    begun = f"patch={tmp_path / 'transfer' / 'result'}"
    run("finetune", file, begun, "trainable=all", "objectives={diffusion: 1.0, distillation: 1.0}")
    assert mhla.is_patched(mhla.load_mhla(CASE.pipeline(), tmp_path / "run" / "result"))
    assert list((tmp_path / "run" / "samples").rglob("*.png"))
