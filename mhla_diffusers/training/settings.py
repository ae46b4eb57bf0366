"""YAML settings with ``key=value`` overrides, read into nested dataclasses and checked."""

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..config import check_names
from ..files import parse_yaml, read_text

Settings = TypeVar("Settings")

_SCRIPTS = {"stages": "mhla finetune", "length": "finetune/language.py", "size": "finetune/classify.py"}
"""A setting that every configuration of one script has and other scripts' lack."""


def read_settings(cls: type[Settings], path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a dataclass from a YAML file.

    Args:
        cls: the dataclass.
        path: the file.
        overrides: ``key=value`` with dotted keys, for example ``stages.0.steps=100``; values are YAML.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: a malformed file or override, a configuration of another script, or what :func:`from_mapping`
            raises.
    """
    settings = parse_yaml(read_text(path), str(path))
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold named settings, got {settings!r}.")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ValueError(f"Override {override!r} must look like key=value, for example stages.0.steps=100.")
        where: Any = settings
        *names, last = key.split(".")
        for name in names:
            place = _place(where, name, override)
            where = where.setdefault(place, {}) if isinstance(where, dict) else where[place]
        where[_place(where, last, override)] = parse_yaml(text, f"Override {override!r}")
    own = next(name for name in _SCRIPTS if name in get_type_hints(cls))
    theirs = next((name for name in _SCRIPTS if name in settings), own)
    if own not in settings and theirs != own:
        raise ValueError(
            f"{path} is a configuration of {_SCRIPTS[theirs]}, not of {_SCRIPTS[own]}; run that script, or give "
            "another file."
        )
    try:
        return from_mapping(cls, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _place(where: Any, name: str, override: str) -> Any:
    """Return the key of a mapping, or index of a list, that a part of an override names."""
    if isinstance(where, list) and name.isdigit() and int(name) < len(where):
        return int(name)
    if not isinstance(where, dict):
        count = f"; the list has {len(where)} entries, counted from 0" if isinstance(where, list) else ""
        raise ValueError(f"Override {override!r}: there is no {name!r} to set{count}.")
    return name


def from_mapping(cls: type[Settings], settings: Any, path: str = "") -> Settings:
    """Make a dataclass from nested mappings. A float may be text, since YAML reads ``1e-4`` so.

    Args:
        cls: the dataclass; nested ones are built by their ``from_dict`` if they have one.
        settings: name → value.
        path: dotted prefix of names in errors, for example ``stages.0.``.

    Raises:
        ValueError: unknown or missing names, or values that are not allowed.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path.rstrip('.') or 'the configuration'} must hold named settings, got {settings!r}.")
    kinds = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    check_names(settings, list(known), "setting", path)
    missing = [
        name
        for name, item in known.items()
        if name not in settings and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{path.rstrip('.') or 'The configuration'} lacks {', '.join(missing)}.")
    values = {name: _convert(kinds[name], value, path + name) for name, value in settings.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path.rstrip('.')}: {error}" if path else str(error)) from error


def as_plain(value: Any) -> Any:
    """Return a dataclass as plain JSON and YAML values; the inverse of :func:`from_mapping`."""
    if is_dataclass(value):
        return {item.name: as_plain(getattr(value, item.name)) for item in fields(value)}
    return [as_plain(item) for item in value] if isinstance(value, tuple) else value


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Convert a value to the annotation ``kind``."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}={value} must be finite.")
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):  # None or a name where allowed, else the other members
        kinds = get_args(kind)
        if type(value) in kinds or (is_dataclass(value) and isinstance(value, kinds)):
            return value
        others = [other for other in kinds if other not in (str, type(None))] or [str]
        if str in kinds and others != [str] and not isinstance(value, Mapping):
            raise ValueError(f"{path} must be a name, a path, or settings such as blocks; got {value!r}.")
        return _convert(others[0], value, path)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{path} must be a list, got {value!r}.")
        return tuple(_convert(get_args(kind)[0], item, f"{path}.{index}") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} must hold named settings, got {value!r}.")
        return dict(value)
    if origin is Literal:
        return value
    if is_dataclass(kind) and isinstance(kind, type) and not isinstance(value, kind):
        make = getattr(kind, "from_dict", None)
        return from_mapping(kind, value, f"{path}.") if make is None else make(value)
    if kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            pass
        else:
            return _convert(kind, number, path)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path}={value!r} must be of type {kind.__name__}, got {type(value).__name__}.")
    return value
