"""Distances against closed forms, hand-made points and other implementations."""

import subprocess
import sys

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.metrics import (
    FeatureStatistics,
    InceptionScore,
    Normal,
    frechet_distance,
    kernel_distance,
    precision_recall,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_frechet_distance_of_known_normals():
    zero = Normal(torch.zeros(3), torch.eye(3))
    one = Normal(torch.ones(3), 4 * torch.eye(3))
    assert frechet_distance(zero, one) == pytest.approx(6.0, rel=1e-12)
    assert frechet_distance(one, zero) == pytest.approx(6.0, rel=1e-12)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-12)


def test_frechet_distance_of_sets_without_spread():
    assert frechet_distance(torch.zeros(4, 2), torch.ones(4, 2)) == pytest.approx(2)


@pytest.mark.parametrize(("dimensions", "samples"), [(64, 1000), (256, 100)])
def test_frechet_distance_agrees_with_the_matrix_square_root(dimensions, samples):
    linalg = pytest.importorskip("scipy.linalg")
    scale = torch.linspace(0.1, 2, dimensions, dtype=torch.float64)
    first, second = normal(samples, dimensions) * scale, 0.5 + normal(samples, dimensions, seed=1)
    statistics = [FeatureStatistics.of(x).normal() for x in (first, second)]
    root = linalg.sqrtm((statistics[0].covariance @ statistics[1].covariance).numpy())
    traces = sum(float(s.covariance.trace()) for s in statistics)
    shift = float((statistics[0].mean - statistics[1].mean).square().sum())
    expected = shift + traces - 2 * numpy.trace(root).real
    assert frechet_distance(*statistics) == pytest.approx(expected, rel=1e-6)


def test_statistics_do_not_depend_on_the_batches_and_keep_digits_far_from_zero():
    features = 1e6 + normal(500, 7)
    whole, parts = FeatureStatistics.of(features), FeatureStatistics()
    for part in features.split([1, 200, 0, 299]):
        parts.update(part)
    assert parts.count == 500
    for statistics in (whole.normal(), parts.normal()):
        torch.testing.assert_close(statistics.mean, features.mean(dim=0), rtol=1e-12, atol=0)
        torch.testing.assert_close(statistics.covariance, (features - 1e6).T.cov(), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_memory_of_statistics_does_not_grow_with_the_number_of_features():
    script = """
import resource, torch
from mhla_diffusers.evaluation.metrics import FeatureStatistics, InceptionScore
statistics, score = FeatureStatistics(), InceptionScore()
for count in (20, 180):
    for _ in range(count):
        batch = torch.rand(1000, 64)
        statistics.update(batch)
        score.update(batch / batch.sum(dim=1, keepdim=True))
    print(statistics.count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    (first, before), (second, after) = (map(int, line.split()) for line in ended.stdout.splitlines())
    assert (first, second) == (20_000, 200_000)
    unit = 1024 if sys.platform == "linux" else 1
    kept = (second - first) * 64 * 4
    assert (after - before) * unit < kept / 5


@pytest.mark.parametrize(
    ("features", "message"),
    [(torch.zeros(3), "shape"), (torch.zeros(2, 5), r"\(n, 4\)"), (torch.full((2, 4), torch.nan), "not finite")],
)
def test_odd_features_are_refused(features, message):
    statistics = FeatureStatistics.of(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=message):
        statistics.update(features)


@pytest.mark.parametrize(
    ("measure", "first", "second", "message"),
    [
        (frechet_distance, (1, 4), (5, 4), "holds 1 features"),
        (frechet_distance, (5, 4), (5, 5), "4 and 5 channels"),
        (kernel_distance, (1, 4), (5, 4), "hold 1 and 5 features"),
        (precision_recall, (5, 4), (3, 4), "sample set holds 3"),
    ],
)
def test_sets_that_have_no_distance_are_refused(measure, first, second, message):
    with pytest.raises(ValueError, match=message):
        measure(torch.zeros(first), torch.zeros(second))


def test_inception_score_of_constant_and_of_balanced_predictions():
    constant, balanced = InceptionScore(), InceptionScore(split=30)
    constant.update(torch.softmax(normal(1, 10), dim=1).repeat(50, 1))
    assert constant.compute() == pytest.approx(1)
    for part in torch.eye(10).repeat(9, 1).split(7):
        balanced.update(part)
    assert balanced.compute() == pytest.approx(10)


def test_inception_score_is_the_mean_over_splits():
    score = InceptionScore(split=4)
    score.update(torch.cat([torch.eye(4), torch.eye(4)[[0, 0, 0, 0]]]))
    assert score.compute() == pytest.approx((4 + 1) / 2)
    with pytest.raises(ValueError, match="no predictions"):
        InceptionScore().compute()


def test_precision_and_recall_of_hand_made_points():
    reference = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    inside_half = torch.tensor([[0.5], [1.5], [100.0], [101.0]])
    assert precision_recall(reference, reference) == (1, 1)
    # radii with k = 1 are 1 in the reference; in the samples 1 around 0.5 and 1.5, so 3 is not reached, 0, 1, 2 are
    assert precision_recall(reference, inside_half, neighbours=1) == (0.5, 0.75)
    assert precision_recall(reference, reference + 50) == (0, 0)


def test_precision_and_recall_tell_lost_quality_from_lost_variety():
    reference = normal(1200, 4).float()
    narrow = 0.1 * normal(1100, 4, seed=1).float()
    precision, recall = precision_recall(reference, narrow)
    assert precision > 0.9
    assert recall < 0.3


def test_kernel_distance_is_unbiased():
    same = [kernel_distance(normal(20, 8, seed=2 * s), normal(20, 8, seed=2 * s + 1))[0] for s in range(200)]
    mean = torch.tensor(same).mean()
    assert mean.abs() < 4 * torch.tensor(same).std() / 200**0.5
    assert kernel_distance(normal(20, 8), normal(20, 8, seed=1) + 1)[0] > 1


def test_kernel_distance_from_its_definition():
    first, second = normal(3, 2), normal(4, 2, seed=1)

    def k(x, y):
        return float((x @ y / 2 + 1) ** 3)

    within = sum(k(x, y) for i, x in enumerate(first) for j, y in enumerate(first) if i != j) / 6
    within += sum(k(x, y) for i, x in enumerate(second) for j, y in enumerate(second) if i != j) / 12
    across = sum(k(x, y) for x in first for y in second) / 12
    assert kernel_distance(first, second) == (pytest.approx(within - 2 * across), 0)


def test_kernel_distance_of_large_sets_repeats_itself():
    first, second = normal(50, 4), normal(60, 4, seed=1) + 0.5
    drawn = kernel_distance(first, second, subsets=20, largest=30)
    assert drawn == kernel_distance(first, second, subsets=20, largest=30)
    assert drawn[1] > 0
    assert drawn[0] == pytest.approx(kernel_distance(first, second)[0], rel=0.3)
