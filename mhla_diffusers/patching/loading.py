"""Load a saved patch from a folder or the Hub."""

import json
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ..config import PatchConfig, adapted_patch_folder, adapted_patch_names, patch_names
from ..errors import check, said_allowed
from ..families import get_family
from ..settings import Flag, check_value
from .finding import find_transformers, is_patched
from .patch import Layers, attach, detach, plan_patch, replace_weights
from .patched import Patched
from .saving import (
    FORMAT_VERSION,
    PATCH_FILE,
    RECORD,
    PatchRecord,
    TransformerRecord,
    base_model_name,
    check_finite,
    loaded_from,
)
from .weights import LORA, base_weights, check_writable, load_lora, resized

Model = TypeVar("Model")

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Files that are never loaded."""


def load_mhla(
    model: Model,
    patch: str | Path,
    *,
    blocks: tuple[int, ...] | None = None,
    backend: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    keep_replaced: bool = True,
) -> Model:
    """Apply a saved patch and load its weights.

    If anything is refused the model is unchanged. Other settings are for :func:`change_mhla`, after loading. A model
    that was loaded from elsewhere than the patch's base model gets a warning, since other weights of the same shapes
    are not noticed. A patch saved with ``weights="changed"`` or ``"all"`` also replaces weights of the model itself,
    which :func:`remove_mhla` brings back. A LoRA that belongs to the patch is loaded as the adapter ``mhla``.

    Args:
        model: unpatched pipeline or transformer of the kind that the patch was made for.
        patch: folder, Hub id, or the name of an adapted patch that ships, such as "tiny-wan-mhla".
        blocks: other block counts to open the patch at; mixing matrices are interpolated.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        revision: of a Hub repository; with it a folder here of the owner's name does not count.
        token: for a private Hub repository.
        keep_replaced: whether to keep the weights of the model that the patch changes, in the CPU's memory. Without
            them :func:`remove_mhla` refuses, since it could not bring them back.

    Returns:
        ``model``.

    Raises:
        ValueError: arguments that are not allowed, wrong model, damaged or incomplete files, non-finite
            values, or a model that is patched already.
        FileNotFoundError: no patch there.
    """
    check_value("keep_replaced", keep_replaced, Flag)
    folder = _find_folder(patch, revision, token)
    record, tensors = read_record(folder), load_file(folder / PATCH_FILE)
    for name, tensor in tensors.items():
        check_finite(f"{folder / PATCH_FILE}: {name}", tensor)
    transformers = _check_model(record, find_transformers(model))
    if is_patched(model):
        raise ValueError("The model is already patched with MHLA; call remove_mhla() before load_mhla().")
    source = loaded_from(model, next(iter(transformers.values())))
    came_from = base_model_name(source)
    lies_beside = source == str(patch) or folder.resolve() in (Path(source).resolve(), Path(source).resolve().parent)
    belongs = lies_beside or not record.base_model or came_from in ("", record.base_model)
    if record.weights != "all" and not belongs:
        warnings.warn(
            f"This patch was made for {record.base_model}, but the model was loaded from {came_from}. Unless that is "
            "a copy, the two do not belong together.",
            stacklevel=2,
        )
    plans = []
    for name, transformer in transformers.items():
        saved = record.transformers[name]
        before = PatchConfig.read(saved.patch)
        opened = before if blocks is None else before.replace(blocks=blocks)
        patched, layers = plan_patch(transformer, opened, model, backend)
        part = {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}
        lora = {key: part.pop(key) for key in list(part) if ".lora_A." in key or ".lora_B." in key}
        part = resized(part, before, opened)
        _check_tensors(patched, layers, part, record, saved)
        plans.append((patched, layers, part, lora))
    try:
        for patched, layers, part, _ in plans:
            for name, layer in layers.items():
                state = layer.state_dict(keep_vars=True)
                with torch.no_grad():
                    for key in [key for key in part if key.startswith(f"{name}.mhla.")]:
                        state[key.removeprefix(f"{name}.mhla.")].copy_(part.pop(key))
            attach(patched, layers)
            replace_weights(patched, part, keep_replaced)
        for patched, _, _, own_lora in plans:
            if own_lora:
                load_lora(patched.transformer, own_lora)
                patched.lora = LORA
    except BaseException:  # no memory, or interrupted
        if all(patched.replaced_weights is not None for patched, *_ in plans):
            for patched, *_ in plans:
                detach(patched)
        raise
    return model


# Where the patch is


def _find_folder(patch: str | Path, revision: str | None, token: str | None) -> Path:
    path = Path(patch)
    if path.is_dir():
        return path
    if (shipped := adapted_patch_folder(str(patch))) is not None:
        return shipped
    if str(patch) in patch_names():
        raise ValueError(
            f"{patch} is a preset, settings without weights; use apply_mhla(model, {str(patch)!r}) or --patch."
        )
    if len(path.parts) == 1 or path.exists():
        raise FileNotFoundError(
            f"{patch} must be a folder, a Hub id (owner/name) or a shipped adapted patch; "
            f"{said_allowed(path.name, adapted_patch_names(), 'mhla info')}"
        )
    if path.parent.is_dir() and revision is None:
        raise FileNotFoundError(
            f"The local folder {path.parent} has no {path.name}. To load {patch} from the Hub, pass revision='main'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(str(patch), revision=revision, token=token, allow_patterns=[PATCH_FILE]))
    except (HFValidationError, HfHubHTTPError, OSError) as error:  # offline and not in the cache is an OSError
        raise FileNotFoundError(
            f"{patch} is neither a local folder nor a repository that the Hub returned: {error}"
        ) from error


# What its record says


def read_record(folder: Path) -> PatchRecord:
    """Read what a saved patch says of itself; FileNotFoundError without one, ValueError for what is not a patch."""
    path = folder / PATCH_FILE
    if not path.is_file():
        pickles = sorted(file.name for file in folder.glob("*") if file.suffix in _PICKLE_SUFFIXES)
        why = f" It holds {', '.join(pickles)}, but pickle files are never loaded." if pickles else ""
        if (folder / "state.json").is_file() or (folder / "checkpoints").is_dir():
            command = shlex.join(["mhla", "export", str(folder)])
            why = f" It is of a training run; make a patch of its weights: {command} --output FOLDER"
        if (folder / "result" / PATCH_FILE).is_file():
            why = f" It is a training run, whose patch is {folder / 'result'}."
        raise FileNotFoundError(f"{folder} holds no MHLA patch: {PATCH_FILE} is missing.{why}")
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {}).get(RECORD, "null"))
        version = content.get("format_version", FORMAT_VERSION) if isinstance(content, Mapping) else FORMAT_VERSION
        check(
            version == FORMAT_VERSION,
            f"format version {version!r} is unknown to this version of mhla_diffusers, which reads {FORMAT_VERSION}.",
        )
        record = PatchRecord.read(content)
        for part in record.transformers.values():
            PatchConfig.read(part.patch)
        return record
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a valid patch: {error}") from error


# Whether it fits the model


def _check_model(record: PatchRecord, transformers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the transformers to patch; ValueError if the patch was made for other classes."""
    if {*record.transformers, *record.unpatched} != set(transformers):
        kept = f", with {', '.join(record.unpatched)} left as it is" if record.unpatched else ""
        base = record.base_model or "not recorded"
        raise ValueError(
            f"The patch is for {', '.join(sorted(record.transformers))}{kept} (base model {base}), "
            f"but the model has {', '.join(sorted(transformers))}."
        )
    found = {name: transformers[name] for name in record.transformers}
    for name, transformer in found.items():
        family = get_family(transformer)
        attentions = family.self_attentions(transformer)
        attn: Any = next(iter(attentions.values()))
        heads, head_dim = family.heads(attn)
        kind = type(transformer).__name__
        facts = {"transformer": kind, "layers": len(attentions), "heads": heads, "head_dim": head_dim}
        for what, value in facts.items():
            saved = getattr(record.transformers[name], what)
            if saved != value:
                raise ValueError(
                    f"The patch does not fit the {name}: it was made for {what}={saved!r}, the model has {value!r}. "
                    f"Base model of the patch: {record.base_model or 'not recorded'}."
                )
    return found


def _check_tensors(
    patched: Patched,
    layers: Layers,
    tensors: dict[str, torch.Tensor],
    record: PatchRecord,
    saved: TransformerRecord,
) -> None:
    """Raise ValueError unless the patch has the tensors that the new layers and the model need."""
    own = {f"{name}.mhla.{key}": x for name, layer in layers.items() for key, x in layer.state_dict().items()}
    check_writable(patched.transformer, set(tensors) - set(own), "load the patch")  # first: others have other shapes
    base = {}
    if record.weights != "mhla":
        base = {key: places[0] for key, places in base_weights(patched.transformer).items()}
    needed = {*own, *(base if record.weights == "all" else saved.base_weights)}
    known = own | base
    problems = [f"missing {key}" for key in sorted(needed - set(tensors))]
    problems += [f"unexpected {key}" for key in sorted(set(tensors) - set(known))]
    for key in sorted(set(tensors) & set(known)):
        if tensors[key].shape != known[key].shape:
            problems.append(f"{key} has shape {tuple(tensors[key].shape)}, expected {tuple(known[key].shape)}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"The patch does not fit the model: {'; '.join(problems[:8])}{more}.")
