"""Save a patched model's MHLA to a folder, load it from a folder or the Hub, share it.

A folder holds ``mhla_config.json`` and one safetensors file, named after the hash of its content. The JSON is written
last and names the file, so that at every moment the folder holds one complete patch: a kill in the middle of saving
leaves the patch that was there before.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar, get_args

import diffusers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from .attention import resize_mixing
from .config import MHLAConfig
from .families import get_family
from .layer import MHLALayer
from .patching import apply_mhla, find_transformers, mhla_layers, remove_mhla, require_layers

Model = TypeVar("Model")

Weights = Literal["mhla", "changed", "all"]
"""What a saved patch holds: MHLA's own tensors, these and every tensor that differs from the base, or everything."""

CONFIG_NAME = "mhla_config.json"
FORMAT_VERSION = 1

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


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
    diffusers_version: str
    weights: Weights
    file: str
    sha256: str
    transformers: dict[str, TransformerRecord]


def save_mhla(
    model: Any, folder: str | Path, *, weights: Weights = "mhla", base: Any = None, base_model: str | None = None
) -> Path:
    """Save the patch of a pipeline or transformer.

    Args:
        model: patched pipeline or transformer.
        folder: is made if it is missing; a patch in it is replaced in one step.
        weights: "mhla": only MHLA's own tensors; "changed": also every other tensor that differs from ``base``;
            "all": the whole transformer.
        base: for "changed", the unpatched pipeline or transformer to compare with; None loads it from ``base_model``.
        base_model: Hub id or path that is recorded; None for the one that the model was loaded from.

    Returns:
        The folder.

    Raises:
        ValueError: not patched, unknown ``weights``, LoRA adapters or offloaded weights in the way, or no base known.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} is unknown; allowed: {', '.join(get_args(Weights))}.")
    require_layers(model)
    transformers = find_transformers(model)
    base_model = base_model or _base_model(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, transformer in transformers.items():
        chosen = _choose_tensors(name, transformer, weights, base, base_model)
        tensors |= {f"{name}.{key}": tensor.detach().cpu().contiguous() for key, tensor in chosen.items()}
    folder = _make_folder(folder)
    file, digest = _write_tensors(folder, tensors)
    record = PatchRecord(
        FORMAT_VERSION,
        base_model,
        diffusers.__version__,
        weights,
        file,
        digest,
        {name: _describe_transformer(transformer) for name, transformer in transformers.items()},
    )
    _write_text(folder / CONFIG_NAME, json.dumps(asdict(record), indent=2) + "\n")
    for old in folder.glob("mhla-*.safetensors"):
        if old.name != file:
            old.unlink()
    return folder


def load_mhla(
    model: Model,
    patch: str | Path,
    *,
    blocks: tuple[int, ...] | None = None,
    backend: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """Apply a saved patch and load its weights.

    If anything is refused the model is unchanged. A patch saved with ``weights="changed"`` or ``"all"`` also replaces
    weights of the model itself, which :func:`remove_mhla` does not bring back.

    Args:
        model: unpatched pipeline or transformer of the kind that the patch was made for.
        patch: folder or Hub id.
        blocks: other block counts to open the patch at; mixing matrices are interpolated.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        revision: of a Hub repository.
        token: for a private Hub repository.

    Returns:
        ``model``.

    Raises:
        ValueError: wrong model, damaged or incomplete files, non-finite values, or a model that is patched already.
        FileNotFoundError: no patch there.
    """
    folder = _find_folder(patch, revision, token)
    record = read_record(folder)
    tensors = _read_tensors(folder, record)
    transformers = find_transformers(model)
    _check_model(record, transformers)
    if mhla_layers(model):
        raise ValueError("The model is already patched with MHLA; call remove_mhla() before load_mhla().")
    configs = {name: MHLAConfig.from_dict(saved.mhla) for name, saved in record.transformers.items()}
    opened = {name: config.replace(blocks=blocks) if blocks else config for name, config in configs.items()}
    try:
        for name, transformer in transformers.items():
            apply_mhla(transformer, opened[name], backend=backend)
        parts = {name: _part(tensors, name, configs[name], opened[name]) for name in transformers}
        for name, transformer in transformers.items():
            _check_tensors(transformer, parts[name], record.weights)
    except BaseException:
        if mhla_layers(model):
            remove_mhla(model)
        raise
    with torch.no_grad():
        for name, transformer in transformers.items():
            state = transformer.state_dict(keep_vars=True)
            for key, tensor in parts[name].items():
                state[key].copy_(tensor)
    return model


def push_mhla(
    model: Any,
    repo_id: str,
    *,
    weights: Weights = "mhla",
    base: Any = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload the patch with a model card to the Hub.

    Args:
        model: patched pipeline or transformer.
        repo_id: ``user/name``; is made if it is missing.
        weights: see :func:`save_mhla`.
        base: see :func:`save_mhla`.
        private: for a repository that is made.
        token: for the Hub; None for the one of ``hf auth login``.

    Returns:
        Address of the commit.
    """
    from huggingface_hub import HfApi

    from .model_card import model_card

    with TemporaryDirectory() as folder:
        save_mhla(model, folder, weights=weights, base=base)
        Path(folder, "README.md").write_text(model_card(model, repo_id, read_record(Path(folder))), encoding="utf-8")
        hub = HfApi(token=token)
        hub.create_repo(repo_id, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload MHLA patch")
    return str(commit.commit_url)


def read_record(folder: Path) -> PatchRecord:
    """Read and check ``mhla_config.json``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, unknown format version, unknown or missing keys.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        pickles = [file.name for file in folder.glob("*") if file.suffix in _PICKLE_SUFFIXES]
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


def _find_folder(patch: str | Path, revision: str | None, token: str | None) -> Path:
    if not str(patch):
        raise ValueError("patch is empty; give a folder or a Hub id.")
    path = Path(patch)
    if path.suffix in _PICKLE_SUFFIXES:
        raise ValueError(f"{path} is a pickle file, which is never loaded; save the patch with save_mhla().")
    if path.is_dir():
        return path
    if path.is_absolute() or path.exists():
        raise FileNotFoundError(f"{patch} is no folder; load_mhla takes the folder that save_mhla wrote, or a Hub id.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [CONFIG_NAME, "mhla-*.safetensors"]
    try:
        return Path(snapshot_download(str(patch), revision=revision, token=token, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{patch} is neither a folder here nor a repository that the Hub gave: {error}"
        ) from error


def _make_folder(folder: str | Path) -> Path:
    if not str(folder):
        raise ValueError("folder is empty; give the folder to save into.")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot save a patch into {folder}: {error}.") from error
    return Path(folder)


def _base_model(model: Any) -> str:
    transformers = find_transformers(model)
    source = model if not isinstance(model, nn.Module) else next(iter(transformers.values()))
    return str(getattr(source.config, "_name_or_path", "") or "")


def _describe_transformer(transformer: nn.Module) -> TransformerRecord:
    family = get_family(transformer)
    layer = next(module for module in transformer.modules() if isinstance(module, MHLALayer))
    return TransformerRecord(
        family.name,
        type(transformer).__name__,
        len(family.self_attentions(transformer)),
        layer.heads,
        layer.head_dim,
        layer.config.to_dict(),
    )


def _choose_tensors(
    name: str, transformer: nn.Module, weights: Weights, base: Any, base_model: str
) -> dict[str, torch.Tensor]:
    state = transformer.state_dict()
    own = {key: tensor for key, tensor in state.items() if ".mhla." in key}
    chosen = own if weights == "mhla" else state
    adapters = [key for key in chosen if "lora_" in key or ".base_layer." in key]
    if adapters:
        raise ValueError(
            f"{name} has LoRA adapters ({adapters[0]}, …), which weights={weights!r} cannot tell from the model. "
            "Fuse and unload them first, or save weights='mhla' and the adapters with save_lora_weights()."
        )
    if weights == "changed":
        reference = _base_transformer(name, transformer, base, base_model).state_dict()
        strange = [key for key, x in state.items() if key not in own and not _has_shape(reference.get(key), x)]
        if strange:
            raise ValueError(
                f"The base does not fit: it has no {name}.{strange[0]} of shape {state[strange[0]].shape}."
            )
        chosen = own | {key: x for key, x in state.items() if key not in own and _differs(x, reference[key])}
    offloaded = [key for key, tensor in chosen.items() if tensor.is_meta]
    if offloaded:
        raise ValueError(f"{name}.{offloaded[0]} is offloaded and has no data; switch offloading off before saving.")
    return chosen


def _has_shape(tensor: torch.Tensor | None, other: torch.Tensor) -> bool:
    return tensor is not None and tensor.shape == other.shape


def _differs(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    return not torch.equal(tensor.cpu(), base.to(device="cpu", dtype=tensor.dtype))


def _base_transformer(name: str, transformer: nn.Module, base: Any, base_model: str) -> nn.Module:
    if base is not None:
        found = find_transformers(base)
        if name not in found or mhla_layers(base):
            raise ValueError(f"base must be an unpatched model with a {name}; it has {', '.join(found)}.")
        return found[name]
    if not base_model:
        raise ValueError(
            "weights='changed' compares with the base model, but it is unknown where this model came from; "
            "give base=the unpatched model, or base_model=its Hub id."
        )
    cls = getattr(diffusers, type(transformer).__name__)
    is_pipeline = not Path(base_model, "config.json").is_file()
    loaded: nn.Module = cls.from_pretrained(base_model, subfolder=name if is_pipeline else None)
    return loaded


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Write the safetensors file; return its name and hash."""
    aside = folder / f".mhla-{os.getpid()}.tmp"
    try:
        save_file(tensors, aside, metadata={"format": "pt"})
        digest = _hash(aside)
        file = f"mhla-{digest[:12]}.safetensors"
        aside.replace(folder / file)
    finally:
        aside.unlink(missing_ok=True)
    return file, digest


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_tensors(folder: Path, record: PatchRecord) -> dict[str, torch.Tensor]:
    path = folder / record.file
    if path.suffix != ".safetensors" or path.parent != folder:
        raise ValueError(f"{CONFIG_NAME} names {record.file!r}, which is no safetensors file in {folder}.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the patch is incomplete.")
    if _hash(path) != record.sha256:
        raise ValueError(f"{path} is damaged or was changed: its SHA-256 is not the one in {CONFIG_NAME}.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}.") from error
    for name, tensor in tensors.items():
        if ".mhla." in name and not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or infinite values; the patch is unusable.")
    return tensors


def _check_model(record: PatchRecord, transformers: dict[str, nn.Module]) -> None:
    if set(record.transformers) != set(transformers):
        raise ValueError(
            f"The patch is for {', '.join(sorted(record.transformers))} (base model {record.base_model!r}), "
            f"but the model has {', '.join(sorted(transformers))}."
        )
    for name, transformer in transformers.items():
        saved, family = record.transformers[name], get_family(transformer)
        attentions = family.self_attentions(transformer)
        attn: Any = next(iter(attentions.values()))
        found = {
            "transformer": type(transformer).__name__,
            "layers": len(attentions),
            "heads": attn.heads,
            "head_dim": attn.inner_dim // attn.heads,
        }
        for what, value in found.items():
            if getattr(saved, what) != value:
                raise ValueError(
                    f"The patch does not fit the {name}: it was made for {what}={getattr(saved, what)!r}, the model "
                    f"has {value!r}. Base model of the patch: {record.base_model or 'not recorded'}."
                )


def _part(
    tensors: dict[str, torch.Tensor], component: str, saved: MHLAConfig, opened: MHLAConfig
) -> dict[str, torch.Tensor]:
    """One transformer's tensors, mixing matrices brought to the wanted block counts."""
    prefix = f"{component}."
    part = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if saved.blocks != opened.blocks:
        for key in part:
            if key.endswith(".mhla.mixing"):
                part[key] = resize_mixing(part[key], saved.blocks, opened.blocks)
    return part


def _check_tensors(transformer: nn.Module, tensors: dict[str, torch.Tensor], weights: Weights) -> None:
    state = transformer.state_dict()
    needed = set(state) if weights == "all" else {key for key in state if ".mhla." in key}
    allowed = needed if weights == "mhla" else set(state)
    problems = [f"missing {key}" for key in sorted(needed - set(tensors))]
    problems += [f"unexpected {key}" for key in sorted(set(tensors) - allowed)]
    for key in sorted(set(tensors) & set(state)):
        if tensors[key].shape != state[key].shape:
            problems.append(f"{key} has shape {tuple(tensors[key].shape)}, expected {tuple(state[key].shape)}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"The patch does not fit the model: {'; '.join(problems[:8])}{more}.")
