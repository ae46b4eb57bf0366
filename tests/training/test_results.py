"""What a run leaves: whatever was trained, its result is the trained model; samples of its validations."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig, apply_mhla, load_mhla, remove_mhla
from mhla_diffusers.config import PatchConfig
from mhla_diffusers.devices import PRECISIONS
from mhla_diffusers.families import Clip, predict
from mhla_diffusers.generation.pipelines import PipelineChoice, load_result
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.training import TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.validation import prompt_sampler
from mhla_diffusers.training.weights import add_lora, write_weights

from ..refusals import refused
from .models import FAMILIES, one_batch, settings
from .pipelines import dit_pipeline, sana_pipeline, wan_pipeline
from .processes import finish, start_process

TRANSFER: dict[str, Any] = {"trainable": "attention", "objectives": {"transfer": 1.0}}
WEIGHTS: dict[str, Any] = {"trainable": "all", "objectives": {"diffusion": 1.0, "distillation": 1.0}}
LORA: dict[str, Any] = {**WEIGHTS, "trainable": "lora", "lora_rank": 2}
CAUSAL = CausalConfig(blocks=(2, 2, 2), block_length=1, beyond="relative")
SPARSE = SparseConfig(block_size=4, density=0.2)
BLOCKS, SQUARES = MHLAConfig(blocks=(2, 2, 2), mixing_per_head=True), MHLAConfig(blocks=(2, 2))


@pytest.mark.parametrize(
    ("trained", "precision", "family", "patch"),
    [
        (LORA, "no", "wan", SPARSE),
        ({"trainable": "mhla"}, "no", "wan", BLOCKS),
        (WEIGHTS, "no", "wan", BLOCKS),
        (TRANSFER, "bf16", "wan", SPARSE),
        (WEIGHTS, "bf16", "wan", SPARSE),
        (TRANSFER, "bf16", "wan", BLOCKS),
        (WEIGHTS, "bf16", "wan", CAUSAL),
        (LORA, "bf16", "wan", CAUSAL),
        (LORA, "bf16", "dit", SPARSE),
        (WEIGHTS, "bf16", "sana", SQUARES),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "attention", ""),
)
def test_any_recipe_goes_with_any_patch_and_precision(
    trained: dict[str, Any], precision: str, family: str, patch: PatchConfig, tmp_path: Path
) -> None:
    make, data = FAMILIES[family]
    validation = ValidationConfig(samples=2, timesteps=1)
    usual = {"precision": precision, "gradient_checkpointing": precision == "bf16", "prompt_dropout": 0.1}
    config = settings(tmp_path, steps=2, patch=patch, validation=validation, learning_rate=1e-2, **usual, **trained)
    if precision == "bf16":  # accelerate keeps one precision per process
        finish([start_process(_train, family, config)], timeout=60)
    else:
        transformer = _train(family, config)
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [record["validation_loss"] if "validation_loss" in record else record["loss"] for record in records]
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
    loaded = load_mhla(make(), tmp_path / "result").eval()
    assert any(".lora_B.mhla." in name for name in loaded.state_dict()) == (trained is LORA)
    if precision == "no":
        batch = one_batch(loaded, data())
        with torch.no_grad():
            found, begun = predict(loaded, batch), predict(apply_mhla(make(), patch).eval(), batch)
            assert torch.allclose(found, predict(transformer.eval(), batch), atol=1e-6)
        assert not torch.allclose(found, begun, atol=1e-3)
    assert set(remove_mhla(loaded).state_dict()) == set(make().state_dict())


def _train(family: str, config: TrainingConfig) -> Any:
    make, data = FAMILIES[family]
    assert isinstance(config.patch, PatchConfig)
    transformer = apply_mhla(make().to(PRECISIONS[config.precision]), config.patch)
    assert train(transformer, data(), config).finished
    return transformer


def test_a_run_and_its_lora_open_in_the_pipeline_that_was_trained(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    _, data = FAMILIES["wan"]
    train(pipe.transformer, data(), settings(tmp_path / "unpatched"))
    loaded, patched = wan_pipeline(), wan_pipeline()
    load_result(loaded, tmp_path / "unpatched")  # of a run its result is meant
    assert all(map(torch.equal, loaded.transformer.state_dict().values(), pipe.transformer.state_dict().values()))
    with refused("WanTransformer3DModel"):
        load_result(sana_pipeline(), tmp_path / "unpatched/result")
    apply_mhla(patched.transformer, BLOCKS)
    train(patched.transformer, data(), settings(tmp_path / "run", patch=BLOCKS, **LORA))
    choice = PipelineChoice("wan", model=str(tmp_path / "model"), patch=str(tmp_path / "run"))
    assert choice.patch == str(tmp_path / "run/result")
    batch = one_batch(patched.transformer, data())
    with torch.no_grad():
        trained, found = (predict(one.transformer.eval(), batch) for one in (patched, choice.load()))
    assert torch.allclose(found, trained, atol=1e-6)


def test_lora_of_a_class_without_methods_for_it_comes_with_the_patch(tmp_path: Path) -> None:
    pipe, loaded = dit_pipeline(), dit_pipeline()
    add_lora(apply_mhla(pipe.transformer, blocks=(2, 2)), 2, seed=0)
    config = settings("unused", patch="unused", trainable="lora", lora_rank=2)
    write_weights(pipe.transformer, config, tmp_path / "result")
    load_result(loaded, tmp_path / "result")
    trained, found = (
        {name: x for name, x in one.transformer.named_parameters() if ".lora_" in name} for one in (pipe, loaded)
    )
    assert trained.keys() == found.keys()
    assert all(torch.equal(x, trained[name]) for name, x in found.items())


def test_samples_of_a_validation_are_the_same_every_time_and_unknown_classes_are_refused(tmp_path: Path) -> None:
    pipe, clip = load_tiny("dit"), Clip(frames=1, fps=1.0, sizes=((32, 32),))
    prompt_sampler(pipe, ["7", "seven"], clip, 2, "transformer")(pipe.transformer, tmp_path)
    first, second = (file.read_bytes() for file in sorted(tmp_path.glob("*.png")))
    assert first == second and pipe.transformer.training is False
    with refused("'a cat'"):
        prompt_sampler(pipe, ["7", "a cat"], clip, 2, "transformer")
