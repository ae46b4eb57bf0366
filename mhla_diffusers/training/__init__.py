"""Fast adaptation: train the weights of a patched model, or a small model from scratch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig
    from .latents.data import InMemoryData, TrainingData
    from .loop import TrainingResult, train
    from .run_folder import CheckpointError, TrainingDivergedError, read_metrics

_HOMES = {
    ".config": ("ObjectiveWeights", "StageConfig", "TrainingConfig", "ValidationConfig"),
    ".latents.data": ("InMemoryData", "TrainingData"),
    ".loop": ("TrainingResult", "train"),
    ".run_folder": ("CheckpointError", "TrainingDivergedError", "read_metrics"),
}
"""Imported when they are asked for, since the mhla command lies in this folder as well and shall answer at once."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
