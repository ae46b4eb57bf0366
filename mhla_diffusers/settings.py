"""Settings: frozen dataclasses of pydantic, made from keywords, mappings or YAML, with errors of one sentence.

An error names the field by its path, such as ``validation.every``, its value and what is allowed; of an unknown name
the nearest ones; of a file its path.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields
from typing import Annotated, Any, Self, TypeVar, dataclass_transform

import yaml
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, to_jsonable_python

from .errors import check, check_names

Integer = Annotated[int, Strict()]
"""No float, text or bool."""
Number = Annotated[float, Strict()]
"""Finite; no text or bool."""
Flag = Annotated[bool, Strict()]
Positive = Annotated[Number, Field(gt=0)]
PositiveInteger = Annotated[Integer, Field(gt=0)]
Count = Annotated[Integer, Field(ge=0)]
Seed = Annotated[Integer, Field(ge=0, lt=2**63)]
"""Seed that torch's random generators accept."""

_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
Made = TypeVar("Made")
Kind = TypeVar("Kind", bound="Settings")


@contextmanager
def _explained(content: Any, *begin: str) -> Iterator[None]:
    """Context in which an error of pydantic becomes a ValueError with one sentence about one value of the content."""
    try:
        yield
    except ValidationError as error:
        errors = [(_path_in(content, [*begin, *one["loc"]]), one) for one in error.errors(include_url=False)]
        # a sentence of our own says most; of a union's members the one that fits best
        ours = ("missing", "value_error")
        path, worst = max(errors, key=lambda one: (one[1]["type"] in ours, len(one[0])))
        name = ".".join(path)
        if worst["type"] == "missing":
            lacking = [".".join([*where, str(one["loc"][-1])]) for where, one in errors if one["type"] == "missing"]
            said = f"{', '.join(lacking)} must be given."
        elif worst["type"] == "value_error":
            said = str(worst["ctx"]["error"])
            said = said if not name or said.startswith(f"{name}=") else f"{name}: {said}"
        else:
            words = dict.fromkeys(re.sub(r"^\w+ should ", "", one["msg"]) for where, one in errors if where == path)
            said = f"{name or 'content'}={worst['input']!r} must {' or '.join(words)}."
        raise ValueError(said) from None


def _path_in(content: Any, location: Sequence[str | int]) -> list[str]:
    """Return the part of pydantic's location of an error that the content has, without the members of unions."""
    path = []
    for name in location:
        try:
            content = content[name]
        except (LookupError, TypeError):
            continue
        path.append(str(name))
    return path


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(*, kw_only: bool = False) -> Callable[[type[Made]], type[Made]]:
    """Make a class a frozen dataclass of pydantic whose constructor raises ValueError with one sentence."""

    def decorate(cls: type[Made]) -> type[Made]:
        made: Any = dataclass(cls, frozen=True, kw_only=kw_only, config=_RULES)
        validate, names = made.__init__, [one.name for one in fields(made)]

        def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
            given = dict(zip(names, arguments, strict=False)) | keywords
            with _explained(given):
                validate(self, **given)

        made.__init__ = __init__
        return made

    return decorate


@settings()
class Settings:
    """Base of settings."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, content: Any) -> Any:
        given = content.kwargs if isinstance(content, ArgsKwargs) else content
        check_names(given if isinstance(given, Mapping) else (), [one.name for one in fields(cls)], "setting")
        return content

    @classmethod
    def read(cls, content: Any) -> Self:
        """Make settings from a mapping; ValueError for unknown or missing names, or values that are not allowed."""
        with _explained(content):
            return TypeAdapter(cls).validate_python(content)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON and YAML values; :meth:`read` takes them."""
        return to_jsonable_python(self, serialize_as_any=True)


def check_value(name: str, value: object, kind: Any) -> Any:
    """Return an argument validated as a field of a kind such as ``PositiveInteger | None``, or raise ValueError."""
    with _explained({name: value}, name):
        return TypeAdapter(kind, config=_RULES).validate_python(value)


def read_yaml(cls: type[Kind], text: str, source: object, overrides: Sequence[str] = ()) -> Kind:
    """Read settings from the text of a YAML file; ``source`` is its path.

    ``overrides`` are ``key=value`` with dotted keys, for example ``validation.every=100``; values are YAML. ValueError,
    which names the file and the overrides, for malformed YAML or settings that are not allowed.
    """
    content = parse_yaml(text, str(source))
    try:
        for override in overrides:
            _set(content, override)
        return cls.read(content)
    except ValueError as error:
        place = f"{source} with {', '.join(overrides)}" if overrides else source
        raise ValueError(f"{place}: {error}") from None


def _set(content: Any, override: str) -> None:
    """Set a value from the command line."""
    key, value = parse_assignment(override)
    *outer, last = key.split(".")
    for name in outer:
        content = content.setdefault(name, {}) if isinstance(content, dict) else None
    check(isinstance(content, dict), f"{override!r}: {'.'.join(outer) or 'the file'} has no keys; set it as a whole.")
    content[last] = value


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``key=value``, whose value is YAML; ValueError for another form."""
    key, separator, value = text.partition("=")
    check(bool(key and separator), f"{text!r} must look like key=value.")
    return key, parse_yaml(value, repr(text))


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if str(key.value) in known:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            known.add(str(key.value))
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))  # 1e-4, as in YAML 1.2


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; ValueError, which begins with the source, if it is malformed or a key is given twice."""
    try:
        loader = _Loader(text)
        loader.name = source  # in its errors, beside line and column
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from error


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value before and value now of what differs between two contents of JSON; None for absent."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, before, now
