"""Longer clips of the demo: how they are judged, and what the shipped causal patch makes of them."""

import random

import pytest
import torch

from mhla_diffusers.demo.judging import load_classifier
from mhla_diffusers.demo.streaming import HEADER, Judged, judge, load_streamed, stream_scenes
from mhla_diffusers.tiny import TINY
from mhla_diffusers.tiny.digits import FRAMES, Scene, compose, load_digits

_TINY = TINY["wan"]
_STREAMED = 3


def test_every_frame_is_judged_by_the_digits_that_it_shows() -> None:
    scenes, digits = [Scene((3, 8), "left"), Scene((5,), "up")], load_digits("train")
    clips = [compose(scene, digits, _TINY.digit_size, 0) for scene in scenes]
    classifier = load_classifier()
    right = torch.tensor(judge("real", clips, scenes, _TINY, classifier).right)
    assert right.shape == (FRAMES,) and right.mean() > 0.8
    # black frames show none of the digits, unless the classifier takes nothing for one that was asked for
    nothing = classifier(torch.zeros(1, 16, 16)).argmax()
    asked = torch.tensor([label for scene in scenes for label in scene.labels])
    half = [torch.cat([clip[:4], torch.zeros_like(clip[4:])]) for clip in clips]
    found = torch.tensor(judge("half", half, scenes, _TINY, classifier).right)
    assert torch.equal(found[:4], right[:4]) and (found[4:] == (asked == nothing).float().mean()).all()


def test_a_long_clip_is_told_in_quarters() -> None:
    short, long = (Judged("x", [], [1.0] * FRAMES), Judged("x", [], [1.0] * FRAMES + [0.5] * 3 * FRAMES))
    assert short.cells == ("x", "9", "100.0%", "", "", "", "")
    assert long.cells == ("x", "36", "62.5%", "100.0%", "50.0%", "50.0%", "50.0%")
    assert len(long.cells) == len(HEADER)


def test_a_clip_of_the_shipped_patch_goes_on_as_its_shorter_one_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_TINY.call_settings, "num_inference_steps", 2)
    pipe, chance = load_streamed(_TINY), random.Random(0)
    scenes = [_TINY.random_scene(chance) for _ in range(2)]
    long = stream_scenes(pipe, _TINY, scenes, 2 * _STREAMED, seed=0)
    short = stream_scenes(pipe, _TINY, scenes, _STREAMED, seed=0)
    for one, other in zip(long, short, strict=True):
        assert one.shape == (2 * _STREAMED, 64, 64) and one.isfinite().all()
        # the autoencoder's sums of other lengths
        assert torch.allclose(one[:_STREAMED], other, atol=1e-4)
