import json
import re
from pathlib import Path

import pytest

from mhla_diffusers import MHLAConfig
from mhla_diffusers.cli import _with_causes as with_causes
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig

from ..refusals import refused

TEXT = """
output: outputs/run
patch: {blocks: [2, 2, 2]}
stages:
  - {steps: 10, learning_rate: 1e-4, trainable: mhla, objectives: {transfer: 1}}
  - {steps: 20, learning_rate: 0.001, trainable: all, objectives: {diffusion: 1.0, distillation: 0.5}}
validation: {samples: 4, every: 5}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_yaml_and_dict_round_trip_and_overrides(path: Path) -> None:
    config = TrainingConfig.from_yaml(path)
    assert config.patch == MHLAConfig(blocks=(2, 2, 2))
    assert config.stages[0].learning_rate == 1e-4 and config.total_steps == 30
    assert TrainingConfig.read(json.loads(json.dumps(config.to_dict()))) == config
    overrides = ["stages.1.steps=7", "validation.every=2", "patch.layers=2/3", "seed=3", "ema_decay=0.9"]
    config = TrainingConfig.from_yaml(path, overrides)
    assert (config.stages[1].steps, config.validation.every, config.seed, config.ema_decay) == (7, 2, 3, 0.9)
    assert isinstance(config.patch, MHLAConfig) and config.patch.layers == "2/3"


LORA = "{steps: 1, learning_rate: 1, trainable: lora, lora_rank: 4, objectives: {diffusion: 1}}"


@pytest.mark.parametrize(
    ("text", "override", "named"),
    [
        (TEXT, "bach_size=2", ["'bach_size'", "'batch_size'"]),
        (TEXT, "stages.0.learning_rat=1", ["'stages.0.learning_rat'", "'learning_rate'"]),
        (TEXT, "stages.0.objectives.transfr=1", ["'stages.0.objectives.transfr'", "'transfer'"]),
        (TEXT, "patch.block=[2]", ["patch", "'block'", "'blocks'"]),
        (TEXT, "stages.0.steps=0", ["stages.0.steps=0", "greater than 0"]),
        (TEXT, "stages.0.trainable=lora", ["stages.0", "lora_rank"]),
        (TEXT, f"stages.0={LORA}", ["stages.1"]),
        (TEXT, "stages.0.lora_rank=4", ["lora_rank=4"]),
        (TEXT, "stages.0.warmup_steps=11", ["warmup_steps=11", "steps=10"]),
        (TEXT, "stages.0.objectives.transfer=0", ["stages.0", "transfer"]),
        (TEXT, "stages=[]", ["stages=[]"]),
        (TEXT, "patch=null", ["stages.0", "patch"]),
        (TEXT, "precision=fp16", ["precision='fp16'", "float32", "bf16"]),
        (TEXT, "stages.0=3", ["stages.0=3"]),
        (TEXT, "patch=''", ["patch=''"]),
        (TEXT, "export_every=30s", ["export_every='30s'"]),
        ("output: here\n", "seed=1", ["stages"]),
        ("[]", "seed=1", ["run.yaml"]),
        (TEXT.replace("steps: 20", "steps: 0"), "seed=1", ["run.yaml, line 6", "stages.1.steps=0"]),
        (TEXT.replace("every", "evry"), "seed=1", ["run.yaml, line 7", "'validation.evry'", "'every'"]),
    ],
)
def test_errors_name_file_line_and_setting(path: Path, text: str, override: str, named: list[str]) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, named))):
        TrainingConfig.from_yaml(path, [override])


def test_what_is_missing_is_said_once(path: Path) -> None:
    with refused("clip lacks fps, sizes") as raised:
        TrainingConfig.from_yaml(path, ["clip={frames: 5}"])
    assert with_causes(raised.value).count("lacks") == 1


def test_later_overrides_hold_and_a_file_must_exist(path: Path) -> None:
    assert TrainingConfig.from_yaml(path, [f"stages.1={LORA}"]).stages[1].lora_rank == 4
    assert TrainingConfig.from_yaml(path, ["seed=1", "seed=2"]).seed == 2
    with pytest.raises(FileNotFoundError):
        TrainingConfig.from_yaml(path.with_name("none.yaml"))


@pytest.mark.parametrize(("meant", "written"), [("bf16", ("bf16", "bfloat16")), ("no", ("no", "'no'", "fp32"))])
def test_a_precision_has_several_spellings_and_one_meaning(path: Path, meant: str, written: tuple[str, ...]) -> None:
    """As the type of weights of other commands has; ``no`` without quotes is False in YAML."""
    for spelling in written:
        config = TrainingConfig.from_yaml(path, [f"precision={spelling}"])
        assert config.precision == config.to_dict()["precision"] == meant


def test_settings_of_a_stage_keep_their_places() -> None:
    """Settings that are added come last, so that a call by position means what it did."""
    stage = StageConfig(2, 1e-3, "lora", ObjectiveWeights(distillation=1.0), 5e-3, 4, "blocks", "cosine", 1)
    assert (stage.mixing_learning_rate, stage.lora_rank, stage.lora_layers) == (5e-3, 4, "blocks")
    assert (stage.scheduler, stage.warmup_steps, stage.guidance) == ("cosine", 1, 1.0)
