"""Scenes of digits, and the classifier of the studies that judges those that are generated."""

import random

import pytest
import torch

from mhla_diffusers.tiny import load_tiny
from studies.adaptation.digits import MOTIONS, TINY, Scene, load_digits, locate, parse_caption
from studies.adaptation.judging import Yardstick, digit_shown, load_classifier, picture_features

from ..refusals import refused


@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY)
def test_a_scene_is_a_function_of_its_seed_and_read_as_its_prompt_says(tiny):
    digits, chance = load_digits("train"), random.Random(3)
    scene = tiny.random_scene(chance)
    first, again, other = (tiny.draw(scene, digits, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (tiny.frames, tiny.picture_size, tiny.picture_size)
    assert first.min() >= 0 and first.max() <= 1
    for scene in (tiny.random_scene(chance) for _ in range(30)):
        assert tiny.scene(tiny.prompt(scene)) == scene
        assert 1 <= len(scene.labels) <= tiny.most_digits


@pytest.mark.parametrize("motion", MOTIONS)
def test_digits_move_as_the_caption_says_and_stay_in_their_fields(motion):
    scene = Scene((5, 2), motion)
    clip = TINY["wan"].draw(scene, load_digits("train"), seed=4)
    for field in scene.fields(64):
        centre = locate(clip, field)
        moved = centre[-1] - centre[0]
        if motion == "bouncing":
            assert centre.diff(dim=0).norm(dim=1).mean() > 1
        else:
            axis, sign = {"up": (0, -1), "down": (0, 1), "left": (1, -1), "right": (1, 1)}[motion]
            assert sign * moved[axis] > 10 and moved[1 - axis].abs() < 2


@pytest.mark.parametrize("family", TINY)
def test_pipeline_generates_the_digits_that_it_is_asked_for(family):
    tiny = TINY[family]
    yardstick = Yardstick(tiny, tiny.random_scenes(4 if tiny.is_video else 10, seed=7), seed=7)
    pictures = yardstick.generate(load_tiny(family))
    shape = tiny.frames, tiny.picture_size, tiny.picture_size
    assert all(picture.shape == shape for picture in pictures)
    # by far more often than chance, 0.1
    assert yardstick.accuracy(pictures) >= 0.3
    assert yardstick.accuracy(yardstick.real) >= 0.9
    assert yardstick.distance(yardstick.real) == pytest.approx(0, abs=1e-3)
    assert yardstick.distance(pictures) > 1


def test_every_frame_is_judged_by_the_digits_that_it_shows():
    yardstick = Yardstick(TINY["wan"], [Scene((3, 8), "left"), Scene((5,), "up")], seed=0)
    right = torch.cat(yardstick.recognised(yardstick.real))
    assert right.shape == (3, 9) and right.float().mean() > 0.8
    half = [torch.cat([clip[:4], torch.zeros_like(clip[4:])]) for clip in yardstick.real]
    found = torch.cat(yardstick.recognised(half))
    # black frames show none of the digits, unless the classifier takes nothing for one that was asked for
    nothing = yardstick.classifier(torch.zeros(1, 16, 16)).argmax()
    asked = torch.tensor([3, 8, 5])
    assert torch.equal(found[:, :4], right[:, :4])
    assert torch.equal(found[:, 4:], (asked == nothing)[:, None].expand(3, 5))


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
    image = as_image(TINY[family].draw(scene, load_digits("held-out"), seed=1))
    assert digit_shown([image, image], [text, wrong]).tolist() == pytest.approx([1.0, part], abs=0.1)


@pytest.mark.parametrize(("size", "text", "match"), [((64, 64), "a cat", "'a cat'"), ((128, 64), "7", "128x64")])
def test_pictures_without_digits_that_could_be_found_are_refused(size, text, match):
    with refused(match):
        digit_shown([torch.zeros(3, *size, dtype=torch.uint8)], [text])


def test_features_are_of_any_size_and_of_videos():
    real = Yardstick(TINY["dit"], [Scene((label,)) for label in range(10)], seed=0).real
    images = torch.stack([as_image(picture) for picture in real])
    expected = picture_features(images)
    classes = load_classifier().head
    assert (classes(expected).argmax(dim=1) == torch.arange(10)).float().mean() >= 0.9
    larger = picture_features(images.repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2))
    assert torch.equal(classes(larger).argmax(dim=1), classes(expected).argmax(dim=1))
    # the first video shows one digit, the second one all of them
    videos = picture_features(torch.stack([images[:1].expand(10, -1, -1, -1), images]))
    torch.testing.assert_close(videos, torch.stack([expected[0], expected.mean(dim=0)]))
