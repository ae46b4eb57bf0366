import random

import pytest
import torch

from studies.adaptation.digits import FRAMES, MOTIONS, TINY, Scene, load_digits, locate


def test_splits_are_disjoint_and_complete():
    train, held_out = load_digits("train"), load_digits("held-out")
    assert len(train.labels) + len(held_out.labels) == 1797
    assert len(held_out.labels) == 360
    assert set(held_out.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY)
def test_a_scene_is_a_function_of_its_seed_and_read_as_its_prompt_says(tiny):
    digits, chance = load_digits("train"), random.Random(3)
    scene = tiny.random_scene(chance)
    first, again, other = (tiny.draw(scene, digits, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (FRAMES if tiny.is_video else 1, tiny.picture_size, tiny.picture_size)
    assert first.min() >= 0 and first.max() <= 1
    for scene in (tiny.random_scene(chance) for _ in range(30)):
        assert tiny.scene(tiny.prompt(scene)) == scene
        assert 1 <= len(scene.labels) <= tiny.most_digits


def test_captions_read_as_english():
    assert Scene((7,), "left").caption == "a seven moving left"
    assert Scene((3, 8), "bouncing").caption == "a three and an eight bouncing"


@pytest.mark.parametrize("motion", MOTIONS)
def test_digits_move_as_the_caption_says_and_stay_in_their_fields(motion):
    scene = Scene((5, 2), motion)
    clip = TINY["wan"].draw(scene, load_digits("train"), seed=4)
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
