"""One reader of settings: frozen dataclasses whose fields say once what they may hold.

The annotation of a field is its type, with its choices as a ``Literal``. Range, example and words are its metadata::

    @dataclass(frozen=True)
    class StageConfig(Settings):
        steps: int = field(metadata=allow(above=0))
        scheduler: Literal["constant", "cosine"] = "constant"

Every object is checked when it is made, from keywords (the constructor), from a mapping (:meth:`Settings.read`) or from
a YAML file with overrides of the command line (:func:`read_yaml`). An error names the field by its path, such as
``stages.0.steps``, its value and what is allowed; of an unknown name the nearest ones; of a file the line.
"""

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

Place = tuple[str | int, ...]
"""Place of a value in nested settings, such as ("stages", 0, "steps")."""
Kind = TypeVar("Kind", bound="Settings")

_WORDS: dict[Any, str] = {bool: "True or False", str: "text", Path: "a path", list: "a list", type(None): "None"}


@dataclass(frozen=True)
class _Allowed:
    """What a field may hold beside its type."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    example: str = ""
    words: str = ""
    is_filled: bool = False
    test: Callable[[Any], bool] | None = None
    convert: Callable[[Any], Any] | None = None
    key: str = ""

    def holds(self, number: float) -> bool:
        """Whether a number is finite and within the range."""
        lower = self.at_least is None or number >= self.at_least, self.above is None or number > self.above
        upper = self.at_most is None or number <= self.at_most, self.below is None or number < self.below
        return math.isfinite(number) and all((*lower, *upper))

    @property
    def range_words(self) -> str:
        """The range, after "a number"."""
        if self.at_least is not None and self.at_most is not None:
            return f" from {self.at_least} to {self.at_most}"
        words = {" above": self.above, " of at least": self.at_least, " below": self.below, " at most": self.at_most}
        return " and".join(f"{word} {end}" for word, end in words.items() if end is not None)


def allow(**allowed: Any) -> dict[str, Any]:
    """Return the metadata of a field, for ``dataclasses.field(metadata=...)``.

    Args:
        **allowed: above, at_least, below, at_most: the range of numbers, also of those in a list.
            example: of a number, for errors.
            words: what is allowed, in place of words from type and range.
            is_filled: whether text, a list or a mapping must not be empty.
            test: whether a value of the right type other than None is allowed; needs ``words``.
            convert: makes the value, in place of type and range, or raises a ValueError that begins with its name.
            key: name in mappings, where it is not the field's.
    """
    return {"allowed": _Allowed(**allowed)}


class SettingError(ValueError):
    """A setting that is not allowed.

    Args:
        begin: text before the setting's path.
        path: of the setting, from the settings that are read.
        end: text after it.
    """

    def __init__(self, begin: str, path: Place, end: str) -> None:
        super().__init__(begin, path, end)
        self.begin, self.path, self.end = begin, path, end

    def __str__(self) -> str:
        path = ".".join(map(str, self.path)) or "The configuration"
        return f"{self.begin}{path}{self.end}"


@dataclass(frozen=True)
class Settings:
    """Base of settings, whose fields are checked and converted when they are made.

    Numbers of NumPy and torch become Python's own, lists tuples, and mappings the settings that they are for.

    Raises:
        ValueError: a value that is not allowed.
    """

    def __post_init__(self) -> None:
        for name, kind, allowed in _described(type(self)):
            object.__setattr__(self, name, _checked(getattr(self, name), kind, allowed, allowed.key or name))

    @classmethod
    def read(cls, content: Any) -> Self:
        """Make settings from a mapping, such as the content of a YAML or JSON file.

        Raises:
            ValueError: unknown or missing names, or values that are not allowed.
        """
        if not isinstance(content, Mapping):
            raise SettingError("", (), f" must hold named settings, got {content!r}.")
        names = [allowed.key or name for name, _, allowed in _described(cls)]
        known = dict(zip(names, fields(cls), strict=True))
        for name in (one for one in content if one not in known):
            if (place := _place_inside(cls, name)) is not None:
                where = place.removesuffix(".0")
                raise SettingError("", (name,), f" is a setting of {where}, not of the whole; give {place}.{name}.")
        check_names(content, list(known), "setting")
        needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
        if missing := [name for name in needed if name not in content]:
            raise SettingError("", (), f" lacks {', '.join(missing)}.")
        return cls(**{known[name].name: value for name, value in content.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON and YAML values; :meth:`read` takes them."""
        return {allowed.key or name: _as_plain(getattr(self, name)) for name, _, allowed in _described(type(self))}


