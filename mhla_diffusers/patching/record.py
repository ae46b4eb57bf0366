"""What the JSON file of a saved patch says.

The safetensors file carries the settings once more among its metadata, so that its hash covers them: a JSON that was
changed by hand is noticed.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import torch
from safetensors import SafetensorError, safe_open

from ..config import DEFAULT_BLOCK_SIZE, MHLAConfig, check, check_choice, check_names
from ..files import check_hash, read_json
from .few_steps import FewSteps

Weights = Literal["mhla", "changed", "all"]
"""What a saved patch holds: MHLA's own tensors, these and every tensor that differs from the base, or everything."""

CONFIG_NAME = "mhla_config.json"
FORMAT_VERSION = 3
UNIFORM_BLOCKS_SINCE = 3
"""Version before which settings and names of tensors are translated, at the end of this file."""
_READABLE_VERSIONS = (1, 2, 3)
"""Version 1 had neither settings in the safetensors file nor a list of the base weights."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Files that are never loaded."""

_FURTHER = ("few_steps", "lora")
"""What only some patches have; earlier versions read those without."""

_WORDS = {str: "text", int: "an integer", dict: "an object", list: "a list of names"}


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
    base_weights: list[str] = field(default_factory=list)
    """Names of the model's own tensors that a patch with ``weights="changed"`` holds."""


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
    unpatched: list[str] = field(default_factory=list)
    """Transformers of the pipeline that the patch leaves alone."""
    few_steps: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`FewSteps` of a patch that was distilled; empty otherwise."""
    lora: dict[str, Any] = field(default_factory=dict)
    """``file`` and ``sha256`` of the LoRA that belongs to the patch; empty without one."""

    def settings(self) -> dict[str, Any]:
        """What belongs to the tensors, as the safetensors file carries it."""
        parts = {name: asdict(part) for name, part in self.transformers.items()}
        further = {name: value for name in _FURTHER if (value := getattr(self, name))}
        return {"weights": self.weights, "transformers": parts, "unpatched": self.unpatched, **further}

    def to_dict(self) -> dict[str, Any]:
        """As the JSON holds it: without what the patch has not."""
        return {name: value for name, value in asdict(self).items() if value or name not in _FURTHER}

    @property
    def sampling(self) -> FewSteps | None:
        """How the model samples, if it was distilled to a few steps."""
        return FewSteps.from_dict(self.few_steps) if self.few_steps else None

    def check_settings(self, metadata: Mapping[str, str]) -> None:
        """Raise unless the settings are those that the safetensors file was saved with.

        Raises:
            ValueError: naming the first setting that was changed, and both values.
        """
        if self.format_version == 1:
            return
        check(
            "mhla" in metadata,
            f"{self.file} was written anew without its settings, so it is unknown whether those in {CONFIG_NAME} "
            "belong to its tensors; keep the metadata of the safetensors file, or save with save_mhla().",
        )
        settings = json.loads(metadata["mhla"])
        if self.format_version < UNIFORM_BLOCKS_SINCE:
            for part in settings["transformers"].values():
                part["mhla"] = _new_settings(part["mhla"])
        path, now, saved = next(_differences(self.settings(), settings, ""), ("", None, None))
        check(
            not path,
            f"{CONFIG_NAME} was changed after saving: {path} is {now!r}, and the weights were saved with {saved!r}. "
            "They belong together, so put it back. What may differ are the arguments of load_mhla: blocks, "
            "block_size, density; other settings need other weights: apply_mhla() and an adaptation.",
        )


Record = TypeVar("Record", PatchRecord, TransformerRecord)


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise unless all values of a tensor of a patch are finite.

    Raises:
        ValueError: with ``name`` and how many are not.
    """
    if not tensor.is_floating_point():
        return
    # types of 8 bits do not know isfinite
    finite = (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isfinite()
    if not finite.all():
        count = tensor.numel() - int(finite.sum())
        raise ValueError(f"{name} holds NaN or infinite values, {count} of {tensor.numel()}; the patch is unusable.")


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
        ValueError: no JSON, unknown format version, unknown or missing keys, values that are not allowed.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        pickles = [file.name for file in folder.glob("*") if file.suffix in PICKLE_SUFFIXES]
        why = f" It holds {', '.join(sorted(pickles))}, but pickle files are never loaded." if pickles else ""
        raise FileNotFoundError(f"{folder} holds no MHLA patch: {CONFIG_NAME} is missing.{why}")
    content = read_json(path)
    try:
        version = content.get("format_version") if isinstance(content, Mapping) else None
        check(
            version is None or version in _READABLE_VERSIONS,
            f"format version {version!r} is unknown to this version of mhla_diffusers, which reads "
            f"{' and '.join(map(str, _READABLE_VERSIONS))}",
        )
        record = _parse(PatchRecord, content, "")
        check(bool(record.transformers), "transformers is empty, but a patch is for at least one.")
        if record.format_version < UNIFORM_BLOCKS_SINCE:
            record = _translated(record, path)
        for part in record.transformers.values():
            MHLAConfig.from_dict(part.mhla)
        check(
            not record.lora or all(isinstance(record.lora.get(name), str) for name in ("file", "sha256")),
            f"lora must hold file and sha256, got {record.lora!r}.",
        )
        if record.few_steps:
            FewSteps.from_dict(record.few_steps)
        return record
    except ValueError as error:
        raise ValueError(f"{path} is no valid patch: {error}") from error


def _translated(record: PatchRecord, path: Path) -> PatchRecord:
    """A record of an old format with today's settings."""
    parts = {name: replace(part, mhla=_new_settings(part.mhla)) for name, part in record.transformers.items()}
    for note in {note for part in record.transformers.values() if (note := _note_of(part.mhla)) is not None}:
        warnings.warn(f"{path}: {note}", stacklevel=4)
    return replace(record, transformers=parts)


def check_file(folder: Path, record: PatchRecord) -> Path:
    """The safetensors file of a saved patch, checked against its record.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is no safetensors file of this folder, damaged, or was saved with other settings.
    """
    path = _check_content(folder, record.file, record.sha256)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}.") from error
    record.check_settings(metadata)
    return path


