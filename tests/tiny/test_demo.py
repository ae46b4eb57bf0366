import json
from pathlib import Path

import pytest
import torch
from mhla_diffusers.demo.building import FAMILIES

from mhla_diffusers import apply_mhla
from mhla_diffusers.analysis import attention_matrices, mean_entropy, mean_rank
from mhla_diffusers.demo import DemoConfig, run_demo
from mhla_diffusers.demo.latents import digit_latents
from mhla_diffusers.demo.variants import BLOCKS, adaptation
from mhla_diffusers.families import get_family
from mhla_diffusers.families.processes import diffusion_process
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.training import TrainingConfig
from mhla_diffusers.training.latents.data import stack_samples


def fixed_batch(pipe, family):
    data = digit_latents(pipe, family, samples=1, held_out=1)
    tensors = stack_samples([data[1]])
    latents = tensors.pop("latents")
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    process = diffusion_process(pipe.transformer, 3.0)
    return process.make_batch(latents, noise, torch.tensor([0.5]), tensors)


@torch.no_grad()
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_matrix_is_the_one_that_the_model_uses(family, patched):
    pipe = load_tiny(family)
    if patched:
        apply_mhla(pipe, blocks=(2,) * get_family(pipe.transformer).axes)
    batch = fixed_batch(pipe, family)
    attentions = get_family(pipe.transformer).self_attentions(pipe.transformer)
    name, attn = next(iter(attentions.items()))
    seen = {}
    handles = [
        attn.to_v.register_forward_hook(lambda _m, _a, out: seen.update(value=out)),
        attn.to_out[0].register_forward_pre_hook(lambda _m, args: seen.update(output=args[0])),
    ]
    matrices = attention_matrices(pipe.transformer, batch)
    for handle in handles:
        handle.remove()
    value = seen["value"].double().unflatten(-1, (matrices[name].shape[1], -1))
    expected = torch.einsum("bhqk,bkhd->bqhd", matrices[name], value).flatten(2)
    torch.testing.assert_close(seen["output"].double(), expected, rtol=1e-3, atol=1e-4)
    # (B, N, channels) either way


def test_rank_and_entropy_of_known_matrices():
    identity = {"a": torch.eye(8, dtype=torch.float64)[None, None]}
    uniform = {"a": torch.full((1, 1, 8, 8), 1 / 8, dtype=torch.float64)}
    assert mean_rank(identity) == 8
    assert mean_rank(uniform) == 1
    assert mean_entropy(identity) == 0
    assert mean_entropy(uniform) == pytest.approx(torch.tensor(8.0).log().item())


def test_demo_writes_everything_and_repeats_itself(tmp_path):
    pytest.importorskip("matplotlib")
    tables = []
    for name in ("first", "second"):
        config = DemoConfig(tmp_path / name, "dit", steps=4, scenes=3, samples=32, held_out=4)
        rows = run_demo(config)
        tables.append([{**vars(row), "seconds_per_step": 0} for row in rows])
    assert tables[0] == tables[1]
    assert [row["name"] for row in tables[0]] == ["softmax", "plain linear", "MHLA", "MHLA hybrid 2/3"]
    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"index.html", "results.json", "samples.png", "loss.png", "mixing-MHLA.png"} <= files
    page = (tmp_path / "first" / "index.html").read_text()
    assert "http" not in page
    assert page.count("data:image/png;base64,") == 4
    assert len(json.loads((tmp_path / "first" / "results.json").read_text())["rows"]) == 4


def test_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write to the output folder"):
        run_demo(DemoConfig(tmp_path / "file" / "out"))


@pytest.mark.parametrize(("change", "message"), [({"family": "x"}, "family='x'"), ({"steps": 0}, "steps=0")])
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DemoConfig(**change)


@pytest.mark.parametrize("family", ["dit", "sana", "wan"])
def test_demo_adapts_with_the_shipped_recipe(family):
    shipped = TrainingConfig.from_yaml(Path(__file__).parents[2] / f"finetune/configs/tiny-{family}.yaml", [])
    steps = sum(stage.steps for stage in shipped.stages)
    used = adaptation(family, shipped.patch, steps, shipped.validation.samples, Path(shipped.output), shipped.seed)
    assert used.stages == shipped.stages
    assert used.batch_size == shipped.batch_size
    assert used.prompt_dropout == shipped.prompt_dropout
    assert shipped.patch.blocks == BLOCKS[family]
