"""Cheap attention at long sequences for diffusers pipelines: Multi-Head Linear Attention (MHLA).

What users of pipelines need; everything else is imported from its own package, such as ``mhla_diffusers.patching``.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_names

__version__ = "0.1.0"

__all__ = [
    "CausalConfig",
    "MHLAConfig",
    "MHLAProcessor",
    "SparseConfig",
    "apply_mhla",
    "audit",
    "change_mhla",
    "describe",
    "is_patched",
    "load_mhla",
    "mhla_disabled",
    "mhla_layers",
    "push_mhla",
    "remove_mhla",
    "save_mhla",
    "set_attn_processor",
    "suggest_blocks",
    "tune",
]

if TYPE_CHECKING:
    from .auditing import audit
    from .config import CausalConfig, MHLAConfig, SparseConfig
    from .patching import (
        MHLAProcessor,
        apply_mhla,
        change_mhla,
        describe,
        is_patched,
        load_mhla,
        mhla_disabled,
        mhla_layers,
        push_mhla,
        remove_mhla,
        save_mhla,
        set_attn_processor,
        suggest_blocks,
    )
    from .tuning import tune
else:
    # so that neither this import nor mhla --help waits for torch
    __getattr__, __dir__ = lazy_names(
        __name__,
        __all__,
        (
            ".config",
            ".patching",
            ".auditing",
            ".tuning",
        ),
    )
