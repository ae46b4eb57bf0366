"""Packages whose names are imported when they are asked for, so that importing one of them costs nothing."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Sequence[str], homes: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package's ``__init__`` takes for its ``__getattr__`` and ``__dir__``.

    Type checkers see the names by an import under ``if TYPE_CHECKING``, and the two functions only in its ``else``:
    a package with ``__getattr__`` would have every name, misspelt ones too.

    Args:
        package: its ``__name__``.
        names: its ``__all__``.
        homes: modules that hold them, seen from the package, such as ".patching", the quickest to import first; they
            are names too.
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
