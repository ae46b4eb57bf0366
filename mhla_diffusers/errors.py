"""Error messages: failed conditions, unknown names with the nearest ones, missing packages."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def check(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless a condition holds."""
    if not condition:
        raise ValueError(message)


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError, with the nearest names, unless a value is allowed."""
    if value not in allowed:
        near = nearest(value, allowed)
        words = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ValueError(f"{name}={value!r} must be {words}" + (f"; {near}" if near else "."))


def check_names(names: Iterable[Any], allowed: Sequence[str], what: str, listed_by: str = "") -> None:
    """Raise ValueError, with the nearest names, unless all names, each of a ``what`` such as "setting", are allowed."""
    for name in names:
        if name not in allowed:
            raise ValueError(f"Unknown {what} {str(name)!r}; {said_allowed(name, allowed, listed_by)}")


def nearest(name: object, allowed: Iterable[object], count: int = 2, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" with allowed names that resemble a name or begin with it; "" for none."""
    names = [str(one) for one in allowed]
    near = get_close_matches(str(name), names, n=count, cutoff=cutoff)
    near = near or [one for one in names if name and one.startswith(str(name))][:count]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def said_allowed(name: object, allowed: Sequence[str], listed_by: str = "") -> str:
    """Return the names nearest to an unknown one, then all allowed names or the command that lists them."""
    if listed_by:
        return f"{nearest(name, allowed, count=3, cutoff=0.4)} `{listed_by}` lists all.".lstrip()
    hint = nearest(name, allowed)
    return f"{hint} Allowed: {', '.join(allowed)}." if hint else f"allowed: {', '.join(allowed)}."


def required(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; the ImportError says how it is installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; {installing(extra)}.") from error


def installing(extra: str) -> str:
    """Say how the packages of an optional dependency of the project are installed."""
    return f'install the extra {extra!r}: `pip install ".[{extra}]"` in the folder of mhla_diffusers\' checkout'
