"""Fast adaptation: train the weights of a patched model, or a small model from scratch."""

from typing import TYPE_CHECKING

from .. import lazy_names

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
    "export_checkpoint",
    "read_metrics",
    "train",
]

if TYPE_CHECKING:
    from .config import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
    from .export import export_checkpoint
    from .latents.data import InMemoryData, TrainingData
    from .loop import TrainingResult, train
    from .run_folder import CheckpointError, TrainingDivergedError, read_metrics
else:
    # mhla finetune lies in this folder as well
    __getattr__, __dir__ = lazy_names(
        __name__, __all__, (".config", ".latents.data", ".run_folder", ".loop", ".export")
    )
