import json
import re
from pathlib import Path

import pytest

from mhla_diffusers import MHLAConfig
from mhla_diffusers.training import TrainingConfig

TEXT = """
output: outputs/run
patch: {blocks: [2, 2, 2]}
steps: 20
learning_rate: 0.001
trainable: all
objectives: {diffusion: 1.0, distillation: 0.5}
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
    assert TrainingConfig.read(json.loads(json.dumps(config.to_dict()))) == config
    overrides = ["steps=7", "validation.every=2", "patch.layers=2/3", "seed=1", "seed=3", "ema_decay=0.9"]
    config = TrainingConfig.from_yaml(path, overrides)
    assert (config.steps, config.validation.every, config.seed, config.ema_decay) == (7, 2, 3, 0.9)
    assert isinstance(config.patch, MHLAConfig) and config.patch.layers == "2/3"


@pytest.mark.parametrize(
    ("text", "override", "named"),
    [
        (TEXT, "objectives.transfr=1", ["objectives", "'transfr'", "'transfer'"]),
        (TEXT, "patch.block=[2]", ["patch", "'block'", "'blocks'"]),
        (TEXT, "trainable=lora", ["lora_rank"]),
        (TEXT, "lora_rank=4", ["lora_rank=4"]),
        (TEXT, "objectives={diffusion: 0}", ["objectives", "transfer"]),
        (TEXT, "objectives.transfer=1", ["objectives", "patch: outputs/transfer/result"]),
        (TEXT, "patch=null", ["patch"]),
        (TEXT, "base_dtype=int8", ["base_dtype='int8'", "trainable: lora", "gradient_checkpointing: true"]),
        (TEXT, "optimizer=schedule-free ema_decay=0.9", ["'schedule-free'", "ema_decay=0.9"]),
        (TEXT, "optimizer=schedule-free scheduler=cosine", ["'schedule-free'", "scheduler='cosine'"]),
        (TEXT, "data={a: 3, b: 0}", ["'b': 0}: 0 must be greater than 0"]),
        (TEXT, "data=3", ["data=3", "string or", "dictionary"]),
        (TEXT, "patch={blocks: [2, 2, 2], layers: none}", ["patch", "layers='none'"]),
        (TEXT.replace("every", "evry"), "seed=1", ["run.yaml", "validation", "'evry'", "'every'"]),
    ],
)
def test_errors_name_file_line_and_setting(path: Path, text: str, override: str, named: list[str]) -> None:
    path.write_text(text)
    overrides = [override] if "{" in override else override.split()
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, named))):
        TrainingConfig.from_yaml(path, overrides)
