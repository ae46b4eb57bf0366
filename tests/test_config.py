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
    with pytest.raises(ValueError, match="need blocks"):
        MHLAConfig.from_dict({"feature_map": "relu"})


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


TOKEN = {"blocks": (4,), "causal": "token", "block_length": 4}
CONTENT = {"sparse": "content"}
REFUSED = [
    # settings besides blocks=(2, 2), offending value
    ({"blocks": 4}, "blocks=4"),
    ({"blocks": None}, "blocks=None"),
    ({"blocks": ()}, "0 axes"),
    ({"blocks": (1, 1, 1, 1)}, r"\(1, 1, 1, 1\) has 4 axes"),
    ({"blocks": (0, 2)}, "got 0"),
    ({"blocks": (2.5, 2)}, r"got 2\.5"),
    ({"blocks": (2, np.float64(2.0))}, r"got 2\.0"),
    ({"blocks": (2, np.True_)}, "got True"),
    ({"blocks": (9999, 9999)}, "99,980,001 blocks, .*8,192"),
    ({"block": 3}, "'block'; did you mean 'blocks'"),
    ({"layers": None}, "layers=None"),
    ({"layers": "most"}, r"'most'.*'all'.*'2/3'.*\[0, 2, -1\]"),
    ({"layers": 1.5}, r"layers=1\.5"),
    ({"layers": float("inf")}, "layers=inf"),
    ({"layers": "1/0"}, "'1/0'"),
    ({"layers": [0.5]}, r"got 0\.5"),
    ({"layers": np.array([0.5, 1.0])}, r"got 0\.5"),
    ({"layers": ["attn1"]}, "got 'attn1'"),
    ({"feature_map": "relo"}, "'relo'; did you mean 'relu'"),
    ({"feature_map": "zzz"}, r"'zzz'.*relu.*elu\+1.*register_feature_map"),
    ({"feature_map": 3}, "feature_map=3"),
    ({"feature_map": "identity"}, "'identity' is signed"),
    ({"normalize": False}, "normalize=False .*output_norm=True"),
    ({"normalize": "false"}, "normalize='false'"),
    ({"output_norm": "no"}, "output_norm='no'"),
    ({"rope": "during"}, "'during' .*allowed: 'after', 'before'"),
    ({"mixing_init": "local"}, "'local' .*allowed: 'locality', 'uniform'"),
    ({"eps": -1.0}, r"eps=-1\.0"),
    ({"eps": float("inf")}, "eps=inf"),
    ({"eps": float("nan")}, "eps=nan"),
    ({"eps": 1e30}, r"eps=1e\+30"),
    ({"eps": "small"}, "eps='small'"),
    ({"convolution": 4}, "convolution=4"),
    ({"convolution": "3"}, "convolution='3'"),
    ({"convolution": 2.5}, r"convolution=2\.5"),
    ({"block_length": 4}, "block_length=4 .*causal='token'"),
    ({"beyond": "relative"}, "beyond='relative' .*causal='token'"),
    (TOKEN | {"causal": "tokens"}, "'tokens'"),
    (TOKEN | {"beyond": "further"}, "'further'"),
    (TOKEN | {"block_length": None}, "block_length=None"),
    (TOKEN | {"block_length": 0}, "block_length=0"),
    (TOKEN | {"blocks": (2, 2)}, r"blocks=\(2,\).*causal='block'"),
    (TOKEN | CONTENT, "sparse='content' .*causal='token'"),
    ({"sparse": "own"}, "sparse='own' .*causal=None"),
    (TOKEN | {"convolution": 3}, "convolution"),
    (TOKEN | {"clamp_blocks": True}, "clamped"),
    (TOKEN | {"blocks": (1,), "beyond": "relative"}, "at least two blocks"),
    (TOKEN | {"mixing_clip": False}, "mixing_clip=False"),
    (TOKEN | {"causal": "block", "sparse": "own", "mixing_clip": False}, "mixing_clip=False"),
    ({"sparse": "window"}, "'window' .*allowed: 'none', 'content', 'own'"),
    (CONTENT | {"normalize": False, "output_norm": True}, "normalize=True"),
    (CONTENT | {"eps": 0.0}, r"eps=0\.0"),
    ({"sparse": "none", "block_size": 16}, "block_size=16 .*sparse='none'"),
    ({"sparse": "none", "density": 0.1}, r"density=0\.1 .*sparse='none'"),
    (CONTENT | {"block_size": 0}, "block_size=0"),
    (CONTENT | {"block_size": 10**9}, "block_size=1000000000 .*1024"),
    (CONTENT | {"block_size": True}, "block_size=True"),
    (CONTENT | {"block_size": "64"}, "block_size='64'"),
    (CONTENT | {"block_size": 64, "key_block_size": 24}, "key_block_size=24"),
    (CONTENT | {"key_block_size": 32}, "block_size=None"),
    (CONTENT | {"order": "place"}, "order='place'"),
    ({"sparse": "none", "order": "curve"}, "order=curve"),
    ({"sparse": "none", "key_block_size": 16}, "key_block_size=16 has no effect"),
    ({"sparse": "none", "linear_branch": True}, "linear_branch=True"),
    (CONTENT | {"density": 0.0}, r"density=0\.0"),
    (CONTENT | {"density": "5%"}, "density='5%'"),
    (CONTENT | {"pooled": 1}, "pooled=1"),
    (CONTENT | {"pooled": False, "fit_pooled_bias": True}, "pooled=False"),
    (CONTENT | {"exact_tiles": (2, 2)}, "'exact_tiles'"),
]


