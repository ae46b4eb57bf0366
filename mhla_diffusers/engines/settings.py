"""Settings of an engine's sparse attention, from a node's inputs or from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator

from ..config import PROFILES, PatchConfig, SparseConfig, load_patch
from ..errors import check, check_choice, check_names
from ..settings import Count, Settings, parse_yaml, settings

_NAMES = ("density", "order", "block_size", "key_block_size", "dense_first", "dense_last", "dense_every",
          "dense_layers", "min_tokens")  # fmt: skip
"""Settings that an environment variable such as ``MHLA_DENSITY`` stands for."""


def _check_runs(config: Any) -> Any:
    if isinstance(config, PatchConfig):
        check(
            isinstance(config, SparseConfig) and config.layers == "all",
            f"Engines run only sparse attention with layers='all', not {config.attention} with "
            f"layers={config.layers!r}. Give a profile such as 'balanced' or a preset such as "
            "'wan2.1-t2v-1.3b-sparse'.",
        )
    return config


@settings()
class EngineSettings(Settings):
    """What an engine's attention does; raises ValueError unless it is sparse attention in all layers."""

    config: Annotated[SparseConfig, BeforeValidator(_check_runs)] = SparseConfig()
    min_tokens: Count = 4096
    """Sequences of fewer tokens stay dense, since there sparse attention gains next to nothing."""


def read_settings(given: Mapping[str, Any], config: Any) -> EngineSettings:
    """Return settings with some changed, given as values or as texts that people write."""
    changes = {name: parse_yaml(value, name) if isinstance(value, str) else value for name, value in given.items()}
    settings = EngineSettings(config, changes.pop("min_tokens", EngineSettings.min_tokens))
    return replace(settings, config=config.replace(**changes))


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """Read settings from variables such as ``MHLA_DENSITY=0.1``.

    ``MHLA_PROFILE`` is a profile, "faithful" by default, and ``MHLA_PATCH`` a preset or the path of its YAML file; the
    other variables change its settings.

    Raises:
        ValueError: an unknown variable that begins with ``MHLA_``, both of these, or a value that is not allowed.
    """
    given = {name: text for name, text in environment.items() if name.startswith("MHLA_") and text}
    names = ("MHLA_PROFILE", "MHLA_PATCH", *(f"MHLA_{name.upper()}" for name in _NAMES))
    check_names(given, names, "environment variable")
    check(len(given.keys() & set(names[:2])) < 2, "MHLA_PROFILE and MHLA_PATCH cannot be combined; set one of them.")
    profile = given.get("MHLA_PROFILE", "faithful")
    check_choice("MHLA_PROFILE", profile, tuple(PROFILES))
    config = load_patch(given.get("MHLA_PATCH", profile)).patch
    changes = {name.removeprefix("MHLA_").lower(): text for name, text in given.items() if name not in names[:2]}
    try:
        return read_settings(changes, config)
    except ValueError as error:
        variables = ", ".join(f"{name}={text}" for name, text in sorted(given.items()))
        raise ValueError(f"{variables} in the environment: {error}") from None