def check_lora(folder: Path, record: PatchRecord) -> Path | None:
    """The LoRA of a saved patch, checked against its record; None without one.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is no safetensors file of this folder, or damaged.
    """
    return _check_content(folder, record.lora["file"], record.lora["sha256"]) if record.lora else None


def _check_content(folder: Path, name: str, sha256: str) -> Path:
    path = folder / name
    if path.suffix != ".safetensors" or path.parent != folder:
        raise ValueError(f"{CONFIG_NAME} names {name!r}, which is no safetensors file in {folder}.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the patch is incomplete.")
    check_hash(path, sha256, CONFIG_NAME)
    return path


def _parse(kind: type[Record], content: Any, path: str) -> Record:
    """A record from JSON, all of its fields checked; ``path`` stands before their names in errors."""
    check(isinstance(content, Mapping), f"{path.rstrip('.') or 'it'} must be an object with names, got {content!r}.")
    known = {entry.name: entry for entry in fields(kind)}
    check_names(content, list(known), "key", path)
    for name, entry in known.items():
        has_default = entry.default_factory is not MISSING
        check(name in content or has_default, f"{path}{name} is missing.")
    values = {name: _checked(known[name].type, value, path + name) for name, value in content.items()}
    return kind(**values)


def _checked(kind: Any, value: Any, path: str) -> Any:
    if get_origin(kind) is Literal:
        check_choice(path, value, get_args(kind))
        return value
    plain = get_origin(kind) or kind
    check(isinstance(value, plain) and not isinstance(value, bool), f"{path} must be {_WORDS[plain]}, got {value!r}.")
    if kind == dict[str, TransformerRecord]:
        return {name: _parse(TransformerRecord, part, f"{path}.{name}.") for name, part in value.items()}
    check(plain is not list or all(isinstance(one, str) for one in value), f"{path} must be {_WORDS[plain]}.")
    return value


def _differences(now: Any, saved: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and former value of everything that differs between two contents of JSON."""
    if isinstance(now, dict) and isinstance(saved, dict):
        for name in sorted({*now, *saved}):
            yield from _differences(now.get(name), saved.get(name), f"{path}.{name}" if path else name)
    elif now != saved:
        yield path, now, saved


# Patches that were saved before all blocks of the sparse branch were uniform: format versions 1 and 2

_OLD_TENSORS = {".mhla.far_field_log_weight": ".mhla.linear_log_weight", ".mhla.mean_bias": ".mhla.pooled_bias"}
"""Ends of names: then, now."""


def _new_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of today's :class:`MHLAConfig` that say the same as those of an old patch, or what comes closest.

    Lists that were chosen by content have uniform blocks now, as long as the patch says, or of 64 tokens where it had
    boxes of the grid; β stays the parameter that it was with boxes.

    Raises:
        ValueError: lists of boxes that were calibrated, or that held the own box alone.
    """
    settings = dict(settings)
    sparse = "own" if settings.pop("near_field", "none") == "softmax" else settings.pop("exact", "none")
    if sparse == "calibrated" or (sparse == "own" and settings.get("causal") is None):
        raise ValueError(
            f"its lists of boxes, exact={sparse!r}, are not supported any more. Lists are chosen by content now, from "
            f"uniform blocks: apply_mhla(model, blocks={tuple(settings.get('blocks', ()))}, sparse='content'), which "
            "needs no training; or adapt such a patch anew."
        )
    settings.pop("exact_tiles", None)
    block_size, density = settings.pop("block_size", None), settings.pop("exact_share", None)
    pooled, fit = settings.pop("tile_means", True), settings.pop("fit_mean_bias", None)
    settings |= {"sparse": sparse, "pooled": pooled}
    if sparse == "content":
        learned = False if pooled and block_size is None else fit
        settings |= {
            "density": density,
            "block_size": block_size or DEFAULT_BLOCK_SIZE,
            "fit_pooled_bias": learned,
        }
    return settings


def _note_of(settings: Mapping[str, Any]) -> str | None:
    """Warning about an old patch that opens as something else than it was trained with; None if it does not."""
    if settings.get("exact") != "content" or settings.get("block_size") is not None:
        return None
    return (
        "this patch was trained with boxes of the token grid, and opens with uniform blocks, which it was not "
        f"trained with: of {DEFAULT_BLOCK_SIZE} tokens, or of load_mhla(..., block_size=...); "
        "calibrate_sparse(model, run) fits λ and β to them, and adapting it brings the rest."
    )


def new_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an old patch by the names that they have now."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in _OLD_TENSORS.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed
