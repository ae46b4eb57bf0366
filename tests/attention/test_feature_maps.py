"""Every built-in feature map against its formula: the float64 reference of the attention calls the same functions."""

import pytest
import torch

from mhla_diffusers.attention import feature_map_names, get_feature_map

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


def test_the_kernels_know_every_built_in_map():
    module = "mhla_diffusers.attention.feature_maps"
    built_in = {name for name in feature_map_names() if get_feature_map(name).__module__ == module}
    assert built_in == set(FORMULAS)
