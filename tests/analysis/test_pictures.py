"""Pictures of attention maps and mixing matrices."""

import pytest
import torch
from PIL import Image

from mhla_diffusers.analysis.pictures import (
    draw_attention_maps,
    draw_mixing_matrices,
    middle_of,
    side_by_side,
)


def test_places_of_tokens_in_the_picture():
    values = torch.arange(24.0)
    picture = side_by_side(values, (2, 3, 4))
    assert picture.shape == (3, 9)
    assert picture[:, 4].isnan().all()
    assert picture[:, :4].equal(values[:12].view(3, 4)) and picture[:, 5:].equal(values[12:].view(3, 4))
    assert middle_of((3, 4, 4)) == 26
    assert side_by_side(values[:12], (3, 4)).equal(values[:12].view(3, 4))


def test_brightest_point_of_a_map_is_where_the_attention_is(tmp_path):
    pytest.importorskip("matplotlib")
    row = torch.zeros(16)
    row[6] = 1
    with Image.open(draw_attention_maps({"layer": row}, (4, 4), 9, tmp_path / "map.png")) as image:
        pixels = image.convert("L")
        bright = [i for i, value in enumerate(pixels.crop((0, 60, 330, 320)).tobytes()) if 200 < value < 254]
        assert len(bright) > 500


def test_negative_weights_are_not_drawn_as_zero(tmp_path):
    pytest.importorskip("matplotlib")
    matrix = torch.zeros(4, 4)
    matrix[1, 1], matrix[2, 2] = 1, -1
    for weights, has_blue in ((matrix, True), (matrix.abs(), False)):
        with Image.open(draw_mixing_matrices({"layer": weights}, tmp_path / "matrix.png")) as image:
            red, _, blue = image.convert("RGB").crop((0, 0, 400, 300)).split()
        pairs = zip(red.tobytes(), blue.tobytes(), strict=True)
        assert (sum(r < 30 and b > 80 for r, b in pairs) > 300) == has_blue
