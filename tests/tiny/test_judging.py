"""The scores that mhla eval compare takes of the tiny pipelines' pictures."""

import pytest
import torch

from mhla_diffusers.demo.judging import digit_shown
from mhla_diffusers.tiny.digits import DIGIT_SIZES, Scene, compose, load_digits, parse_caption


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
    picture = compose(scene, load_digits("held-out"), DIGIT_SIZES[family], seed=1)
    image = (255 * picture).round().to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
    image = image[0] if len(image) == 1 else image
    assert digit_shown([image, image], [text, wrong]).tolist() == pytest.approx([1.0, part], abs=0.1)
