"""Runs that go on: what may change when a run is resumed, and a result that another run begins with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.finetune import NamedRun
from mhla_diffusers.training.roles import Roles, plain_name, prepare_for_training

from ..refusals import refused
from .models import tiny_wan, wan_data
from .pipelines import wan_pipeline
from .test_results import _output

PATCH = MHLAConfig(blocks=(2, 2, 2))
FIRST = StageConfig(3, 1e-3, "mhla", ObjectiveWeights(transfer=1.0))
SECOND = StageConfig(3, 1e-3, "attention", ObjectiveWeights(diffusion=1.0, distillation=1.0))


def _config(output: Path, *stages: StageConfig, **settings: Any) -> TrainingConfig:
    common = {"patch": PATCH, "batch_size": 2, "ema_decay": 0.9, "checkpoint_every": 1}
    return TrainingConfig(str(output), stages, **common | settings)


def _train(config: TrainingConfig, resume: str | None = None) -> None:
    assert train(apply_mhla(tiny_wan(), PATCH), wan_data(), config, resume=resume).finished


def test_more_updates_and_a_further_stage_are_the_run_that_had_them_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    longer = replace(FIRST, steps=5)
    _train(_config(tmp_path / "alone", longer, SECOND))
    run = _config(tmp_path / "run", FIRST)
    _train(run)
    _train(replace(run, stages=(longer,)), "latest")
    _train(replace(run, stages=(longer, SECOND)), "latest")
    alone, went_on = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "run"))
    assert went_on == alone and len(alone) == 8
    results = [next((tmp_path / name / "result").glob("*.safetensors")).read_bytes() for name in ("alone", "run")]
    assert results[0] == results[1]
    first, second = read_metrics(tmp_path / "run" / "changes.jsonl")
    assert first == {"step": 3, "changed": {"stages.0.steps": [3, 5]}}
    assert second == {"step": 5, "changed": {"stages.1": [None, SECOND.to_dict()]}}
    assert "stages.0.steps: 3 → 5" in caplog.text
    assert "stages.1 added: " in caplog.text and "None" not in caplog.text.split("stages.1 added: ")[1].splitlines()[0]


def test_another_rate_schedule_and_validation_hold_from_the_checkpoint_on(tmp_path: Path) -> None:
    run = _config(tmp_path, replace(SECOND, steps=4), ema_decay=None, keep_checkpoints=9)
    _train(run)
    other = replace(SECOND, steps=5, learning_rate=1e-4, scheduler="cosine", objectives=ObjectiveWeights(diffusion=2.0))
    changed = replace(run, stages=(other,), validation=ValidationConfig(every=1), ema_decay=0.5)
    checkpoint = str(tmp_path / "checkpoints" / "step-00000002")
    for _ in range(2):  # the second time what the first one has done is put aside
        _train(changed, checkpoint)
        rates = [record["learning_rate"] for record in read_metrics(tmp_path / "metrics.jsonl")]
        assert rates[:2] == [1e-3] * 2 and 1e-4 > rates[2] > rates[3] > rates[4] > 0
        (record,) = read_metrics(tmp_path / "changes.jsonl")
        assert record["step"] == 2 and record["changed"]["stages.0.learning_rate"] == [1e-3, 1e-4]
        assert {"ema_decay", "stages.0.scheduler", "stages.0.objectives.distillation"} < record["changed"].keys()
        assert record["changed"]["validation.every"] == [100, 1]
    assert (tmp_path / "aside-2" / "changes.jsonl").is_file()
    assert (tmp_path / "checkpoints" / "step-00000005" / "ema.safetensors").is_file()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> TrainingConfig:
    """A run with checkpoints of both stages and a third one that has not begun."""
    third = StageConfig(1, 1e-3, "all", ObjectiveWeights(diffusion=1.0))
    run = _config(tmp_path_factory.mktemp("stopped") / "run", FIRST, SECOND, third, keep_checkpoints=9)
    _train(run)
    return run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stages": (replace(FIRST, learning_rate=1e-4), SECOND)},
            r"stages\.0\.learning_rate=0\.0001, .* 0\.001",
        ),
        ({"stages": (replace(FIRST, steps=2), SECOND)}, r"stages\.0\.steps=2"),
        ({"stages": (FIRST, replace(SECOND, trainable="mhla"))}, r"stages\.1\.trainable='mhla', .* 'attention'"),
        ({"stages": (FIRST, replace(SECOND, steps=1))}, r"stages\.1\.steps=1, .* 3"),
        ({"stages": (FIRST,)}, r"stages\.1=None"),
        ({"optimizer": "adamw8bit"}, "optimizer='adamw8bit', .* 'adamw'"),
        ({"patch": MHLAConfig(blocks=(2, 2, 1))}, r"patch\.blocks=\[2, 2, 1\], .* \[2, 2, 2\]"),
    ],
)
def test_what_may_not_change_is_said_with_the_reason(
    changes: dict[str, Any], words: str, stopped: TrainingConfig
) -> None:
    checkpoint = Path(stopped.output) / "checkpoints" / "step-00000005"
    with pytest.raises(ValueError, match=f"{checkpoint} .*{words}"):
        train(apply_mhla(tiny_wan(), PATCH), wan_data(), replace(stopped, **changes), resume=str(checkpoint))


def test_a_stage_that_has_not_begun_may_be_removed(stopped: TrainingConfig, tmp_path: Path) -> None:
    """Its weights are in the checkpoint, as they were."""
    checkpoint = str(Path(stopped.output) / "checkpoints" / "step-00000005")
    fewer = replace(stopped, output=str(tmp_path / "fewer"), stages=(FIRST, SECOND))
    _train(fewer, checkpoint)
    _train(replace(fewer, output=str(tmp_path / "alone")))
    results = [next((tmp_path / name / "result").glob("*.safetensors")).read_bytes() for name in ("fewer", "alone")]
    assert results[0] == results[1]


LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 2, "lora_layers": "blocks"}


@pytest.fixture(scope="module", params=["attention", "lora"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result with weights of the model, or with a LoRA."""
    stage = replace(SECOND, learning_rate=1e-2, **LORA if request.param == "lora" else {})
    folder = tmp_path_factory.mktemp("first")
    wan_pipeline().save_pretrained(folder / "model")
    transformer = apply_mhla(wan_pipeline().transformer, PATCH)
    trained = train(transformer, wan_data(), _config(folder, stage, model=str(folder / "model"))).result
    assert trained is not None
    return trained


