"""Cheap attention at long sequences for diffusers pipelines: Multi-Head Linear Attention (MHLA).

What users of pipelines need; everything else is imported from its own package, such as ``mhla_diffusers.patching``.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "remove_mhla",
    "save_mhla",
    "tune",
]


def lazy_names(
    package: str, names: Sequence[str], homes: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its names from ``homes`` when they are used.

    Define them in the ``else`` of ``if TYPE_CHECKING``: with them a type checker would accept every name. ``homes`` are
    modules such as ".patching", fastest import first.
    """

    def get(name: str) -> Any:
        if f".{name}" in homes:
            return import_module(f".{name}", package)
        if name in names:
            for home in homes:
                module = import_module(home, package)
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted([*vars(import_module(package)), *names])

    return get, listed


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
        remove_mhla,
        save_mhla,
    )
    from .tuning.run import tune
else:
    # so that neither this import nor mhla --help waits for torch
    __getattr__, __dir__ = lazy_names(
        __name__,
        __all__,
        (
            ".config",
            ".patching",
            ".auditing",
            ".tuning.run",
        ),
    )
