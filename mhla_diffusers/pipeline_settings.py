"""Arguments of a pipeline's call, as ``--set`` gives them."""

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin

_WRITABLE = {bool, int, float, str, list, dict}
"""Types that a setting can have: tensors, generators and functions cannot be written down beside the results."""

_GIVEN = {
    "prompt",
    "class_labels",
    "generator",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "output_type",
    "return_dict",
}
"""Arguments that come from elsewhere, or that would change what a call returns."""


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """``key=value`` arguments of the pipeline's call; values are YAML.

    Raises:
        ValueError: an argument without "=", or a value that is no YAML.
    """
    import yaml

    settings = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"Setting {text!r} must look like key=value, for example num_frames=81.")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"Setting {text!r} is no YAML: {error}.") from error
    return settings


def check_settings(pipeline: type, settings: Mapping[str, Any]) -> None:
    """Check settings against the annotations of a pipeline's call.

    Args:
        pipeline: class of a diffusers pipeline.
        settings: name and value of arguments.

    Raises:
        ValueError: a name that the call does not have, or a value that it does not take.
    """
    parameters = inspect.signature(pipeline.__call__, eval_str=True).parameters
    allowed = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in _GIVEN and _types(parameter.annotation) & _WRITABLE
    }
    for name, value in settings.items():
        if name not in allowed:
            near = get_close_matches(name, allowed, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}? Allowed" if near else "allowed"
            raise ValueError(
                f"{name!r} is no setting of a call of {pipeline.__name__}; {hint}: {', '.join(sorted(allowed))}."
            )
        _check_value(pipeline, allowed[name], value)


def _check_value(pipeline: type, parameter: inspect.Parameter, value: Any) -> None:
    types = _types(parameter.annotation) & _WRITABLE
    numbers = types <= {int, float}
    if value is None and (parameter.default is None or not numbers):
        # annotations of diffusers often leave None out
        return
    fitting = types | {int} if float in types else types
    if type(value) not in fitting:
        names = " or ".join(sorted(kind.__name__ for kind in types))
        raise ValueError(
            f"{parameter.name}={value!r} is of type {type(value).__name__}, but {pipeline.__name__} takes {names}."
        )
    if types == {int} and value < 1:
        # the whole numbers of these pipelines are sizes and counts
        raise ValueError(f"{parameter.name}={value} must be 1 or more.")


def _types(annotation: Any) -> set[type]:
    """The classes that an annotation allows, those within containers left aside."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return set().union(*(_types(member) for member in get_args(annotation)))
    found = annotation if origin is None else origin
    return {found} if isinstance(found, type) else set()
