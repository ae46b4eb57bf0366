"""Patch a pipeline or transformer; describe, disable, change, remove, save and load the patch."""

from .call import in_every_step
from .describe import describe
from .finding import (
    find_patched,
    find_transformers,
    is_patched,
    mhla_disabled,
    mhla_layers,
    require_layers,
    require_patched,
)
from .layer import MHLALayer
from .patch import apply_mhla, change_mhla, register_mixing_clip, remove_mhla
from .patched import Patched
from .processor import MHLAProcessor
from .saving import PATCH_FILE, load_mhla, read_record, save_mhla

__all__ = [
    "MHLALayer",
    "MHLAProcessor",
    "PATCH_FILE",
    "Patched",
    "apply_mhla",
    "change_mhla",
    "describe",
    "find_patched",
    "find_transformers",
    "in_every_step",
    "is_patched",
    "load_mhla",
    "mhla_disabled",
    "mhla_layers",
    "read_record",
    "register_mixing_clip",
    "remove_mhla",
    "require_layers",
    "require_patched",
    "save_mhla",
]
