import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from mhla_diffusers import MHLAConfig
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig

from ..scripts import CONFIGS, script

load_classify_config = script("classify").load_classify_config
load_language_config = script("language").load_language_config

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


def test_yaml_and_dict_round_trip(path: Path) -> None:
    config = TrainingConfig.from_yaml(path)
    assert config.patch == MHLAConfig(blocks=(2, 2, 2))
    assert config.stages[0].learning_rate == 1e-4
    assert config.total_steps == 30
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_overrides(path: Path) -> None:
    overrides = ["stages.1.steps=7", "validation.every=2", "patch.layers=2/3", "seed=3", "ema_decay=0.9"]
    config = TrainingConfig.from_yaml(path, overrides)
    assert (config.stages[1].steps, config.validation.every, config.seed) == (7, 2, 3)
    assert isinstance(config.patch, MHLAConfig)
    assert config.patch.layers == "2/3"
    assert config.ema_decay == 0.9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bach_size=2", r"'bach_size'; did you mean 'batch_size'"),
        ("stages.0.learning_rat=1", r"'stages.0.learning_rat'; did you mean 'learning_rate'"),
        ("stages.0.objectives.transfr=1", r"'stages.0.objectives.transfr'; did you mean 'transfer'"),
        ("patch.block=[2]", r"'block'; did you mean 'blocks'"),
        ("stages.5.steps=1", r"no '5' to set; the list has 2 entries"),
        ("stages.0.steps=many", r"stages.0.steps='many' must be of type int"),
        ("stages.0.steps=0", r"stages.0: steps=0 must be positive"),
        ("stages.0.trainable=some", r"trainable='some' .* 'mhla', 'attention', 'all', 'lora'"),
        ("stages.0.trainable=lora", r"trainable=lora needs a positive lora_rank"),
        ("stages.1={steps: 1, learning_rate: 1, trainable: lora, lora_rank: 4, objectives: {diffusion: 1}}", None),
        (
            "stages.0={steps: 1, learning_rate: 1, trainable: lora, lora_rank: 4, objectives: {diffusion: 1}}",
            "stages.1: ",
        ),
        ("stages.0.lora_rank=4", r"lora_rank=4 is for trainable=lora"),
        ("stages.0.warmup_steps=11", r"warmup_steps=11 .* steps=10"),
        ("stages.0.objectives.transfer=0", r"at least one positive"),
        ("stages.0.objectives.transfer=-1", r"transfer=-1.0 must be zero or positive"),
        ("stages.0.mixing_learning_rate=0", r"mixing_learning_rate=0.0 must be positive"),
        ("validation.samples=-1", r"validation.samples=-1 must be zero or positive"),
        ("context_parallel.ring=0", r"context_parallel.ring=0 must be positive"),
        ("max_skipped=0", r"max_skipped=0 must be positive"),
        ("ema_decay=1", r"ema_decay=1.0 must be in \(0, 1\)"),
        ("stages=[]", r"at least one stage"),
        ("patch=null", r"stages.0: .* need a patch"),
        ("precision=fp16", r"precision='fp16' .*: float32 \(or fp32, no\), bfloat16 \(or bf16\)\."),
        ("prompt_dropout=1", r"prompt_dropout=1.0 must be in \[0, 1\)"),
        ("batch_size=true", r"batch_size=True must be of type int"),
        ("stages=3", r"stages must be a list, got 3"),
        ("stages.0=3", r"stages.0 must hold named settings, got 3"),
        ("seed", r"must look like key=value"),
    ],
)
def test_errors_name_the_setting_and_the_way_out(path: Path, override: str, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        TrainingConfig.from_yaml(path, [override])


def test_missing_settings_and_file(path: Path) -> None:
    for text, message in (("output: here\n", "lacks stages"), ("a: [", "not valid YAML"), ("[]", "named settings")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            TrainingConfig.from_yaml(path)
    with pytest.raises(FileNotFoundError, match="There is no"):
        TrainingConfig.from_yaml(path.with_name("none.yaml"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bf16", "bf16"), ("bfloat16", "bf16"), ("no", "no"), ("'no'", "no"), ("float32", "no"), ("fp32", "no")],
)
def test_a_precision_has_several_spellings_and_one_meaning(path: Path, written: str, meant: str) -> None:
    """As the type of weights of other commands has; ``no`` without quotes is False in YAML."""
    config = TrainingConfig.from_yaml(path, [f"precision={written}"])
    assert config.precision == config.to_dict()["precision"] == meant
    for load, name in ((load_language_config, "language-tiny"), (load_classify_config, "classify-digits")):
        assert load(CONFIGS / f"{name}.yaml", [f"precision={written}"]).precision == meant


@pytest.mark.parametrize(
    ("load", "name", "words"),
    [
        (TrainingConfig.from_yaml, "language-tiny", "finetune/language.py, not of mhla finetune"),
        (TrainingConfig.from_yaml, "classify-digits", "finetune/classify.py, not of mhla finetune"),
        (load_language_config, "tiny-wan", "mhla finetune, not of finetune/language.py"),
        (load_language_config, "classify-digits", "finetune/classify.py, not of finetune/language.py"),
        (load_classify_config, "tiny-wan", "mhla finetune, not of finetune/classify.py"),
        (load_classify_config, "language-tiny", "finetune/language.py, not of finetune/classify.py"),
    ],
)
def test_a_configuration_of_another_script_is_told(load: Callable[[Path], object], name: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.yaml is a configuration of {words}"):
        load(CONFIGS / f"{name}.yaml")


def test_settings_of_a_stage_keep_their_places() -> None:
    """Settings that are added come last, so that a call by position means what it did."""
    stage = StageConfig(2, 1e-3, "lora", ObjectiveWeights(distillation=1.0), 5e-3, 4, "blocks", None, "cosine", 1)
    assert (stage.mixing_learning_rate, stage.lora_rank, stage.lora_layers) == (5e-3, 4, "blocks")
    assert (stage.scheduler, stage.warmup_steps, stage.guidance) == ("cosine", 1, 1.0)
