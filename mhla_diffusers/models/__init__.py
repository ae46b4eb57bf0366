"""Models of the paper that no library has, classifiers of images of transformers' kind, and DiG of diffusers'."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

__all__ = [
    "DiGTransformer2DModel",
    "PooledViTConfig",
    "PooledViTForImageClassification",
    "VLTConfig",
    "VLTForImageClassification",
    "VLTModel",
]

if TYPE_CHECKING:
    from .dig import DiGTransformer2DModel
    from .pooled_vit import PooledViTConfig, PooledViTForImageClassification
    from .vlt import VLTConfig, VLTForImageClassification, VLTModel
else:
    __getattr__, __dir__ = lazy_names(__name__, __all__, (".vlt", ".pooled_vit", ".dig"))
