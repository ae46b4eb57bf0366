"""Packages that import their names on first access, so that importing the package is fast, and optional ones."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Sequence[str], homes: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package's ``__init__``.

    Import the names under ``if TYPE_CHECKING`` for type checkers, and define the two functions in its ``else``: with
    ``__getattr__`` a type checker would accept every name, even misspelt ones.

    Args:
        package: its ``__name__``.
        names: its ``__all__``.
        homes: modules with these names, relative to the package, such as ".patching", fastest import first; the modules
            are accessible too.
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


def installing(extra: str) -> str:
    """Say how the packages of an optional dependency of the project are installed."""
    return f'install the extra {extra!r}: `pip install ".[{extra}]"` in the folder of mhla_diffusers\' checkout'
