"""The mathematics of MHLA and sparse attention: torch only, no diffusers."""

from .api import BACKENDS, attend, mhla_attention, run, sparse_attention
from .call import BlockLists, MHLACall, SparseCall
from .feature_maps import feature_map_names, get_feature_map, register_feature_map
from .mixing import clip_mixing_, extend_mixing, initial_mixing, resize_mixing
from .reference import reference_attention, reference_weights
from .sparse import with_lists
from .state import MHLAState

__all__ = [
    "BACKENDS",
    "BlockLists",
    "MHLACall",
    "MHLAState",
    "SparseCall",
    "attend",
    "clip_mixing_",
    "extend_mixing",
    "feature_map_names",
    "get_feature_map",
    "initial_mixing",
    "mhla_attention",
    "reference_attention",
    "reference_weights",
    "register_feature_map",
    "resize_mixing",
    "run",
    "sparse_attention",
    "with_lists",
]
