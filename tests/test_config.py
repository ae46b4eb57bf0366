"""MHLAConfig and the choice of layers."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from mhla_diffusers import MHLAConfig


def test_round_trip_and_immutability():
    config = MHLAConfig(blocks=[7, 3, 5], layers=[0, -1], output_gate=True)
    assert MHLAConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["blocks"] == [7, 3, 5]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.blocks = (1, 1, 1)


def test_numbers_and_arrays_of_numpy_and_torch():
    """Kept as Python's own, so that they can be saved."""
    plain = MHLAConfig(
        blocks=(7, 3), layers=(1, 2), eps=0.5, convolution=3, sparse="content", block_size=16, density=0.25
    )
    config = MHLAConfig(
        blocks=(np.int64(7), torch.tensor(3)),
        layers=np.array([1, 2]),
        eps=np.float32(0.5),
        convolution=np.int32(3),
        sparse="content",
        block_size=np.int64(16),
        density=np.float64(0.25),
        normalize=np.True_,
    )
    assert config == plain
    assert json.dumps(config.to_dict()) == json.dumps(plain.to_dict())
    assert plain.replace(blocks=np.array([2, 2])).blocks == (2, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"blocks": (2, 2), "normalize": False}, "normalize=False .* set output_norm=True"),
        ({"blocks": (2, 2), "feature_map": "identity"}, "feature_map='identity' is signed"),
        ({"blocks": (9999, 9999)}, "are 99,980,001 blocks, .*; at most 8,192 are allowed"),
        ({"blocks": (2, 2), "feature_map": "relo"}, "did you mean 'relu'"),
        ({"blocks": (2, 2), "rope": "no"}, "rope='no' is unknown; allowed: 'after', 'before'"),
        ({"blocks": (2, 2), "mixing_init": "random"}, "mixing_init='random' is unknown; allowed: 'locality'"),
        ({"blocks": (2, 2), "convolution": 4}, "convolution=4 must be an odd kernel size"),
        ({"blocks": (2, 2), "eps": -1.0}, "eps=-1.0 must be from 0 to 1"),
        ({"blocks": (2, 2), "layers": "most"}, "layers='most' is unknown"),
        ({"blocks": (2, 2), "layers": 1.5}, "layers=1.5 is unknown"),
        ({"blocks": (2, 2), "layers": "1/0"}, "layers='1/0' is unknown"),
        ({"blocks": (2, 2), "layers": [0.5]}, "must hold layer indices, got 0.5"),
        ({"blocks": (2, 2), "layers": np.array([0.5, 1.0])}, "must hold layer indices, got 0.5"),
        ({"blocks": ()}, "has 0 axes"),
        ({"blocks": (2, np.float64(2.0))}, "must hold positive integers, got 2.0"),
        ({"blocks": (2, np.True_)}, "must hold positive integers, got True"),
        ({"blocks": (2, 2), "block": 3}, "Unknown MHLA setting 'block'; did you mean 'blocks'"),
        ({"feature_map": "relu"}, "need blocks"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        MHLAConfig.from_dict(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_length": 4}, "block_length=4 and beyond='error' have no effect without causal='token'"),
        ({"beyond": "relative"}, "beyond='relative' have no effect without causal='token'"),
        ({"causal": "tokens", "block_length": 4}, "causal='tokens'"),
        ({"causal": "token", "block_length": 4, "beyond": "further"}, "beyond='further'"),
        ({"causal": "token"}, "block_length=None"),
        ({"causal": "token", "block_length": 0}, "block_length=0 must be the tokens in a block"),
        (
            {"causal": "token", "block_length": 4, "blocks": (2, 2)},
            "such as blocks=\\(2,\\) for a text, or choose causal='block'",
        ),
        (
            {"causal": "token", "block_length": 4, "sparse": "content"},
            "sparse='content' does not go with causal='token'",
        ),
        ({"sparse": "own"}, "sparse='own' does not go with causal=None"),
        ({"causal": "token", "block_length": 4, "convolution": 3}, "A convolution sees later tokens"),
        ({"causal": "token", "block_length": 4, "clamp_blocks": True}, "are not clamped"),
        ({"causal": "token", "block_length": 4, "blocks": (1,), "beyond": "relative"}, "needs at least two blocks"),
        (
            {"causal": "token", "block_length": 4, "mixing_clip": False},
            "mixing_clip=False.*logarithm.*register_mixing_clip",
        ),
        (
            {"causal": "block", "block_length": 4, "sparse": "own", "mixing_clip": False},
            "mixing_clip=False.*normalize=False",
        ),
    ],
)
def test_causal_settings_that_do_not_go(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MHLAConfig(**({"blocks": (4,)} | settings))


def test_a_causal_patch_has_blocks_of_one_length_on_every_grid():
    config = MHLAConfig(blocks=(4,), causal="token", block_length=8, sparse="own")
    assert (config.grid_from((20,)), config.blocks_on((20,))) == ((32,), (4,))
    with pytest.raises(ValueError, match="has 33 tokens, more than the 4 blocks of 8.*beyond='relative'"):
        config.grid_from((33,))
    further = config.replace(beyond="relative")
    assert (further.grid_from((33,)), further.blocks_on((33,))) == ((40,), (5,))
    assert config.replace(causal=None).block_length is None


@pytest.mark.parametrize(
    "settings", [{"causal": "block"}, {"causal": "token", "normalize": False, "output_norm": True}]
)
def test_signed_matrices_may_be_causal_where_they_weigh_no_sums(settings):
    assert not MHLAConfig(blocks=(4,), block_length=4, mixing_clip=False, **settings).mixing_clip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sparse": "window"}, "sparse='window' is unknown; allowed: 'none', 'content', 'own'"),
        ({"normalize": False, "output_norm": True}, "needs normalize=True"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"sparse": "none", "block_size": 16}, "block_size=16 has no effect with sparse='none'"),
        ({"sparse": "none", "density": 0.1}, "density=0.1 has no effect with sparse='none'"),
        ({"block_size": 0}, "positive number of tokens"),
        ({"block_size": 10**9}, "at most 1024"),
        ({"block_size": True}, "positive number of tokens"),
        ({"block_size": "64"}, "positive number of tokens"),
        ({"block_size": None}, "positive number of tokens"),
        ({"density": 0.0}, r"must be in \(0, 1\]"),
        ({"density": "5%"}, "must be a number"),
        ({"pooled": 1}, "pooled=1 must be True or False"),
        ({"pooled": False, "fit_pooled_bias": True}, "pooled=False"),
        ({"exact_tiles": (2, 2)}, "Unknown MHLA setting 'exact_tiles'"),
    ],
    ids=str,
)
def test_settings_of_the_sparse_branch_that_do_not_go(settings, words):
    with pytest.raises(ValueError, match=words):
        MHLAConfig.from_dict({"blocks": (2, 2), "sparse": "content"} | settings)


def test_what_says_more_of_a_sparse_branch_goes_with_it():
    config = MHLAConfig(blocks=(2, 2), sparse="content", block_size=16, density=0.25)
    assert (config.rope, config.listed, config.fits_pooled_bias) == ("before", 0.25, True)
    assert (config.listed_on((8, 8)), config.listed_on((4, 4)), config.listed_on((8, 9))) == (0.25, 1, 0.2)
    plain = config.replace(sparse="none")
    assert plain == MHLAConfig(blocks=(2, 2))
    assert not config.replace(pooled=False).fits_pooled_bias
    assert config.replace(fit_pooled_bias=False).learns_pooled_bias
    causal = config.replace(causal="block", block_length=2)
    assert (causal.sparse, causal.block_size) == ("own", 64)
    assert causal.replace(causal=None).sparse == "none"


def test_where_rope_acts_follows_the_sparse_branch_unless_it_was_given():
    config = MHLAConfig(blocks=(2, 2), sparse="content")
    assert config.replace(eps=0.1).replace(sparse="none").rope == "after"
    assert config.replace(rope="before").replace(sparse="none").rope == "before"
    assert MHLAConfig.from_dict(config.to_dict()).replace(sparse="none").rope == "before", "as it was trained"
