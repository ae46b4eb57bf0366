"""Fast adaptation: train the weights of a patched model, or a small model from scratch."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .config import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
    from .latents.data import InMemoryData, TrainingData
    from .loop import TrainingResult, train
    from .run_folder import CheckpointError, TrainingDivergedError, read_metrics
else:
    # mhla finetune lies in this folder as well
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".config": ("ObjectiveWeights", "StageConfig", "TrainingConfig", "ValidationConfig"),
            ".latents.data": ("InMemoryData", "TrainingData"),
            ".loop": ("TrainingResult", "train"),
            ".run_folder": ("CheckpointError", "TrainingDivergedError", "read_metrics"),
        },
    )

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