def read_yaml(cls: type[Kind], text: str, source: object, overrides: Sequence[str] = ()) -> Kind:
    """Read settings from a YAML file.

    Args:
        cls: their class.
        text: content of the file.
        source: its path, for errors.
        overrides: ``key=value`` with dotted keys, for example ``stages.0.steps=100``; values are YAML.

    Raises:
        ValueError: malformed YAML, a malformed override, a configuration of another script, or settings that are not
            allowed. The message names the file, the line and overrides of the setting.
    """
    content = parse_yaml(text, str(source))
    changed: dict[Place, str] = {}
    for override in overrides if isinstance(content, dict) else ():
        changed[_set(content, override)] = override
    try:
        return cls.read(content)
    except ValueError as error:
        path = error.path if isinstance(error, SettingError) else ()
        related = {key: override for key, override in changed.items() if key[: len(path)] == path[: len(key)]}
        is_overridden = any(key == path[: len(key)] for key in related)  # then no line of the file is to blame
        place = f"{source}, line {_line_of(text, path)}" if path and not is_overridden else str(source)
        raise ValueError(f"{place}{' with ' if related else ''}{', '.join(related.values())}: {error}") from error


def _set(content: Any, override: str) -> Place:
    """Set a value that the command line gives, and return its path."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"Override {override!r} must look like key=value, for example stages.0.steps=100.")
    path: Place = ()
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
    """Parse YAML.

    Args:
        text: of a file or a setting.
        source: its name, to begin an error with.

    Raises:
        ValueError: it is malformed, or a key is given twice.
    """
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for place, key in enumerate(keys):
                if any(key.value == other.value for other in keys[:place]):
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            return super().construct_mapping(node, deep)

    try:
        loader = UniqueKeys(text)
        loader.name = source  # in its errors, beside line and column
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from error


def _line_of(text: str, path: Sequence[str | int]) -> int:
    """Return the line, from 1, of a value in YAML, or of the innermost mapping or list around it that is in the text.

    Args:
        text: valid YAML.
        path: keys and indices that lead to the value.
    """
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


def _described(cls: type[Settings]) -> list[tuple[str, Any, _Allowed]]:
    """Return name, type and what else is allowed of every field."""
    kinds = get_type_hints(cls)
    return [(item.name, kinds[item.name], item.metadata.get("allowed", _Allowed())) for item in fields(cls)]


def _place_inside(cls: type[Settings], name: str) -> str | None:
    """Return which of the settings inside these have a name, such as "stages.0"; None if none has it."""
    for where, kind, _ in _described(cls):
        for one in _members(kind):
            for inner in (one, *get_args(one)):
                if is_dataclass(inner) and name in (item.name for item in fields(inner)):
                    return where if inner is one else f"{where}.0"
    return None


def _checked(value: Any, kind: Any, allowed: _Allowed, name: str) -> Any:
    """Return the value of a field, converted."""
    value = _plain(value)
    if allowed.convert is not None:
        try:
            return allowed.convert(value)
        except ValueError as error:
            said = str(error)
            end = said.removeprefix(name) if said.startswith(f"{name}=") else f": {said}"
            raise SettingError("", (name,), end) from error
    converted = _convert(value, kind, allowed, (name,))
    is_empty = allowed.is_filled and converted in ("", (), [], {})
    if is_empty or (allowed.test is not None and converted is not None and not allowed.test(converted)):
        raise _misfit(value, kind, allowed, (name,))
    return converted


def _convert(value: Any, kind: Any, allowed: _Allowed, path: Place) -> Any:
    """Convert a value to a type, of several to the first that takes it."""
    for one in _members(kind):
        of, arguments = get_origin(one) or one, get_args(one)
        if one is Any or (isinstance(one, type) and one not in (int, float) and isinstance(value, one)):
            return value
        if is_dataclass(one) and isinstance(value, Mapping):
            try:
                return one.read(value)  # type: ignore[union-attr]
            except SettingError as error:
                raise SettingError(error.begin, (*path, *error.path), error.end) from error.__cause__
            except ValueError as error:
                raise SettingError("", path, f": {error}") from error
        if of in (tuple, list) and arguments and isinstance(value, list | tuple | range):
            kinds = arguments if of is tuple and arguments[-1] is not ... else [arguments[0]] * len(value)
            if len(kinds) == len(value):
                items = enumerate(zip(value, kinds, strict=True))
                return of(_convert(item, own, allowed, (*path, index)) for index, (item, own) in items)
        if of in (dict, Mapping) and isinstance(value, Mapping):
            return {name: _convert(x, arguments[1], _Allowed(), (*path, name)) for name, x in value.items()}
        if of is Literal and any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        number = _number(value) if one is float else value if isinstance(value, int) else None
        if one in (int, float) and number is not None and not isinstance(value, bool) and allowed.holds(number):
            return one(number)
    raise _misfit(value, kind, allowed, path)


def _number(value: Any) -> float | None:
    """Return a number, also one that is given as text, since YAML reads ``1e-4`` so; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def _misfit(value: Any, kind: Any, allowed: _Allowed, path: Place) -> SettingError:
    choices = [choice for one in _members(kind) for choice in get_args(one) if get_origin(one) is Literal]
    words = allowed.words or _words(kind, allowed)
    words += ", not empty" if allowed.is_filled and len(path) == 1 else ""
    near = nearest(value, choices) if isinstance(value, str) else ""
    return SettingError("", path, f"={value!r} must be {words}" + (f"; {near}" if near else "."))


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _words(kind: Any, allowed: _Allowed) -> str:
    """Say in words what a field takes."""
    said: list[str] = []
    for one in _members(kind):
        of, arguments = get_origin(one) or one, get_args(one)
        if of is Literal:
            said += map(repr, arguments)
        elif of in (tuple, list) and arguments:
            count = "" if of is list or arguments[-1] is ... else f"{len(arguments)} times "
            said.append(f"a list of {count}{_words(arguments[0], allowed)}")
        elif one in (int, float):
            example = f", such as {allowed.example}" if allowed.example else ""
            said.append(("an integer" if one is int else "a number") + allowed.range_words + example)
        else:
            said.append(_WORDS.get(one, "named settings"))
    if not said[1:]:
        return said[0]
    between = ", or " if any(" " in one for one in said) else " or "
    return ", ".join(said[:-1]) + between + said[-1]


