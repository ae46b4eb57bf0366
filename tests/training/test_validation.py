"""Samples of the transformer in training."""

from pathlib import Path
from typing import Any

import pytest

from mhla_diffusers.families import Clip
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.training.validation import PromptSampler

PICTURES = Clip(frames=1, fps=1.0, sizes=((32, 32),))


@pytest.fixture
def pipe() -> Any:
    return load_tiny("dit")


def test_classes_by_number_and_name_are_written(pipe: Any, tmp_path: Path) -> None:
    PromptSampler(pipe, ["7", "seven"], PICTURES, steps=2, component="transformer")(pipe.transformer, tmp_path)
    first, second = (file.read_bytes() for file in sorted(tmp_path.glob("*.png")))
    assert first == second
    assert pipe.transformer.training is False


def test_unknown_class_is_refused_before_the_training(pipe: Any) -> None:
    with pytest.raises(ValueError, match="'a cat' is no class of this DiT.*0 to 9"):
        PromptSampler(pipe, ["7", "a cat"], PICTURES, steps=2, component="transformer")
