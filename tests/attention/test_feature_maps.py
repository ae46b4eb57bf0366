"""Every built-in feature map against its formula: the float64 reference of the attention calls the same functions."""

import pytest
import torch

from mhla_diffusers.attention import feature_map_names, get_feature_map, mhla_attention, register_feature_map

from ..refusals import refused
from .problems import make_problem

EPS = 0.25
FORMULAS = {
    "relu": lambda x: torch.maximum(x, torch.zeros_like(x)) + EPS,
    "elu+1": lambda x: torch.where(x > 0, x, x.exp() - 1) + 1 + EPS,
    "softmax": lambda x: x.exp() / x.exp().sum(dim=-1, keepdim=True),
    "identity": lambda x: x,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_built_in_map_is_its_formula(name):
    x = 3 * torch.randn(2, 5, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(get_feature_map(name)(x.clone(), EPS), FORMULAS[name](x), rtol=1e-12, atol=1e-12)


def test_the_table_has_every_built_in_map():
    module = "mhla_diffusers.attention.feature_maps"
    assert {name for name in feature_map_names() if get_feature_map(name).__module__ == module} == set(FORMULAS)


def test_a_registered_feature_map_is_used_and_may_be_registered_again():
    """As by a cell of a notebook that is run again; the name of a built-in one is refused."""
    query, key, value, mixing = make_problem((12,), (3,)).tensors.values()
    for power in (3, 2):
        register_feature_map("power", lambda x, eps, power=power: x.abs() ** power + eps)
    found = mhla_attention(query, key, value, mixing, (12,), (3,), feature_map="power")
    torch.testing.assert_close(found, mhla_attention(query.square(), key.square(), value, mixing, (12,), (3,)))
    with refused("relu"):
        register_feature_map("relu", torch.nn.functional.softplus)
