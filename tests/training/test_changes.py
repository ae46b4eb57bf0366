"""Runs that go on: what may change when a run is resumed, and a result that another run begins with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics, train

from .models import tiny_wan, wan_data

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
            r"stages\.0\.learning_rate=0\.0001, which was 0\.001: .*3",
        ),
        ({"stages": (replace(FIRST, steps=2), SECOND)}, r"stages\.0\.steps=2"),
        ({"stages": (FIRST, replace(SECOND, trainable="mhla"))}, r"stages\.1\.trainable='mhla', which was 'attention'"),
        ({"stages": (FIRST, replace(SECOND, steps=1))}, r"stages\.1\.steps=1, which was 3: 2 updates"),
        ({"stages": (FIRST,)}, r"stages\.1=None"),
        ({"optimizer": "adamw8bit"}, "optimizer='adamw8bit', which was 'adamw'"),
        ({"patch": MHLAConfig(blocks=(2, 2, 1))}, r"patch\.blocks\.2=1, which was 2"),
    ],
)
def test_what_may_not_change_is_said_with_the_reason(
    changes: dict[str, Any], words: str, stopped: TrainingConfig
) -> None:
    checkpoint = Path(stopped.output) / "checkpoints" / "step-00000005"
    with pytest.raises(ValueError, match=f"{checkpoint} cannot be resumed with .*{words}"):
        train(apply_mhla(tiny_wan(), PATCH), wan_data(), replace(stopped, **changes), resume=str(checkpoint))


def test_a_stage_that_has_not_begun_may_be_removed(stopped: TrainingConfig, tmp_path: Path) -> None:
    """Its weights are in the checkpoint, as they were."""
    checkpoint = str(Path(stopped.output) / "checkpoints" / "step-00000005")
    fewer = replace(stopped, output=str(tmp_path / "fewer"), stages=(FIRST, SECOND))
    _train(fewer, checkpoint)
    _train(replace(fewer, output=str(tmp_path / "alone")))
    results = [next((tmp_path / name / "result").glob("*.safetensors")).read_bytes() for name in ("fewer", "alone")]
    assert results[0] == results[1]
