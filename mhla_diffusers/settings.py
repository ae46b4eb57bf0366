"""Settings: frozen dataclasses of pydantic, made from keywords, mappings or YAML, with errors of one sentence.

An error names the field by its path, such as ``validation.every``, its value and what is allowed; of an unknown name
the nearest ones; of a file its path.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import Annotated, Any, Self, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError, to_jsonable_python

from .errors import check, said_allowed

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
_Path = tuple[str | int, ...]
_OURS = ("value_error", "missing")
Made = TypeVar("Made")
Kind = TypeVar("Kind", bound="Settings")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(*, kw_only: bool = False) -> Callable[[type[Made]], type[Made]]:
    """Make a class a frozen dataclass of pydantic whose constructor raises ValueError with one sentence."""

    def decorate(cls: type[Made]) -> type[Made]:
        made: Any = dataclass(cls, frozen=True, kw_only=kw_only, config=_RULES)
        validate, names = made.__init__, [one.name for one in fields(made)]

        def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
            given = dict(zip(names, arguments, strict=False)) | keywords
            try:
                validate(self, **given)
            except ValidationError as error:
                raise ValueError(_explain(error, given)[1]) from None

        made.__init__ = __init__
        return made

    return decorate


@settings()
class Settings:
    """Base of settings."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_names(cls, content: Any) -> Any:
        given, known = content.kwargs if isinstance(content, ArgsKwargs) else content, [one.name for one in fields(cls)]
        for name in given if isinstance(given, Mapping) else ():
            if name not in known:
                allowed = said_allowed(name, known)
                raise PydanticCustomError("unknown", "{allowed}", {"allowed": allowed, "name": name})
        return content

    @classmethod
    def read(cls, content: Any) -> Self:
        """Make settings from a mapping; ValueError for unknown or missing names, or values that are not allowed."""
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            raise ValueError(_explain(error, content)[1]) from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON and YAML values; :meth:`read` takes them."""
        return to_jsonable_python(self, serialize_as_any=True)


def check_value(name: str, value: object, kind: Any) -> Any:
    """Return an argument validated as a field of a kind such as ``PositiveInteger | None``, or raise ValueError."""
    try:
        return TypeAdapter(kind, config=_RULES).validate_python(value)
    except ValidationError as error:
        raise ValueError(_explain(error, {name: value}, (name,))[1]) from None


def read_yaml(cls: type[Kind], text: str, source: object, overrides: Sequence[str] = ()) -> Kind:
    """Read settings from the text of a YAML file; ``source`` is its path.

    ``overrides`` are ``key=value`` with dotted keys, for example ``validation.every=100``; values are YAML. ValueError,
    which names the file, and the override, for malformed YAML or settings that are not allowed.
    """
    content = parse_yaml(text, str(source))
    changed = {_set(content, override): override for override in overrides if isinstance(content, dict)}
    try:
        return TypeAdapter(cls).validate_python(content)
    except ValidationError as error:
        path, said = _explain(error, content)
        blamed = [override for key, override in changed.items() if key[: len(path)] == path[: len(key)]]
        place = f" with {', '.join(blamed)}" if blamed else ""
        raise ValueError(f"{source}{place}: {said}") from None


def _explain(error: ValidationError, content: Any, begin: _Path = ()) -> tuple[_Path, str]:
    """Return the path of one value in the content that is not allowed, and a sentence about it."""
    errors = [(_path_in(content, (*begin, *one["loc"]), one["type"]), one) for one in error.errors(include_url=False)]
    # a misspelt name first; of a union's members the one that fits best
    path, worst = max(errors, key=lambda one: (one[1]["type"] == "unknown", len(one[0]), one[1]["type"] in _OURS))
    name, given = ".".join(map(str, path)), worst["input"]
    if worst["type"] == "unknown":
        path = (*path, worst["ctx"]["name"])
        return path, f"Unknown setting {'.'.join(map(str, path))!r}; {worst['msg']}"
    if worst["type"] == "missing":
        lacking = [str(one["loc"][-1]) for where, one in errors if where == path and one["type"] == "missing"]
        return path, f"{name or 'The configuration'} lacks {', '.join(lacking)}."
    if worst["type"] == "value_error":
        said = str(worst["ctx"]["error"])
        return path, said if not path or said.startswith(f"{name}=") else f"{name}: {said}"
    words = dict.fromkeys(re.sub(r"^\w+ should ", "", one["msg"]) for where, one in errors if where == path)
    value = f"{name}={given!r}" if name else f"The configuration, {given!r},"
    return path, f"{value} must {' or '.join(words)}."


def _path_in(content: Any, location: _Path, kind: str) -> _Path:
    """Return the part of pydantic's location of an error that the content has, without the members of unions."""
    path: _Path = ()
    for name in location:
        try:
            content = content[name]
        except (LookupError, TypeError):
            continue
        path += (name,)
    return path if path or kind == "missing" else location[:1]  # a default that is not allowed


def _set(content: Any, override: str) -> _Path:
    """Set a value from the command line; return its path."""
    key, value = parse_assignment(override)
    *outer, last = path = tuple(key.split("."))
    for name in outer:
        content = content.setdefault(name, {}) if isinstance(content, dict) else None
    check(isinstance(content, dict), f"{override!r}: {'.'.join(outer)} has no keys; set it as a whole.")
    content[last] = value
    return path


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``key=value``, whose value is YAML; ValueError for another form."""
    key, separator, value = text.partition("=")
    check(bool(key and separator), f"{text!r} must look like key=value, such as num_frames=81.")
    return key, parse_yaml(value, repr(text))


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; ValueError, which begins with the source, if it is malformed or a key is given twice."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for place, key in enumerate(keys):
                if any(key.value == other.value for other in keys[:place]):
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    UniqueKeys.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))  # 1e-4, as in YAML 1.2
    try:
        loader = UniqueKeys(text)
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
