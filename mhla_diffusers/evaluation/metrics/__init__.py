"""Distances between sets of features, whatever they are features of. Torch only."""

from .frechet import frechet_distance
from .inception_score import InceptionScore
from .kernel_distance import kernel_distance
from .precision_recall import precision_recall
from .statistics import FeatureStatistics, Normal

__all__ = ["FeatureStatistics", "InceptionScore", "Normal", "frechet_distance", "kernel_distance", "precision_recall"]
