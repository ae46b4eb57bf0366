"""Tiny pipelines that ship with the package: real diffusers classes, trained on real handwritten digits."""

from .checksums import DamagedAssetError
from .loading import call_settings, load_tiny

__all__ = ["DamagedAssetError", "call_settings", "load_tiny"]
