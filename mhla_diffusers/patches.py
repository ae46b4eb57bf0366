"""Ready patches: the YAML files of the ``patches/`` folder, which also ship in the wheel."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from .config import MHLAConfig


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Attributes:
        family: name of the model family that it is for.
        base_model: Hub id that it was made for.
        description: one line.
        config: the settings.
    """

    family: str
    base_model: str
    description: str
    config: MHLAConfig


def patch_folder() -> Path:
    """Where the ready patches lie: inside an installed package, or at the root of a source checkout."""
    package = Path(__file__).parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def patch_names() -> list[str]:
    """Names of the ready patches."""
    return sorted(path.stem for path in patch_folder().glob("*.yaml"))


def load_patch(name_or_path: str | Path) -> Patch:
    """Read a patch by its name or from a YAML file.

    Raises:
        ValueError: unknown name (the nearest ones are given), or a file with unknown or missing keys.
        FileNotFoundError: a path that does not exist.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in patch_names():
            near = get_close_matches(str(name_or_path), patch_names(), n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
            if path.is_dir():
                hint = f": {path} is a folder; open a saved patch with load_mhla(model, {str(name_or_path)!r})."
            raise ValueError(
                f"Unknown patch {str(name_or_path)!r}{hint} "
                f"Ready patches: {', '.join(patch_names())}; or give the path of a .yaml file."
            )
        path = patch_folder() / f"{name_or_path}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"Patch file {path} does not exist.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _parse(content)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"Patch file {path}: {error}") from error


def _parse(content: Any) -> Patch:
    keys = {"family", "base_model", "description", "mhla"}
    found = set(content) if isinstance(content, Mapping) else set()
    if found != keys:
        raise ValueError(
            f"expected exactly the keys {', '.join(sorted(keys))}; "
            f"unknown: {', '.join(sorted(map(str, found - keys))) or 'none'}, "
            f"missing: {', '.join(sorted(keys - found)) or 'none'}."
        )
    settings = content["mhla"]
    if not isinstance(settings, Mapping):
        raise ValueError(f"mhla must hold settings such as blocks, got {settings!r}.")
    if isinstance(settings.get("eps"), str):  # YAML reads 1e-6, without a point, as text
        settings = {**settings, "eps": float(settings["eps"])}
    return Patch(content["family"], content["base_model"], content["description"], MHLAConfig.from_dict(settings))
