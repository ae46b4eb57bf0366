"""Fast adaptation: train the weights of a patched model, or a small model from scratch."""

from .config import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
from .latents.data import InMemoryData, TrainingData
from .divergence import TrainingDivergedError
from .folders import CheckpointError, read_metrics
from .loop import TrainingResult, train

__all__ = [
    "CheckpointError",
    "InMemoryData",
    "ObjectiveWeights",
    "StageConfig",
    "TrainingConfig",
    "TrainingData",
    "TrainingDivergedError",
    "TrainingResult",
    "ValidationConfig",
    "read_metrics",
    "train",
]
