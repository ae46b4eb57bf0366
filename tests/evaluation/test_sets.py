"""Which samples a set consists of."""

import pytest

from mhla_diffusers.evaluation.sets import class_samples, prompt_samples
from mhla_diffusers.generation.record import Sample


def test_classes_are_balanced_or_drawn():
    assert [s.text for s in class_samples(12, 5)] == list("012340123401")
    drawn = [s.text for s in class_samples(300, 3, "random", seed=4)]
    assert drawn == [s.text for s in class_samples(300, 3, "random", seed=4)]
    assert 70 < drawn.count("1") < 130
    with pytest.raises(ValueError, match="order='sorted'"):
        class_samples(3, 3, "sorted")


def test_prompts_are_numbered_with_their_samples():
    made = prompt_samples(["a", "b"], 2, ".png")
    assert made[1:3] == [Sample("00000-1.png", "a"), Sample("00001-0.png", "b")]
    with pytest.raises(ValueError, match="per_prompt=0"):
        prompt_samples(["a"], 0, ".png")
