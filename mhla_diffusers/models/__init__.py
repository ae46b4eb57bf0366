"""Models of the paper that no library has, as transformers' ``PreTrainedModel``: classifiers of images."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

__all__ = [
    "PooledViTConfig",
    "PooledViTForImageClassification",
    "VLTConfig",
    "VLTForImageClassification",
    "VLTModel",
]

if TYPE_CHECKING:
    from .pooled_vit import PooledViTConfig, PooledViTForImageClassification
    from .vlt import VLTForImageClassification, VLTModel
    from .vlt_config import VLTConfig
else:
    __getattr__, __dir__ = lazy_names(__name__, __all__, (".vlt_config", ".vlt", ".pooled_vit"))
