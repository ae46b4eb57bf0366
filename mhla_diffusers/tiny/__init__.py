"""Tiny pipelines that ship with the package: real diffusers classes, trained on real handwritten digits."""

from .base import TinyPipeline
from .checksums import DamagedAssetError, pipeline_folder
from .loading import call_settings, load_tiny
from .pipelines import TINY, tiny_pipeline

__all__ = [
    "TINY",
    "DamagedAssetError",
    "TinyPipeline",
    "call_settings",
    "load_tiny",
    "pipeline_folder",
    "tiny_pipeline",
]
