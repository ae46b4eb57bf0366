"""Settings of an engine's sparse attention, from a node's inputs or from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import PatchConfig, SparseConfig, load_patch
from ..settings import Settings, allow, check, check_names

_NAMES = ("density", "order", "block_size", "key_block_size", "softmax_steps", "softmax_last", "refresh",
          "softmax_layers", "min_tokens")  # fmt: skip
"""Settings that an environment variable such as ``MHLA_DENSITY`` stands for."""


@dataclass(frozen=True)
class EngineSettings(Settings):
    """What an engine's attention does.

    Raises:
        ValueError: the settings are not of sparse attention in all layers, or a value is not allowed.
    """

    config: SparseConfig = SparseConfig()
    """Density, block sizes, order, the steps in which attention stays dense, and whether their residuals correct the
    others."""
    softmax_layers: tuple[int, ...] = field(default=(), metadata=allow(at_least=0))
    """Layers whose attention stays dense, from 0."""
    min_tokens: int = field(default=4096, metadata=allow(at_least=0))
    """Sequences of fewer tokens stay dense, since there sparse attention gains next to nothing."""

    def __post_init__(self) -> None:
        config: Any = self.config
        attention, layers = getattr(config, "attention", repr(config)), getattr(config, "layers", "all")
        check(
            isinstance(config, SparseConfig) and layers == "all",
            f"An engine runs sparse attention with layers='all', not {attention} with layers={layers!r}. Give a preset "
            "such as 'wan2.1-t2v-1.3b-sparse', with softmax_layers for layers that stay dense; other patches run in "
            "diffusers, with apply_mhla() or load_mhla().",
        )
        super().__post_init__()


def read_settings(given: Mapping[str, Any], config: PatchConfig | None = None) -> EngineSettings:
    """Return settings with some changed.

    Args:
        given: values, or texts as people write them, by the names of settings: "none" is None, and softmax_layers such
            as "0,1" or "0-3".
        config: what is changed; None for the defaults.

    Raises:
        ValueError: a value is not allowed.
    """
    changes = {name: _value(value) for name, value in given.items()}
    own: dict[str, Any] = {"softmax_layers": read_layers(str(given.get("softmax_layers", "")))}
    changes.pop("softmax_layers", None)
    if "min_tokens" in changes:
        own["min_tokens"] = changes.pop("min_tokens")
    base: Any = SparseConfig() if config is None else config
    settings = EngineSettings(base, **own)
    return replace(settings, config=settings.config.replace(**changes))


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> EngineSettings:
    """Read settings from variables such as ``MHLA_DENSITY=0.1``.

    ``MHLA_PATCH`` is a preset or the path of its YAML file, whose settings the other variables change.

    Raises:
        ValueError: an unknown variable that begins with ``MHLA_``, or a value that is not allowed.
    """
    given = {name: text for name, text in environment.items() if name.startswith("MHLA_") and text}
    check_names(given, ("MHLA_PATCH", *(f"MHLA_{name.upper()}" for name in _NAMES)), "environment variable")
    config = load_patch(given["MHLA_PATCH"]).config if "MHLA_PATCH" in given else None
    changes = {name.removeprefix("MHLA_").lower(): text for name, text in given.items() if name != "MHLA_PATCH"}
    try:
        return read_settings(changes, config)
    except ValueError as error:
        variables = ", ".join(f"{name}={text}" for name, text in sorted(given.items()))
        raise ValueError(f"{variables} in the environment: {error}") from None


def _value(given: Any) -> Any:
    """Return the value of a text: None for "none", a count, or else text, in which the settings look for a number."""
    if not isinstance(given, str):
        return given
    return None if given == "none" else int(given) if given.strip().isdigit() else given


def read_layers(text: str) -> tuple[int, ...]:
    """Return the numbers of layers that a text lists, such as "0, 1, 28-29"; none for an empty text.

    Raises:
        ValueError: another text.
    """
    layers: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        first, dash, last = map(str.strip, part.partition("-"))
        is_range = first.isdecimal() and (last.isdecimal() and int(first) <= int(last) if dash else not last)
        check(is_range, f"softmax_layers={text!r} must list layers from 0, such as '0,1' or '0-3', or be empty.")
        layers += range(int(first), int(last or first) + 1)
    return tuple(layers)
