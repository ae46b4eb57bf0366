"""Runs that go on: what may change when a run is resumed, and a result that another run begins with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.patching import PATCH_FILE
from mhla_diffusers.training import TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.finetune import NamedRun
from mhla_diffusers.training.weights import Original, plain_name, prepare_for_training

from ..refusals import refused
from .models import settings, tiny_wan, wan_data
from .pipelines import wan_pipeline
from .test_results import output_of

PATCH = MHLAConfig(blocks=(2, 2, 2))
BOTH = {"diffusion": 1.0, "distillation": 1.0}


def _config(output: Path, **changes: Any) -> TrainingConfig:
    usual = {"steps": 3, "trainable": "attention", "objectives": BOTH, "patch": PATCH, "ema_decay": 0.9}
    return settings(output, **{**usual, "checkpoint_every": 1, "keep_checkpoints": 9, **changes})


def _train(config: TrainingConfig, resume: str | None = None) -> None:
    assert train(apply_mhla(tiny_wan(), PATCH), wan_data(), config, resume=resume).finished


def test_more_updates_are_the_run_that_had_them_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    _train(_config(tmp_path / "alone", steps=5))
    _train(_config(tmp_path / "run"))
    _train(_config(tmp_path / "run", steps=5), "latest")
    alone, went_on = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "run"))
    assert went_on == alone and len(alone) == 5
    results = [next((tmp_path / name / "result").glob("*.safetensors")).read_bytes() for name in ("alone", "run")]
    assert results[0] == results[1]
    assert "Changed: steps: 3 → 5." in caplog.text


def test_another_rate_schedule_and_validation_hold_from_the_checkpoint_on(tmp_path: Path) -> None:
    """In a folder of their own, since the run has gone further than the checkpoint."""
    _train(_config(tmp_path / "run"))
    other: dict[str, Any] = {"steps": 5, "learning_rate": 1e-4, "mixing_learning_rate": 1e-3, "scheduler": "cosine"}
    changed = _config(tmp_path / "other", **other, validation=ValidationConfig(every=1))
    _train(changed, str(tmp_path / "run/checkpoints/step-00000002"))
    records = read_metrics(tmp_path / "other" / "metrics.jsonl")
    rates = [record["learning_rate"] for record in records]
    assert [record["step"] for record in records] == [3, 4, 5] and 1e-4 > rates[0] > rates[1] > rates[2] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 7}, "seed=7, which was 0"),
        ({"batch_size": 6}, "samples per update=6, which was 2"),
        ({"validation": ValidationConfig(4)}, "training samples=12, which was 16"),
        ({"trainable": "mhla"}, "trainable='mhla', which was 'attention'.* may change: .*steps"),
        ({"objectives": {"diffusion": 1.0}}, r"objectives\.distillation=0\.0, which was 1\.0"),
        ({"optimizer": "adafactor"}, "optimizer='adafactor', which was 'adamw'"),
        ({"patch": MHLAConfig(blocks=(2, 2, 1))}, r"patch\.blocks=\[2, 2, 1\], which was \[2, 2, 2\]"),
    ],
)
def test_what_may_not_change_is_said_with_both_values(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    _train(_config(tmp_path, steps=1))
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    with pytest.raises(ValueError, match=f"{checkpoint} .*{words}"):
        _train(_config(tmp_path, **{"steps": 2, **changes}), "latest")


LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 2, "lora_layers": "blocks"}


@pytest.fixture(scope="module", params=["attention", "lora"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result with weights of the model, or with a LoRA."""
    changes = LORA if request.param == "lora" else {}
    folder = tmp_path_factory.mktemp("first")
    wan_pipeline().save_pretrained(folder / "model")
    transformer = apply_mhla(wan_pipeline().transformer, PATCH)
    trained = train(
        transformer, wan_data(), _config(folder, learning_rate=1e-2, model=str(folder / "model"), **changes)
    ).result
    assert trained is not None
    return trained


def _has_lora(result: Path) -> bool:
    return any(".lora_A." in name for name in load_file(result / PATCH_FILE))


def _files(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def test_a_run_begins_with_a_result_and_its_teacher_is_the_original_model(result: Path, tmp_path: Path) -> None:
    """By name as by hand; updates that change nothing end with that result."""
    has_lora = _has_lora(result)
    model = str(result.parent / "model")
    named = {"data": str(tmp_path / "none"), "model": model, "patch": str(result)}
    config = _config(tmp_path / "run", learning_rate=1e-30, **named, **LORA if has_lora else {})
    transformer = NamedRun(config).transformer(with_weights=True)
    began = output_of(transformer)
    assert_close(
        began, output_of(load_mhla(wan_pipeline().transformer, result))
    )  # not bits: memory is laid out otherwise
    original = wan_pipeline().transformer
    assert not torch.allclose(began, output_of(apply_mhla(wan_pipeline().transformer, PATCH)), atol=1e-3)
    again = train(transformer, wan_data(), config).result
    assert again is not None and _files(again) == _files(result)

    # also under a LoRA
    transformer = NamedRun(config).transformer(with_weights=True)
    trained = prepare_for_training(transformer, replace(config, **LORA))
    with Original(transformer, trained).at_work():
        assert_close(output_of(transformer), output_of(original))
        found = {plain_name(name): parameter for name, parameter in transformer.named_parameters()}
        assert all(torch.equal(found[name], parameter) for name, parameter in original.named_parameters())
    assert torch.equal(output_of(transformer), began)


def test_a_result_stays_in_float32_where_the_model_is_in_bfloat16(result: Path, tmp_path: Path) -> None:
    changes = LORA if _has_lora(result) else {}
    named = {"data": str(tmp_path / "none"), "model": str(result.parent / "model"), "patch": str(result)}
    run = NamedRun(_config(tmp_path / "run", precision="bf16", **named, **changes))
    saved = load_file(result / PATCH_FILE)
    parameters = {plain_name(name): p for name, p in run.transformer(with_weights=True).named_parameters()}
    assert all(torch.equal(parameters[name.removeprefix("transformer.")], x) for name, x in saved.items())
    assert parameters["proj_out.weight"].dtype == torch.bfloat16
    assert run.transformer(with_weights=False).dtype


def test_a_lora_to_begin_with_and_the_run_must_fit(result: Path, tmp_path: Path) -> None:
    has_lora = _has_lora(result)
    wrong: list[dict[str, Any]] = [LORA | {"lora_rank": 4}, LORA | {"lora_layers": "attention"}, {}]
    for changes in wrong if has_lora else ():
        config = _config(tmp_path / "run", patch=str(result), **changes)
        begun = load_mhla(wan_pipeline().transformer, result)
        with refused("patch='"):
            train(begun, wan_data(), config)
    if not has_lora:  # a LoRA over weights that the first run has changed
        config = _config(tmp_path / "run", patch=str(result), **LORA)
        transformer = load_mhla(wan_pipeline().transformer, result)
        both = train(transformer, wan_data(), config).result
        assert both is not None and _has_lora(both)
        before, after = (load_file(folder / PATCH_FILE) for folder in (result, both))
        kept = [name for name in before if ".mhla." not in name]
        assert all(torch.equal(before[name], after.pop(name)) for name in kept)
        assert all(".mhla." in name or ".lora_" in name for name in after)
