"""Tiny pipelines that ship with the package: real diffusers classes, trained on real handwritten digits."""
