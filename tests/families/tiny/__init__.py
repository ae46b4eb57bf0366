"""Tiny models of every family with random weights, their inputs and pipelines, for ``test_every_family.py``."""

from importlib import import_module

from .case import FamilyCase

NAMES = (
    "chronoedit",
    "cogvideox",
    "dig",
    "flux",
    "hunyuan_dit",
    "hunyuan_video",
    "hunyuan_video15",
    "latte",
    "ltx",
    "pixart",
    "qwenimage",
    "sana_video",
    "sd3",
    "skyreels_v2",
    "wan_animate",
    "z_image",
)


def case_of(name: str) -> FamilyCase:
    """The tiny case of a family."""
    found: FamilyCase = import_module(f".{name}", __package__).CASE
    return found
