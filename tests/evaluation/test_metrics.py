"""The Fréchet distance against closed forms and another implementation."""

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.metrics import frechet_distance, moments

from ..refusals import refused


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_frechet_distance_of_known_normals():
    zero, one = (torch.zeros(3), torch.eye(3)), (torch.ones(3), 4 * torch.eye(3))
    assert frechet_distance(zero, one) == frechet_distance(one, zero) == pytest.approx(6.0, rel=1e-12)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(torch.zeros(4, 2), torch.ones(4, 2)) == pytest.approx(2)


@pytest.mark.parametrize(("dimensions", "samples"), [(64, 1000), (256, 100)])
def test_frechet_distance_agrees_with_the_matrix_square_root(dimensions, samples):
    linalg = pytest.importorskip("scipy.linalg")
    scale = torch.linspace(0.1, 2, dimensions, dtype=torch.float64)
    first, second = normal(samples, dimensions) * scale, 0.5 + normal(samples, dimensions, seed=1)
    (mean, covariance), (other_mean, other_covariance) = moments(first), moments(second)
    root = linalg.sqrtm((covariance @ other_covariance).numpy())
    shift = float((mean - other_mean).square().sum())
    expected = shift + float(covariance.trace() + other_covariance.trace()) - 2 * numpy.trace(root).real
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-6)


def test_sets_of_different_extractors_have_no_distance():
    with refused("4 and 5 channels"):
        frechet_distance(torch.zeros(5, 4), torch.zeros(5, 5))
