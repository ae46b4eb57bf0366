"""What the JSON file of a saved patch says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Weights = Literal["mhla", "changed", "all"]
"""What a saved patch holds: MHLA's own tensors, these and every tensor that differs from the base, or everything."""

CONFIG_NAME = "mhla_config.json"
FORMAT_VERSION = 1
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Files that are never loaded."""


@dataclass(frozen=True)
class TransformerRecord:
    """What a saved patch says of one transformer, to recognise the model that it fits."""

    family: str
    transformer: str
    """Class name."""
    layers: int
    heads: int
    head_dim: int
    mhla: dict[str, Any]
    """Fields of :class:`MHLAConfig`."""


@dataclass(frozen=True)
class PatchRecord:
    """Content of ``mhla_config.json``."""

    format_version: int
    base_model: str
    """Hub id, or the name of a local folder; empty where it is unknown."""
    diffusers_version: str
    weights: Weights
    file: str
    sha256: str
    transformers: dict[str, TransformerRecord]


def base_model_name(source: str) -> str:
    """What is recorded of where a model came from: a Hub id, or of a path the name alone, since a patch is published.

    Args:
        source: Hub id or path, also of the Hub's cache; of a pipeline or of one of its components.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    path = Path(source)
    if not source or not path.exists():
        try:
            validate_repo_id(source or None)
        except HFValidationError:
            return path.resolve().name
        return source
    path = path.resolve()
    cached = next((part for part in path.parts if part.startswith("models--")), None)
    if cached is not None:
        return "/".join(cached.split("--")[1:])
    return path.parent.name if (path.parent / "model_index.json").is_file() else path.name


def read_record(folder: Path) -> PatchRecord:
    """Read and check ``mhla_config.json``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, unknown format version, unknown or missing keys.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        pickles = [file.name for file in folder.glob("*") if file.suffix in PICKLE_SUFFIXES]
        why = f" It holds {', '.join(sorted(pickles))}, but pickle files are never loaded." if pickles else ""
        raise FileNotFoundError(f"{folder} holds no MHLA patch: {CONFIG_NAME} is missing.{why}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"format version {content['format_version']!r} is unknown to this version of mhla_diffusers, "
                f"which reads version {FORMAT_VERSION}"
            )
        transformers = {name: TransformerRecord(**part) for name, part in content.pop("transformers").items()}
        return PatchRecord(transformers=transformers, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no valid patch: {error}.") from error
