"""Linear-cost attention for diffusers pipelines: Multi-Head Linear Attention (MHLA)."""

from typing import TYPE_CHECKING

from .lazy import lazy_names

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Family",
    "MHLACache",
    "MHLAConfig",
    "MHLALayer",
    "MHLAProcessor",
    "VideoStream",
    "apply_mhla",
    "attn_processors",
    "audit",
    "calibrate_mixing",
    "calibrate_output_norm",
    "calibrate_sparse",
    "change_mhla",
    "densify",
    "describe",
    "is_patched",
    "layer_sensitivity",
    "load_mhla",
    "mhla_attention",
    "mhla_disabled",
    "mhla_layers",
    "patch_names",
    "push_mhla",
    "register_family",
    "register_feature_map",
    "register_mixing_clip",
    "remove_mhla",
    "save_mhla",
    "set_attn_processor",
    "set_density",
    "suggest_blocks",
]

if TYPE_CHECKING:
    from .analysis.audit import Audit, audit
    from .analysis.dial import densify, set_density
    from .attention import mhla_attention, register_feature_map
    from .config import MHLAConfig, patch_names
    from .families import Family, register_family
    from .patching import (
        MHLALayer,
        MHLAProcessor,
        VideoStream,
        apply_mhla,
        attn_processors,
        calibrate_mixing,
        calibrate_output_norm,
        calibrate_sparse,
        change_mhla,
        describe,
        is_patched,
        layer_sensitivity,
        load_mhla,
        mhla_disabled,
        mhla_layers,
        push_mhla,
        register_mixing_clip,
        remove_mhla,
        save_mhla,
        set_attn_processor,
        suggest_blocks,
    )
    from .patching.cache import MHLACache
else:
    # so that neither this import nor mhla --help waits for torch
    __getattr__, __dir__ = lazy_names(
        __name__,
        __all__,
        (".config", ".attention", ".families", ".patching", ".analysis.audit", ".analysis.dial", ".patching.cache"),
    )
