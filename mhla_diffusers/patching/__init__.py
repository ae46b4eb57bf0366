"""Apply MHLA to a pipeline or a transformer, look at it, switch it off, remove it, save and load it."""

from .calibration import calibrate_output_norm
from .changing import change_mhla
from .conversion import convert_wan
from .denoising_steps import patch_in_every_step
from .describe import describe
from .finding import (
    attn_processors,
    find_transformers,
    is_patched,
    mhla_layers,
    register_mixing_clip,
    require_layers,
)
from .layer import MHLALayer
from .loading import load_mhla
from .mixing_calibration import calibrate_mixing
from .planning import suggest_blocks
from .processor import MHLAProcessor, attended
from .record import CONFIG_NAME, Weights, read_record
from .removal import mhla_disabled, remove_mhla
from .replacing import apply_mhla, set_attn_processor
from .saving import save_mhla
from .sensitivity import TransformerCall, layer_sensitivity, record_calls
from .sharing import push_mhla
from .sparse_calibration import calibrate_sparse
from .stream import VideoStream
from .token_grid import token_grid

__all__ = [
    "CONFIG_NAME",
    "MHLALayer",
    "MHLAProcessor",
    "TransformerCall",
    "VideoStream",
    "Weights",
    "apply_mhla",
    "attended",
    "attn_processors",
    "calibrate_mixing",
    "calibrate_output_norm",
    "calibrate_sparse",
    "change_mhla",
    "convert_wan",
    "describe",
    "find_transformers",
    "is_patched",
    "layer_sensitivity",
    "load_mhla",
    "mhla_disabled",
    "mhla_layers",
    "patch_in_every_step",
    "push_mhla",
    "read_record",
    "record_calls",
    "register_mixing_clip",
    "remove_mhla",
    "require_layers",
    "save_mhla",
    "set_attn_processor",
    "suggest_blocks",
    "token_grid",
]
