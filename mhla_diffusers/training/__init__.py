"""Fast adaptation: train the weights of a patched model, or a small model from scratch."""

from .config import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
from .latents.data import InMemoryData, TrainingData
from .loop import TrainingResult, train
from .run_folder import CheckpointError, TrainingDivergedError, read_metrics

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
