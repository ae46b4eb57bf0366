"""Fast adaptation: train the weights of a patched model, or a small model from scratch."""

from typing import TYPE_CHECKING

from .. import lazy_names

__all__ = [
    "InMemoryData",
    "ObjectiveWeights",
    "TrainingConfig",
    "TrainingData",
    "TrainingDivergedError",
    "TrainingResult",
    "ValidationConfig",
    "begin_with",
    "export_checkpoint",
    "read_metrics",
    "train",
]

if TYPE_CHECKING:
    from .config import ObjectiveWeights, TrainingConfig, ValidationConfig
    from .data.batches import InMemoryData, TrainingData
    from .finetune import export_checkpoint
    from .recipe import TrainingResult, train
    from .run_folder import TrainingDivergedError, read_metrics
    from .weights import begin_with
else:
    # mhla finetune lies in this folder as well
    __getattr__, __dir__ = lazy_names(
        __name__, __all__, (".config", ".data.batches", ".run_folder", ".weights", ".recipe", ".finetune")
    )
