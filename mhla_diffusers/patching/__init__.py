"""Apply MHLA to a pipeline or a transformer, look at it, switch it off, remove it."""

from .apply import apply_mhla
from .automatic import layer_sensitivity
from .finding import find_transformers, is_patched, mhla_layers, require_layers
from .grid_hook import TokenGridHook
from .mixing_clip import register_mixing_clip
from .processors import attn_processors, set_attn_processor
from .removal import mhla_disabled, remove_mhla

__all__ = [
    "TokenGridHook",
    "apply_mhla",
    "attn_processors",
    "find_transformers",
    "is_patched",
    "layer_sensitivity",
    "mhla_disabled",
    "mhla_layers",
    "register_mixing_clip",
    "remove_mhla",
    "require_layers",
    "set_attn_processor",
]
