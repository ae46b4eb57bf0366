"""MHLAConfig and the choice of layers."""

import dataclasses

import pytest

from mhla_diffusers import MHLAConfig


def test_round_trip_and_immutability():
    config = MHLAConfig(blocks=[7, 3, 5], layers=[0, -1], output_gate=True)
    assert MHLAConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["blocks"] == [7, 3, 5]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.blocks = (1, 1, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"blocks": (2, 2), "normalize": False}, "normalize=False .* set output_norm=True"),
        ({"blocks": (2, 2), "feature_map": "identity"}, "feature_map='identity' is signed"),
        ({"blocks": (2, 2), "feature_map": "relo"}, "did you mean 'relu'"),
        ({"blocks": (2, 2), "rope": "no"}, "rope='no' is unknown; allowed: 'after', 'before'"),
        ({"blocks": (2, 2), "mixing_init": "random"}, "mixing_init='random' is unknown; allowed: 'locality'"),
        ({"blocks": (2, 2), "convolution": 4}, "convolution=4 must be an odd kernel size"),
        ({"blocks": (2, 2), "eps": -1.0}, "eps=-1.0 must be from 0 to 1"),
        ({"blocks": (2, 2), "layers": "most"}, "layers='most' is unknown"),
        ({"blocks": (2, 2), "layers": 1.5}, "layers=1.5 is unknown"),
        ({"blocks": (2, 2), "layers": "1/0"}, "layers='1/0' is unknown"),
        ({"blocks": (2, 2), "layers": [0.5]}, "must hold layer indices, got 0.5"),
        ({"blocks": ()}, "has 0 axes"),
        ({"blocks": (2, 2), "block": 3}, "Unknown MHLA setting 'block'; did you mean 'blocks'"),
        ({"feature_map": "relu"}, "need blocks"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        MHLAConfig.from_dict(settings)