@pytest.mark.parametrize(("settings", "value"), REFUSED, ids=str)
def test_settings_that_do_not_go_are_named(settings, value):
    with pytest.raises(ValueError, match=f"(?i){value}"):
        MHLAConfig.from_dict({"blocks": (2, 2)} | settings)


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


def test_what_says_more_of_a_sparse_branch_goes_with_it():
    config = MHLAConfig(blocks=(2, 2), sparse="content", block_size=16, density=0.25)
    assert (config.rope, config.listed, config.fits_pooled_bias) == ("before", 0.25, True)
    assert (config.listed_on((8, 8)), config.listed_on((4, 4)), config.listed_on((8, 9))) == (0.25, 1, 0.2)
    plain = config.replace(sparse="none")
    assert plain == MHLAConfig(blocks=(2, 2))
    assert not config.replace(pooled=False).fits_pooled_bias
    assert config.replace(fit_pooled_bias=False).learns_pooled_bias
    causal = config.replace(causal="block", block_length=2)
    assert (causal.sparse, causal.block_size) == ("own", None)
    assert causal.replace(causal=None).sparse == "none"


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        ((8, 8), (4, 4)),
        ((9, 8, 8), (8, 4)),
        ((32, 32), (16, 16)),
        ((37, 37), (16, 16)),
        ((74, 74), (64, 32)),
        ((91, 91), (64, 64)),
        ((21, 30, 50), (64, 64)),
    ],
)
def test_block_sizes_that_are_left_out_fit_the_grid(grid, sizes):
    config = MHLAConfig(blocks=(1,) * len(grid), sparse="content")
    rule = config.rule_on(grid)
    assert (rule.block_size, rule.key_block_size, rule.order, rule.density) == (*sizes, "content", 0.05)
    given = config.replace(block_size=48, key_block_size=24).rule_on(grid)
    assert (given.block_size, given.key_block_size) == (48, 24)
    assert config.replace(block_size=32).rule_on(grid).key_block_size == 32


def test_where_rope_acts_follows_the_sparse_branch_unless_it_was_given():
    config = MHLAConfig(blocks=(2, 2), sparse="content")
    assert config.replace(eps=0.1).replace(sparse="none").rope == "after"
    assert config.replace(rope="before").replace(sparse="none").rope == "before"
    assert MHLAConfig.from_dict(config.to_dict()).replace(sparse="none").rope == "before", "as it was trained"
