"""Packages whose names are imported when they are asked for, so that importing one of them costs nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package's ``__init__`` takes for its ``__getattr__`` and ``__dir__``.

    Type checkers see the names by an import under ``if TYPE_CHECKING``, and the two functions only in its ``else``:
    a package with ``__getattr__`` would have every name, misspelt ones too.

    Args:
        package: its ``__name__``.
        homes: module, seen from the package, such as ".patching" → names that it holds; the modules are names too.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if f".{name}" in homes:
            return import_module(f".{name}", package)
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name], package), name)

    def names() -> list[str]:
        return sorted([*vars(import_module(package)), *home_of])

    return get, names
