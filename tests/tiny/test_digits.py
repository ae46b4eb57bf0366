import random

import pytest
import torch

from mhla_diffusers.tiny import TINY
from mhla_diffusers.tiny.digits import (
    FRAMES,
    MOTIONS,
    Scene,
    compose,
    load_digits,
    locate,
    parse_caption,
)


def test_splits_are_disjoint_and_complete():
    train, held_out = load_digits("train"), load_digits("held-out")
    assert len(train.labels) + len(held_out.labels) == 1797
    assert len(held_out.labels) == 360
    assert set(held_out.labels.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("read", "given", "named"),
    [(load_digits, "validation", "'validation'.*'train' or 'held-out'"), (parse_caption, "a cat", "'a cat'")],
)
def test_unknown_splits_and_captions_without_digits_are_refused(read, given, named):
    with pytest.raises(ValueError, match=named):
        read(given)


@pytest.mark.parametrize("family", TINY)
def test_scene_is_a_function_of_its_seed(family):
    digits = load_digits("train")
    tiny = TINY[family]
    scene = tiny.random_scene(random.Random(3))
    first, again, other = (tiny.draw(scene, digits, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (FRAMES if tiny.is_video else 1, tiny.picture_size, tiny.picture_size)
    assert first.min() >= 0
    assert first.max() <= 1


def test_captions_read_as_english():
    assert Scene((7,), "left").caption == "a seven moving left"
    assert Scene((3, 8), "bouncing").caption == "a three and an eight bouncing"


@pytest.mark.parametrize("motion", MOTIONS)
def test_digits_move_as_the_caption_says_and_stay_in_their_fields(motion):
    scene = Scene((5, 2), motion)
    clip = compose(scene, load_digits("train"), 24, seed=4, side=64)
    for field in scene.fields(64):
        centre = locate(clip, field)
        moved = centre[-1] - centre[0]
        if motion in ("up", "down"):
            assert moved[0] * (1 if motion == "down" else -1) > 10
            assert moved[1].abs() < 2
        if motion in ("left", "right"):
            assert moved[1] * (1 if motion == "right" else -1) > 10
            assert moved[0].abs() < 2
        if motion == "bouncing":
            assert (centre[1:] - centre[:-1]).norm(dim=1).mean() > 1
