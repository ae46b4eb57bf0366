"""Digits that are generated are judged by the classifier that ships with the package."""

import random

import pytest
import torch

from mhla_diffusers.demo.few_steps import judge_few_steps
from mhla_diffusers.demo.judging import (
    Yardstick,
    digit_accuracy,
    digit_features,
    digit_shown,
    generate_scenes,
    load_classifier,
    picture_features,
    real_scenes,
)
from mhla_diffusers.tiny import TINY, load_tiny
from mhla_diffusers.tiny.digits import Scene, compose, load_digits, parse_caption


@pytest.mark.parametrize("family", TINY)
def test_pipeline_generates_the_digits_that_it_is_asked_for(family):
    tiny, chance = TINY[family], random.Random(7)
    scenes = [tiny.random_scene(chance) for _ in range(4 if tiny.is_video else 10)]
    pictures = generate_scenes(load_tiny(family), tiny, scenes, seed=7)
    assert all(picture.shape == (9 if tiny.is_video else 1, 64, 64) for picture in pictures)
    # by far more often than chance, 0.1
    assert digit_accuracy(pictures, scenes, tiny, load_classifier()) >= 0.3


@pytest.mark.parametrize("family", TINY)
def test_same_seed_gives_the_same_picture(family):
    tiny, pipe = TINY[family], load_tiny(family)
    scenes = [tiny.random_scene(random.Random(3))] * 2
    # the second scene has the next seed
    (first, second), (next_first, _), (again, _) = (
        generate_scenes(pipe, tiny, scenes, seed=seed, num_inference_steps=2) for seed in (1, 2, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, next_first)


def test_real_digits_are_judged_right():
    tiny, chance = TINY["wan"], random.Random(1)
    scenes = [tiny.random_scene(chance) for _ in range(10)]
    pictures = real_scenes(scenes, tiny, load_digits("held-out"), seed=1)
    classifier = load_classifier()
    assert digit_accuracy(pictures, scenes, tiny, classifier) >= 0.9
    assert digit_features(pictures, scenes, tiny, classifier).shape[1] == 64


def as_image(picture):
    image = (255 * picture).round().to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
    return image[0] if len(image) == 1 else image


@pytest.mark.parametrize(
    ("family", "text", "wrong", "part"),
    [
        ("dit", "7", "4", 0.0),
        ("sana", "a seven", "a four", 0.0),
        ("sana", "a three and an eight", "a three and a four", 0.5),
        ("wan", "a two and a six moving left", "a four and a six moving left", 0.5),
    ],
)
def test_recognised_digits_are_counted(family, text, wrong, part):
    scene = Scene((int(text),)) if text.isdigit() else parse_caption(text)
    image = as_image(compose(scene, load_digits("held-out"), TINY[family].digit_size, seed=1))
    assert digit_shown([image, image], [text, wrong]).tolist() == pytest.approx([1.0, part], abs=0.1)


@pytest.mark.parametrize(
    ("size", "text", "message"),
    [((64, 64), "a cat", "'a cat'.*one or two digits"), ((128, 64), "7", "picture of '7' has 128x64 pixels.*64x64")],
)
def test_pictures_without_digits_that_could_be_found_are_refused(size, text, message):
    with pytest.raises(ValueError, match=message):
        digit_shown([torch.zeros(3, *size, dtype=torch.uint8)], [text])


def test_features_are_of_any_size_and_of_videos():
    scenes = [Scene((label,)) for label in range(10)]
    images = torch.stack([as_image(x) for x in real_scenes(scenes, TINY["dit"], load_digits("held-out"), seed=0)])
    expected = picture_features(images)
    assert (expected.probabilities.argmax(dim=1) == torch.arange(10)).float().mean() >= 0.9
    larger = picture_features(images.repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2))
    assert torch.equal(larger.probabilities.argmax(dim=1), expected.probabilities.argmax(dim=1))
    # the first video shows one digit, the second one all of them
    videos = picture_features(torch.stack([images[:1].expand(10, -1, -1, -1), images]))
    assert videos.pooled.shape == (2, 64)
    torch.testing.assert_close(videos.pooled, torch.stack([expected.pooled[0], expected.pooled.mean(dim=0)]))
    torch.testing.assert_close(videos.probabilities[1], expected.probabilities.mean(dim=0))


def test_distilled_patch_is_judged_in_its_steps():
    found = judge_few_steps(TINY["wan"], Yardstick.of(TINY["wan"], 2, 0))
    assert len(found.pictures) == 2
    assert found.digit_accuracy > 0.3
    assert "4 steps" in found.remark
    assert judge_few_steps(TINY["dit"], Yardstick.of(TINY["dit"], 2, 0)) is None