def _files(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def test_a_run_begins_with_a_result_and_its_teacher_is_the_original_model(result: Path, tmp_path: Path) -> None:
    """By name as by hand; updates that change nothing end with that result."""
    has_lora = bool(list(result.glob("lora-*")))
    still = replace(SECOND, learning_rate=1e-30, **LORA if has_lora else {})
    model = str(result.parent / "model")
    settings = {"data": str(tmp_path / "none"), "model": model, "patch": str(result)}
    config = _config(tmp_path / "run", still, **settings)
    transformer = NamedRun(config).transformer(with_weights=True)
    began = _output(transformer)
    assert_close(
        began, _output(load_mhla(wan_pipeline().transformer, result))
    )  # not bits: memory is laid out otherwise
    original = wan_pipeline().transformer
    assert not torch.allclose(began, _output(apply_mhla(wan_pipeline().transformer, PATCH)), atol=1e-3)
    again = train(transformer, wan_data(), config).result
    assert again is not None and _files(again) == _files(result)

    # also under a LoRA
    transformer = NamedRun(config).transformer(with_weights=True)
    config = replace(config, stages=(replace(SECOND, **LORA),))
    roles = Roles.of(transformer, config, prepare_for_training(transformer, config), None)
    assert roles.teacher is not None
    with roles.teacher.at_work():
        assert_close(_output(transformer), _output(original))
        found = {plain_name(name): parameter for name, parameter in transformer.named_parameters()}
        assert all(torch.equal(found[name], parameter) for name, parameter in original.named_parameters())
    assert torch.equal(_output(transformer), began)


def test_a_result_stays_in_float32_where_the_model_is_in_bfloat16(result: Path, tmp_path: Path) -> None:
    stage = replace(SECOND, **LORA) if list(result.glob("lora-*")) else SECOND
    settings = {"data": str(tmp_path / "none"), "model": str(result.parent / "model"), "patch": str(result)}
    run = NamedRun(_config(tmp_path / "run", stage, precision="bf16", **settings))
    saved = {name: tensor for file in result.glob("*.safetensors") for name, tensor in load_file(file).items()}
    parameters = {plain_name(name): p for name, p in run.transformer(with_weights=True).named_parameters()}
    assert all(torch.equal(parameters[name.removeprefix("transformer.")], x) for name, x in saved.items())
    assert parameters["proj_out.weight"].dtype == torch.bfloat16
    assert run.transformer(with_weights=False).dtype


def test_a_lora_to_begin_with_and_stages_must_fit(result: Path, tmp_path: Path) -> None:
    has_lora = bool(list(result.glob("lora-*")))
    wrong = [replace(SECOND, **LORA | {"lora_rank": 4}), replace(SECOND, **LORA | {"lora_layers": "attention"}), SECOND]
    for stage in wrong if has_lora else ():
        config = _config(tmp_path / "run", stage, patch=str(result))
        begun = load_mhla(wan_pipeline().transformer, result)
        with refused("stages.0: ", "patch='"):
            train(begun, wan_data(), config)
    if not has_lora:  # a LoRA over weights that the first run has changed
        config = _config(tmp_path / "run", replace(SECOND, **LORA), patch=str(result))
        transformer = load_mhla(wan_pipeline().transformer, result)
        both = train(transformer, wan_data(), config).result
        assert both is not None and len(_files(both)) == 2
        before, after = (load_file(next(folder.glob("mhla-*"))) for folder in (result, both))
        kept = [name for name in before if ".mhla." not in name]
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in kept)
        assert list(both.glob("lora-*"))
