"""Distances against closed forms, hand-made points and other implementations."""

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.metrics import (
    frechet_distance,
    inception_score,
    moments,
    precision_recall,
)


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


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        (torch.zeros(1, 4), torch.zeros(5, 4), r"\(1, 4\)"),
        (torch.zeros(5), torch.zeros(5, 4), r"\(5,\)"),
        (torch.zeros(5, 4), torch.zeros(5, 5), "5.* 4 channels"),
        ((torch.zeros(3), torch.eye(4)), torch.zeros(5, 3), r"\(4, 4\)"),
    ],
)
def test_sets_that_have_no_distance_are_refused(first, second, value):
    with pytest.raises(ValueError, match=value):
        frechet_distance(first, second)


def test_inception_score_is_the_mean_over_splits_in_their_order():
    constant = torch.softmax(normal(1, 10), dim=1).repeat(50, 1)
    assert inception_score(constant) == pytest.approx(1)
    assert inception_score(torch.eye(10).repeat(9, 1), split=30) == pytest.approx(10)
    assert inception_score(torch.cat([torch.eye(4), torch.eye(4)[[0, 0, 0, 0]]]), split=4) == pytest.approx((4 + 1) / 2)


def test_precision_and_recall_of_hand_made_points():
    reference = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    inside_half = torch.tensor([[0.5], [1.5], [100.0], [101.0]])
    assert precision_recall(reference, reference) == (1, 1)
    # radii with k = 1 are 1 in the reference; in the samples 1 around 0.5 and 1.5, so 3 is not reached, 0, 1, 2 are
    assert precision_recall(reference, inside_half, neighbours=1) == (0.5, 0.75)
    assert precision_recall(reference, reference + 50) == (0, 0)


def test_precision_and_recall_tell_lost_quality_from_lost_variety():
    precision, recall = precision_recall(normal(1200, 4), 0.1 * normal(1100, 4, seed=1))
    assert precision > 0.9 and recall < 0.3
