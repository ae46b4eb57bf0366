"""Settings: frozen dataclasses of pydantic, made from keywords, mappings or YAML, with errors of one sentence.

A field's annotation says all that it may hold::

    @settings()
    class RunConfig(Settings):
        steps: Annotated[Integer, Field(gt=0)]
        scheduler: Literal["constant", "cosine"] = "constant"

An error names the field by its path, such as ``validation.every``, its value and what is allowed; of an unknown name
the nearest ones; of a file the line.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import Annotated, Any, Self, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError, to_jsonable_python

from .errors import check_names, nearest

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
    """Base of settings. Numbers of NumPy and torch become Python's own, lists become tuples."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, content: Any) -> Any:
        """Reject unknown names and convert arrays."""
        is_call = isinstance(content, ArgsKwargs)
        given = (content.kwargs or {}) if is_call else content
        if not isinstance(given, Mapping):
            return given
        known = [one.name for one in fields(cls)]
        for name in given:
            try:
                check_names([name], known, "setting")
            except ValueError as error:
                raise PydanticCustomError("unknown", "{said}", {"said": str(error), "name": name}) from error
        plain = {name: _plain(value) for name, value in given.items()}
        return ArgsKwargs((), plain) if is_call else plain

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
    """Return an argument of a function, validated as a field of settings of a kind such as ``PositiveInteger | None``.

    Raises:
        ValueError: it is not allowed.
    """
    value = _plain(value)
    try:
        return TypeAdapter(kind, config=_RULES).validate_python(value)
    except ValidationError as error:
        raise ValueError(_explain(error, {name: value}, (name,))[1]) from None


def read_yaml(cls: type[Kind], text: str, source: object, overrides: Sequence[str] = ()) -> Kind:
    """Read settings from the text of a YAML file; ``source`` is its path.

    ``overrides`` are ``key=value`` with dotted keys, for example ``validation.every=100``; values are YAML.

    Raises:
        ValueError: malformed YAML, a malformed override, or settings that are not allowed. The message names the file,
            the line and overrides of the setting.
    """
    content = parse_yaml(text, str(source))
    changed: dict[_Path, str] = {}
    for override in overrides if isinstance(content, dict) else ():
        changed[_set(content, override)] = override
    try:
        return TypeAdapter(cls).validate_python(content)
    except ValidationError as error:
        path, said = _explain(error, content)
        related = {key: override for key, override in changed.items() if key[: len(path)] == path[: len(key)]}
        is_overridden = any(key == path[: len(key)] for key in related)  # then no line of the file is to blame
        place = f"{source}, line {_line_of(text, path)}" if path and not is_overridden else str(source)
        raise ValueError(f"{place}{' with ' if related else ''}{', '.join(related.values())}: {said}") from None


def _explain(error: ValidationError, content: Any, begin: _Path = ()) -> tuple[_Path, str]:
    """Return the path of one value in the content that is not allowed, and a sentence about it."""
    found = [(_path_in(content, (*begin, *one["loc"]), one["type"]), one) for one in error.errors(include_url=False)]
    order = ("value_error", "missing", "unknown")  # of a union's members the one that fits best; a misspelt name first
    path, worst = max(found, key=lambda one: (one[1]["type"] == order[-1], len(one[0]), one[1]["type"] in order))
    name = ".".join(map(str, path))
    if worst["type"] == "unknown":
        own = worst["ctx"]["name"]
        return (*path, own), worst["msg"].replace(repr(own), repr(".".join(map(str, (*path, own)))), 1)
    if worst["type"] == "missing":
        where = path[:-1]
        lacking = [str(one[-1]) for one, each in found if one[:-1] == where and each["type"] == "missing"]
        return where, f"{'.'.join(map(str, where)) or 'The configuration'} lacks {', '.join(lacking)}."
    if worst["type"] == "value_error":
        said = str(worst["ctx"]["error"])
        if not path or said.startswith(f"{name}="):
            return path, said
        return path, f"{name}{'=' if said.startswith(repr(worst['input'])) else ': '}{said}"
    words = dict.fromkeys(re.sub(r"^\w+ should ", "", one["msg"]) for where, one in found if where == path)
    said = " or ".join("be named settings" if " an instance of " in one else one for one in words)
    choices = re.findall(r"'([^']*)'", str(worst.get("ctx", {}).get("expected", "")))
    near = nearest(worst["input"], choices) if isinstance(worst["input"], str) else ""
    value = f"{name}={worst['input']!r}" if name else f"The configuration, {worst['input']!r},"
    return path, f"{value} must {said.replace(' or be ', ' or ')}{f'; {near}' if near else '.'}"


def _path_in(content: Any, location: _Path, kind: str) -> _Path:
    """Return where pydantic found an error of a kind, without its names for the members of unions."""
    path = location[:1]
    for place, name in enumerate(location):
        try:
            content = content[name]
        except (LookupError, TypeError):  # a missing name, or a union's member
            path += location[place:] if kind == "missing" and place == len(location) - 1 > 0 else ()
        else:
            path += (name,) if place else ()
    return path


def _plain(value: Any) -> Any:
    """Return numbers and arrays, for example of NumPy and torch, as plain Python values."""
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _set(content: Any, override: str) -> _Path:
    """Set a value from the command line; return its path."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"Override {override!r} must look like key=value, for example validation.every=100.")
    path: _Path = ()
    names = key.split(".")
    for number, name in enumerate(names, start=1):
        is_index = isinstance(content, list) and name.isdigit() and int(name) < len(content)
        if not is_index and not isinstance(content, dict):
            count = f"; the list has {len(content)} entries, counted from 0" if isinstance(content, list) else ""
            raise ValueError(f"Override {override!r}: there is no {name!r} to set{count}.")
        place = int(name) if is_index else name
        path = (*path, place)
        if number == len(names):
            content[place] = parse_yaml(text, f"Override {override!r}")
        else:
            content = content[place] if is_index else content.setdefault(place, {})
    return path


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


def _line_of(text: str, path: Sequence[str | int]) -> int:
    """Return the line, from 1, of the value at a path in valid YAML, or of the innermost mapping or list around it."""
    import yaml

    node, line = yaml.compose(text, yaml.SafeLoader), 1
    for name in path:
        children: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            children = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        elif isinstance(node, yaml.SequenceNode):
            children = {index: (value, value) for index, value in enumerate(node.value)}
        if name not in children:
            break
        key, node = children[name]
        line = key.start_mark.line + 1
    return line


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value before and value now of what differs between two contents of JSON; None for absent."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, before, now
