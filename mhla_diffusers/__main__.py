"""``python -m mhla_diffusers``, the same as ``mhla``."""

from .cli import run

run()
