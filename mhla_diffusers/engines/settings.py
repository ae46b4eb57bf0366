"""Settings of an engine's sparse attention, from a node's inputs or from environment variables."""

import os
from collections.abc import Mapping
from typing import Any

from ..config import SparseConfig, load_patch
from ..errors import check
from ..settings import Count, Settings, parse_yaml


class EngineSettings(Settings):
    """Settings of an engine's attention; ValueError unless it is sparse in all layers."""

    config: SparseConfig = SparseConfig()
    min_tokens: Count = 4096
    """Sequences of fewer tokens stay dense, since there sparse attention gains next to nothing."""

    def _check(self) -> None:
        layers = self.config.layers
        check(
            layers == "all", f"layers={layers!r} must be 'all' in an engine; dense_layers keeps the first ones dense."
        )


def read_settings(patch: str, given: Mapping[str, Any]) -> EngineSettings:
    """Read a profile, preset or YAML file, and override settings, given as values or as YAML text."""
    changes = {name: parse_yaml(value, name) if isinstance(value, str) else value for name, value in given.items()}
    min_tokens = changes.pop("min_tokens", EngineSettings().min_tokens)
    config: Any = load_patch(patch).patch.replace(**changes)
    return EngineSettings(config=config, min_tokens=min_tokens)


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """Read settings from ``MHLA_PATCH``, as in :func:`read_settings`, and variables such as ``MHLA_DENSITY=0.1``.

    ValueError for an unknown variable that begins with ``MHLA_``, or a value that is not allowed.
    """
    found = {name: text for name, text in sorted(environment.items()) if name.startswith("MHLA_") and text}
    given = {name.removeprefix("MHLA_").lower(): text for name, text in found.items()}
    try:
        return read_settings(given.pop("patch", "faithful"), given)
    except ValueError as error:
        variables = ", ".join(f"{name}={text}" for name, text in found.items())
        raise ValueError(f"{variables} in the environment: {error}") from None
