"""Settings: frozen models of pydantic, made from keywords, mappings or YAML, with errors of one sentence.

An error names the field, its value and what is allowed; of an unknown name the nearest ones; of a file its path.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError, create_model

from .errors import check, check_names
from .files import check_unique

Positive = Annotated[StrictFloat, Field(gt=0)]
PositiveInteger = Annotated[StrictInt, Field(gt=0)]
Count = Annotated[StrictInt, Field(ge=0)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
"""Seed that torch's random generators accept."""

Kind = TypeVar("Kind", bound="Settings")


class Settings(BaseModel):
    """Base of settings; ValueError for unknown or missing names, or values that are not allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **given: Any) -> None:
        check_names(given, list(type(self).model_fields), "setting")
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ValueError(_sentence(error, given)) from None
        self._check()

    def _check(self) -> None:
        """Raise ValueError where fields contradict each other."""

    @classmethod
    def read(cls, content: Any) -> Self:
        """Make settings from a mapping, as :meth:`to_dict` returns and YAML files hold."""
        check(isinstance(content, Mapping), f"{content!r} must be a mapping of settings.")
        return cls(**content)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON and YAML values."""
        return self.model_dump(mode="json", serialize_as_any=True)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return type(self)(**dict(self) | changes)


def _sentence(error: ValidationError, given: Mapping[str, Any]) -> str:
    """Say what one of the given values must be."""
    errors = error.errors(include_url=False)
    if lacking := [str(one["loc"][0]) for one in errors if one["type"] == "missing"]:
        return f"{', '.join(lacking)} must be given."
    # a sentence of our own says most; of a union's members the one that fits best
    worst = max(errors, key=lambda one: (one["type"] == "value_error", len(one["loc"])))
    if worst["type"] == "value_error":
        said, path = str(worst["ctx"]["error"]), ".".join(map(str, worst["loc"]))
        return said if said.startswith(path) else f"{path}: {said}"
    name, value = str(worst["loc"][0]), worst["input"]
    words = dict.fromkeys(re.sub(r"^\w+ should ", "", one["msg"]) for one in errors if one["input"] is value)
    part = "" if value is given[name] else f": {value!r}"
    return f"{name}={given[name]!r}{part} must {' or '.join(words)}."


def check_value(name: str, value: object, kind: Any) -> Any:
    """Return an argument validated as a field of a kind such as ``PositiveInteger | None``, or raise ValueError."""
    field: Any = {name: (kind, ...)}
    return getattr(create_model("Argument", __base__=Settings, **field)(**{name: value}), name)


def read_yaml(cls: type[Kind], text: str, source: object, overrides: Sequence[str] = ()) -> Kind:
    """Read settings from the text of a YAML file; ``source`` is its path.

    ``overrides`` are ``key=value`` with dotted keys, for example ``validation.every=100``; values are YAML. ValueError,
    which names the file and the overrides, for malformed YAML or settings that are not allowed.
    """
    content = parse_yaml(text, str(source))
    try:
        for key, value in map(parse_assignment, overrides):
            *outer, last = key.split(".")
            place = content
            for name in outer:
                place = place.setdefault(name, {}) if isinstance(place, dict) else None
            check(isinstance(place, dict), f"{key}: {'.'.join(outer) or 'the file'} has no keys; set it as a whole.")
            place[last] = value
        return cls.read(content)
    except ValueError as error:
        where = f"{source} with {', '.join(overrides)}" if overrides else source
        raise ValueError(f"{where}: {error}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``key=value``, whose value is YAML; ValueError for another form."""
    key, separator, value = text.partition("=")
    check(bool(key and separator), f"{text!r} must look like key=value.")
    return key, parse_yaml(value, repr(text))


class _Loader(yaml.SafeLoader):
    """Reads keys as text, and refuses one that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        place = f"{node.start_mark.name}: in the mapping from line {node.start_mark.line + 1}, the key"
        check_unique([str(key.value) for key, _ in node.value], place)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


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