def _plain(value: Any) -> Any:
    """Return numbers and arrays, for example of NumPy and torch, as plain Python values, and fractions as text."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _as_plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    if isinstance(value, dict):
        return {name: _as_plain(one) for name, one in value.items()}
    return [_as_plain(one) for one in value] if isinstance(value, tuple | list) else value


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value before and value now of everything that differs between two contents of JSON.

    What only one of them has is None in the other. Lists of named values are compared one by one, others as wholes.
    """
    prefix = f"{name}." if name else ""
    both_lists = isinstance(before, list) and isinstance(now, list)
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{prefix}{key}")
    elif both_lists and all(isinstance(one, dict) for one in (*before, *now)):
        for index, (one, other) in enumerate(zip_longest(before, now)):
            yield from differences(one, other, f"{prefix}{index}")
    elif before != now:
        yield name, before, now


def check(condition: bool, message: str, *path: str | int) -> None:
    """Raise ValueError with the message, and within settings the path that it is about, unless a condition holds."""
    if not condition:
        raise SettingError("", path, f": {message}") if path else ValueError(message)


def check_value(name: str, value: object, kind: Any, **allowed: Any) -> Any:
    """Return an argument of a function, converted as a field of settings is.

    Args:
        name: of the argument.
        value: its value.
        kind: its type, such as ``int | None``.
        **allowed: of :func:`allow`.

    Raises:
        ValueError: it is not allowed.
    """
    return _checked(value, kind, _Allowed(**allowed), name)


def check_choice(name: str, value: object, allowed: Sequence[object], listed_by: str = "") -> None:
    """Raise ValueError, with the nearest names, unless a value is one of those that are allowed.

    ``listed_by`` is the command that lists them, if they are too many for an error.
    """
    if value not in allowed and listed_by:
        raise ValueError(f"{name}={value!r} is unknown; {said_allowed(value, list(map(str, allowed)), listed_by)}")
    if value not in allowed:
        near = nearest(value, allowed)
        words = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ValueError(f"{name}={value!r} must be {words}" + (f"; {near}" if near else "."))


def nearest(name: object, allowed: Iterable[object], count: int = 2, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" with the allowed names that are like a name, or begin with it; "" for none."""
    names = [str(one) for one in allowed]
    near = get_close_matches(str(name), names, n=count, cutoff=cutoff)
    near = near or [one for one in names if name and one.startswith(str(name))][:count]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def said_allowed(name: object, allowed: Sequence[str], listed_by: str = "") -> str:
    """Return the allowed names, or in their place the command that lists them, after the nearest of an unknown name."""
    if listed_by:
        return f"{nearest(name, allowed, count=3, cutoff=0.4)} `{listed_by}` lists all.".lstrip()
    hint = nearest(name, allowed)
    return f"{hint} Allowed: {', '.join(allowed)}." if hint else f"allowed: {', '.join(allowed)}."


def check_names(names: Iterable[Any], allowed: Sequence[str], what: str, *path: str, listed_by: str = "") -> None:
    """Raise unless all names are known.

    Args:
        names: given names.
        allowed: known names.
        what: what they name, such as "setting".
        *path: of the settings that they are in.
        listed_by: command that lists the known names, if they are too many for an error.

    Raises:
        ValueError: an unknown name; the message has similar ones.
    """
    for name in names:
        if name not in allowed:
            raise SettingError(f"Unknown {what} '", (*path, name), f"'; {said_allowed(name, allowed, listed_by)}")
