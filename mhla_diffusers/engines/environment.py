"""Settings of an engine's sparse attention, from environment variables, since engines pass a backend no others."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import SparseConfig, load_patch
from ..patching.attend import EngineSettings, read_layers
from ..settings import check_names

_VARIABLES = {
    "MHLA_DENSITY": "density",
    "MHLA_ORDER": "order",
    "MHLA_BLOCK_SIZE": "block_size",
    "MHLA_KEY_BLOCK_SIZE": "key_block_size",
    "MHLA_SOFTMAX_STEPS": "softmax_steps",
    "MHLA_SOFTMAX_LAST": "softmax_last",
    "MHLA_REFRESH": "refresh",
    "MHLA_CARRY_DTYPE": "carry_dtype",
    "MHLA_CARRY_DEVICE": "carry_device",
}
"""Environment variables and the settings of :class:`SparseConfig` that they stand for."""
_OTHER_VARIABLES = ("MHLA_PATCH", "MHLA_SOFTMAX_LAYERS", "MHLA_MIN_TOKENS")


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """Read settings from variables such as ``MHLA_DENSITY=0.1``.

    ``MHLA_PATCH`` is a preset or the path of its YAML file, whose settings the other variables change.
    ``MHLA_SOFTMAX_LAYERS`` is a list such as ``0,1`` or ``0-3``.

    Raises:
        ValueError: an unknown variable that begins with ``MHLA_``, or a value that is not allowed.
    """
    given = {name: text for name, text in environment.items() if name.startswith("MHLA_") and text}
    check_names(given, (*_VARIABLES, *_OTHER_VARIABLES), "environment variable")
    config: Any = load_patch(given["MHLA_PATCH"]).config if "MHLA_PATCH" in given else SparseConfig()
    changes = {setting: read_value(given[name]) for name, setting in _VARIABLES.items() if name in given}
    others: dict[str, Any] = {}
    if "MHLA_MIN_TOKENS" in given:
        others["min_tokens"] = read_value(given["MHLA_MIN_TOKENS"])
    try:
        others["softmax_layers"] = read_layers(given.get("MHLA_SOFTMAX_LAYERS", ""))
        settings = EngineSettings(config, **others)
        return replace(settings, config=settings.config.replace(**changes))
    except ValueError as error:
        said = ", ".join(f"{name}={text}" for name, text in sorted(given.items()))
        raise ValueError(f"{said} in the environment: {error}") from None


def read_value(text: str) -> Any:
    """Return the value of a text: None for "none", a count, or else text, in which the settings look for a number."""
    return None if text == "none" else int(text) if text.strip().isdigit() else text
