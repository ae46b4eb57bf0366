"""Apply MHLA to a pipeline or a transformer, look at it, switch it off, remove it, save and load it."""

from .calibrate import TransformerCall, calibrate_output_norm, layer_sensitivity, record_calls
from .call import in_every_step
from .describe import describe, suggest_blocks
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
from .loading import load_mhla, read_record
from .patch import apply_mhla, attn_processors, change_mhla, register_mixing_clip, remove_mhla, set_attn_processor
from .patched import Patched
from .processor import MHLAProcessor
from .saving import CONFIG_NAME, Weights, push_mhla, save_mhla

__all__ = [
    "CONFIG_NAME",
    "MHLALayer",
    "MHLAProcessor",
    "Patched",
    "TransformerCall",
    "Weights",
    "apply_mhla",
    "attn_processors",
    "calibrate_output_norm",
    "change_mhla",
    "describe",
    "find_patched",
    "find_transformers",
    "in_every_step",
    "is_patched",
    "layer_sensitivity",
    "load_mhla",
    "mhla_disabled",
    "mhla_layers",
    "push_mhla",
    "read_record",
    "record_calls",
    "register_mixing_clip",
    "remove_mhla",
    "require_layers",
    "require_patched",
    "save_mhla",
    "set_attn_processor",
    "suggest_blocks",
]
