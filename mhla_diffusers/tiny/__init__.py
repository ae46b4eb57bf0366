"""Tiny pipelines that ship with the package: real diffusers classes, trained on real handwritten digits."""

from .loading import call_settings, load_tiny, pipeline_folder
from .pipelines import TINY, TinyPipeline, tiny_pipeline

__all__ = [
    "TINY",
    "TinyPipeline",
    "call_settings",
    "load_tiny",
    "pipeline_folder",
    "tiny_pipeline",
]
