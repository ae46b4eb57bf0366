"""The three kinds of settings, which one names choose, and what of them is refused."""

import json

import pytest

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig
from mhla_diffusers.config import kind_of

from .refusals import refused

TOKEN = {"blocks": (4,), "causal": "token", "block_length": 4}
KINDS = [
    # settings, what they are of
    ({"density": 0.1}, SparseConfig),
    ({"far": "means", "layers": "2/3"}, SparseConfig),
    ({"blocks": (2, 2), "convolution": 3}, MHLAConfig),
    ({"clamp_blocks": True, "blocks": (2, 2)}, MHLAConfig),
    (TOKEN, CausalConfig),
    ({"blocks": (2, 2), "block_length": 2, "own": "linear"}, CausalConfig),
]


@pytest.mark.parametrize(("settings", "kind"), KINDS, ids=str)
def test_names_decide_the_kind_and_a_round_trip_keeps_it(settings, kind):
    config = kind_of(settings)(**settings)
    assert type(config) is kind
    assert all(getattr(config, name) == value for name, value in settings.items())
    content = json.loads(json.dumps(config.to_dict()))
    again = kind_of(content).read(content)
    for changed in (lambda x: x, lambda x: x.replace(layers=[0], dense_every=7)):
        assert changed(again) == changed(config) and repr(changed(again)) == repr(changed(config))
    with pytest.raises(ValueError, match="frozen"):
        config.layers = "all"
    assert config.replace(layers=[0]) == kind(**settings | {"layers": (0,)})


def test_what_all_kinds_share_chooses_the_usual_one():
    assert kind_of(["layers"]) is SparseConfig and kind_of(["layers"], MHLAConfig) is MHLAConfig


SPARSE, MHLA = {"density": 0.1}, {"blocks": (2, 2)}
CAUSAL = MHLA | {"block_length": 2}
REFUSED = [
    # settings, offending value
    ({"density": None, "blocks": None}, "sparse attention has no blocks"),  # of two kinds
    ({"blocks": None, "convolution": None, "block_length": None}, "MHLA has no block_length"),
    ({"feature_map": "relu"}, "blocks must be given"),
    ({"blocks": (1, 1, 1, 1)}, r"blocks=\(1, 1, 1, 1\)"),
    ({"blocks": (0, 2)}, r"blocks=\(0, 2\)"),
    ({"blocks": (2.5, 2)}, r"blocks=\(2\.5, 2\)"),
    ({"block": 3}, "'block'; .*'blocks'"),
    ({"exact_tiles": (2, 2)}, "'exact_tiles'"),
    (SPARSE | {"layers": "most"}, r"'most'.*'all'.*'2/3'.*\[0, 2, -1\]"),
    (MHLA | {"layers": 1.5}, r"layers=1\.5"),
    (MHLA | {"layers": "1/0"}, "'1/0'"),
    (MHLA | {"layers": [0.5]}, r"layers=.*0\.5"),
    (MHLA | {"layers": ["attn1"]}, "attn1"),
    (MHLA | {"feature_map": "relo"}, "'relo' .*'relu'"),
    (MHLA | {"feature_map": "zzz"}, r"'zzz'.*relu.*elu\+1"),
    (MHLA | {"feature_map": "identity"}, "'identity'"),
    (MHLA | {"normalize": False}, "normalize=False .*output_norm=True"),
    (MHLA | {"convolution": 4}, "convolution=4"),
    (MHLA | {"dense_first": 1.5}, r"dense_first=1\.5"),
    (MHLA | {"causal": "block"}, "block_length must be given"),
    (TOKEN | {"mixing_clip": False}, "mixing_clip=False"),
    (CAUSAL | {"mixing_clip": False}, "mixing_clip=False"),
    (SPARSE | {"block_size": 10**9}, "block_size=1000000000 .*1024"),
    (SPARSE | {"block_size": 64, "key_block_size": 24}, "key_block_size=24"),
    (SPARSE | {"key_block_size": 32}, "key_block_size=32"),
]


@pytest.mark.parametrize(("settings", "value"), REFUSED, ids=str)
def test_settings_that_do_not_go_are_named(settings, value):
    with pytest.raises(ValueError, match=f"(?i){value}"):
        kind_of(settings)(**settings)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"density": 0.1}, r"MHLA has no density, .*remove_mhla\(\)"),
        ({"causal": "block"}, "MHLA has no causal, "),
        ({"block": (1, 1)}, "'block'; .*'blocks'"),
    ],
)
def test_a_change_stays_within_the_kind(change, named):
    with pytest.raises(ValueError, match=named):
        MHLAConfig(blocks=(2, 2)).replace(**change)


def test_a_causal_patch_has_blocks_of_one_length_on_every_grid():
    config = CausalConfig(blocks=(4,), causal="token", block_length=8)
    assert config.layout_on((20,)) == ((32,), (4,))
    with refused("33 tokens, ", " 4 blocks of 8", "beyond='relative'"):
        config.layout_on((33,))
    further = config.replace(beyond="relative")
    assert further.layout_on((33,)) == ((40,), (5,))


@pytest.mark.parametrize(
    "settings", [{"own": "linear"}, {"causal": "token", "own": "linear", "normalize": False, "output_norm": True}]
)
def test_signed_matrices_may_be_causal_where_they_weigh_no_sums(settings):
    assert not CausalConfig(blocks=(4,), block_length=4, mixing_clip=False, **settings).mixing_clip


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        ((8, 8), (4, 4)),
        ((9, 8, 8), (8, 4)),
        ((32, 32), (16, 16)),
        ((37, 37), (16, 16)),
        ((74, 74), (64, 32)),
        ((91, 91), (64, 32)),
        ((21, 30, 50), (64, 32)),
    ],
)
def test_block_sizes_that_are_left_out_fit_the_grid(grid, sizes):
    config = SparseConfig()
    rule = config.rule_on(grid)
    assert (rule.block_size, rule.key_block_size, rule.order, rule.density) == (*sizes, "content", config.density)
    given = config.replace(block_size=48, key_block_size=24).rule_on(grid)
    assert (given.block_size, given.key_block_size) == (48, 24)
    assert config.replace(block_size=32).rule_on(grid).key_block_size == 32


def test_the_density_that_is_reached_is_of_whole_blocks():
    config = SparseConfig(block_size=16, density=0.25)
    assert [config.rule_on(grid).listed_on(grid) for grid in ((8, 8), (4, 4), (8, 9))] == [0.25, 1, 0.2]
