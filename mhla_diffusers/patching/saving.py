"""Save a patched model's MHLA to a folder, which may be uploaded to the Hub as it is, and load it again.

A patch is one safetensors file: MHLA's tensors, those of the model that were adapted and a LoRA's, and the settings
among the metadata. It is written aside and renamed, so that a kill in the middle of saving leaves the one before.
"""

import json
import logging
import warnings
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ..config import READ_PATCH, LinearConfig, PatchConfig, adapted_patches, patch_names
from ..errors import check, check_choice, said_allowed
from ..families import get_family
from ..files import write_tensors
from ..settings import Settings
from .finding import find_transformers, is_patched, require_layers, require_patched
from .patch import Layers, detach, plan_patch
from .patched import Patched
from .weights import (
    LORA,
    base_weights,
    check_plain,
    check_writable,
    has_lora,
    inactive_lora,
    load_lora,
    lora_weights,
    refuse_weights_on_disk,
    resized,
)

logger = logging.getLogger(__name__)

Model = TypeVar("Model")
Weights = Literal["mhla", "changed", "all"]
"""What a saved patch holds: MHLA's own tensors, these and some of the model's, or everything."""
PATCH_FILE = "mhla.safetensors"
RECORD = "mhla"


class TransformerRecord(Settings):
    """Facts about one transformer of a saved patch, to check that a model fits it."""

    family: str
    transformer: str
    layers: int
    heads: int
    head_dim: int
    patch: Annotated[PatchConfig, READ_PATCH]
    base_weights: list[str] = []


class PatchRecord(Settings):
    """Header of a saved patch."""

    format_version: Literal[5]
    base_model: str
    """Hub id, or the name of a local folder; empty where it is unknown."""
    diffusers_version: str
    weights: Weights
    transformers: Annotated[dict[str, TransformerRecord], Field(min_length=1)]
    unpatched: list[str] = []


# Saving


def save_mhla(
    model: Any,
    folder: str | Path,
    *,
    weights: Literal["mhla", "all"] | Collection[str] = "mhla",
    base_model: str | None = None,
) -> Path:
    """Save the patch of a pipeline or transformer, and return the folder.

    Args:
        model: patched pipeline or transformer; of a pipeline the transformers that are patched are saved.
        folder: is made if it is missing; its ``mhla.safetensors`` is replaced in one step, other files stay.
        weights: "mhla": MHLA's own tensors, and weights of the model that :func:`load_mhla` replaced; a list of names:
            these tensors of every transformer too, such as all that were trained; "all": the whole transformer.
        base_model: Hub id or path of the base; None for the one that the model was loaded from. A path is recorded by
            its last part alone.

    Raises:
        ValueError: not patched, names of weights that a transformer lacks, merged LoRA adapters, offloaded or quantised
            weights, or NaN or infinite values.
        OSError: the folder cannot be written, as on a full disk; the patch that was in it stays.
    """
    if isinstance(weights, str):
        check_choice("weights", weights, ("mhla", "all"))
    others = set(find_transformers(model))  # refuses a patch without a family
    handles = require_patched(model)
    if any(isinstance(patched.config, LinearConfig) for patched in handles.values()):
        require_layers(model)  # which diffusers' own form makes at the first forward
    base_model = base_model or loaded_from(model)
    tensors: dict[str, torch.Tensor] = {}
    records = {}
    for name, patched in handles.items():
        if patched.lora is not None and not has_lora(patched.transformer, patched.lora):
            raise ValueError(inactive_lora(patched.transformer, patched.lora))
        chosen = _choose_tensors(name, patched, weights)
        lora = {} if patched.lora is None else lora_weights(patched.transformer, patched.lora)
        for key, tensor in (chosen | lora).items():
            _check_finite(f"{name}.{key}", tensor)
            tensors[f"{name}.{key}"] = tensor.detach().cpu().contiguous()
        facts, base = _facts(patched.transformer), sorted(key for key in chosen if ".mhla." not in key)
        records[name] = TransformerRecord(**facts, patch=patched.config, base_weights=base)
    kind: Weights = "changed" if any(one.base_weights for one in records.values()) else "mhla"
    record = PatchRecord(
        format_version=5,
        base_model=base_model_name(base_model),
        diffusers_version=version("diffusers"),
        weights="all" if weights == "all" else kind,
        transformers=records,
        unpatched=sorted(others - set(handles)),
    )
    write_tensors(tensors, Path(folder, PATCH_FILE), {RECORD: json.dumps(record.to_dict())})
    return Path(folder)


def _choose_tensors(name: str, patched: Patched, weights: str | Collection[str]) -> dict[str, torch.Tensor]:
    transformer = patched.transformer
    refuse_weights_on_disk(transformer, "save the patch")
    layers = patched.layers.items()
    own = {f"{path}.mhla.{key}": tensor for path, layer in layers for key, tensor in layer.state_dict().items()}
    copies = next((key for key in own if ".modules_to_save." in key), None)
    check(copies is None, f"{name}.{copies} is an adapter's copy of an MHLA layer; merge or unload the adapter first.")
    for key, tensor in own.items():
        check_plain(f"{name}.{key}", tensor, "save the patch")
    base = base_weights(transformer)
    wanted = set[str]() if isinstance(weights, str) else set(weights)
    unknown = sorted(wanted - base.keys())
    check(not unknown, f"weights={unknown[:1]}: {name} has no such weights; give names of its own, 'mhla' or 'all'.")
    names = base if weights == "all" else {*patched.replaced_weights, *wanted}
    check_writable(transformer, names, "save the patch")
    return own | {key: base[key] for key in names}


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        # types of 8 bits do not know isfinite
        finite = (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isfinite()
        count = tensor.numel() - int(finite.sum())
        check(not count, f"{name} holds NaN or infinite values, {count} of {tensor.numel()}; the patch is unusable.")


def _facts(transformer: nn.Module) -> dict[str, Any]:
    """Return what a patch has to have in common with a transformer, as in :class:`TransformerRecord`."""
    family = get_family(transformer)
    attentions = list(family.self_attentions(transformer).values())
    heads, head_dim = family.heads(attentions[0])
    facts = {"transformer": type(transformer).__name__, "family": family.name, "layers": len(attentions)}
    return {**facts, "heads": heads, "head_dim": head_dim}


def loaded_from(model: Any) -> str:
    """Return the Hub id or path that a pipeline or transformer was loaded from; empty if made in Python."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def base_model_name(source: str) -> str:
    """Return what is recorded of a Hub id or path, also of the Hub's cache: the id, or the folder's name alone."""
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


# Loading


def load_mhla(
    model: Model,
    patch: str | Path,
    *,
    blocks: tuple[int, ...] | None = None,
    backend: str = "auto",
) -> Model:
    """Apply a saved patch, load its weights, and return the model; on an error the model is unchanged.

    A patch with weights of the model itself replaces them; they are kept in the CPU's memory, and :func:`remove_mhla`
    brings them back. A LoRA of the patch is loaded as the adapter ``mhla``. A model that was loaded from elsewhere than
    the patch's base model gets a warning, since other weights of the same shapes are not noticed.

    Args:
        model: unpatched pipeline or transformer of the kind that the patch was made for.
        patch: folder, Hub id, or the name of an adapted patch that ships, such as "tiny-wan-mhla".
        blocks: other block counts to open the patch at; mixing matrices are interpolated.
        backend: see :func:`apply_mhla`.

    Raises:
        ValueError: wrong model, damaged or incomplete files, non-finite values, or a model that is patched already.
        FileNotFoundError: no patch there.
    """
    folder = _find_folder(patch)
    record, tensors = read_record(folder), load_file(folder / PATCH_FILE)
    for name, tensor in tensors.items():
        _check_finite(f"{folder / PATCH_FILE}: {name}", tensor)
    transformers = _check_model(record, find_transformers(model))
    if is_patched(model):
        raise ValueError("The model is already patched; call remove_mhla() before load_mhla().")
    source = loaded_from(model)
    came_from = base_model_name(source)
    lies_beside = source == str(patch) or folder.resolve() in (Path(source).resolve(), Path(source).resolve().parent)
    belongs = lies_beside or not record.base_model or came_from in ("", record.base_model)
    if record.weights != "all" and not belongs:
        warnings.warn(
            f"This patch was made for {record.base_model}, but the model was loaded from {came_from}. Unless that is "
            "a copy, the patch does not belong to it.",
            stacklevel=2,
        )
    plans = []
    for name, transformer in transformers.items():
        saved = record.transformers[name]
        before = saved.patch
        opened = before if blocks is None else before.replace(blocks=blocks)
        patched, layers = plan_patch(transformer, opened, get_family(transformer), model, backend)
        part = {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}
        lora = {key: part.pop(key) for key in list(part) if ".lora_A." in key or ".lora_B." in key}
        part = resized(part, before, opened)
        _check_tensors(patched, layers, part, saved)
        plans.append((patched, layers, part, lora))
    try:
        for patched, layers, part, _ in plans:
            with torch.no_grad():
                for name, layer in layers.items():
                    for key, weight in layer.state_dict(keep_vars=True).items():
                        weight.copy_(part.pop(f"{name}.mhla.{key}"))
            patched.attach(layers)
            _replace_weights(patched, part)
        for patched, _, _, own_lora in plans:
            if own_lora:
                load_lora(patched.transformer, own_lora)
                patched.lora = LORA
    except BaseException:  # no memory, or interrupted
        for patched, *_ in plans:
            detach(patched)
        raise
    return model


@torch.no_grad()
def _replace_weights(patched: Patched, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors over the model's, by name in a plain model, and keep those that change."""
    weights = base_weights(patched.transformer)
    for name, tensor in tensors.items():
        old, new = weights[name], tensor.to(weights[name].device, weights[name].dtype)
        if not old.is_meta and not torch.equal(old, new):
            patched.replaced_weights[name] = old.to("cpu", copy=True)  # first, should the writing be interrupted
            old.copy_(new)


def _find_folder(patch: str | Path) -> Path:
    path = Path(patch)
    if path.is_dir():
        return path
    if (shipped := adapted_patches().get(str(patch))) is not None:
        return shipped
    allowed = f"{patch} must be a folder, a Hub id (owner/name) or a shipped adapted patch"
    if str(patch) in patch_names():
        raise ValueError(f"{allowed}; use apply_mhla(model, {str(patch)!r}) for a preset, which has no weights.")
    if len(path.parts) != 2:
        near = said_allowed(path.name, list(adapted_patches()), "mhla info")
        raise FileNotFoundError(f"{allowed}; {near}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(str(patch), allow_patterns=[PATCH_FILE]))
    except (HFValidationError, HfHubHTTPError, OSError) as error:  # offline and not in the cache is an OSError
        raise FileNotFoundError(f"{allowed}: {error}") from error


def read_record(folder: Path) -> PatchRecord:
    """Read the header of a saved patch; FileNotFoundError if it is missing, ValueError if it is not a patch."""
    path = folder / PATCH_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no MHLA patch: {PATCH_FILE} is missing. Use the result folder of a run, or export "
            f"a checkpoint: mhla export {folder} --output FOLDER"
        )
    try:
        with safe_open(path, framework="pt") as file:
            return PatchRecord.read(json.loads((file.metadata() or {}).get(RECORD, "null")))
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a valid patch: {error}") from error


def _check_model(record: PatchRecord, transformers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    base = record.base_model or "not recorded"
    if {*record.transformers, *record.unpatched} != set(transformers):
        kept = f", with {', '.join(record.unpatched)} left as it is" if record.unpatched else ""
        raise ValueError(
            f"The patch is for {', '.join(sorted(record.transformers))}{kept} (base model {base}), "
            f"but the model has {', '.join(sorted(transformers))}."
        )
    found = {name: transformers[name] for name in record.transformers}
    for name, transformer in found.items():
        for what, value in _facts(transformer).items():
            saved = getattr(record.transformers[name], what)
            if saved != value:
                raise ValueError(
                    f"The patch does not fit the {name}: it was made for {what}={saved!r}, the model has {value!r}. "
                    f"Base model of the patch: {base}."
                )
    return found


def _check_tensors(
    patched: Patched, layers: Layers, tensors: Mapping[str, torch.Tensor], saved: TransformerRecord
) -> None:
    own = {f"{name}.mhla.{key}": x for name, layer in layers.items() for key, x in layer.state_dict().items()}
    check_writable(patched.transformer, set(tensors) - set(own), "load the patch")  # first: others have other shapes
    known, needed = own | base_weights(patched.transformer), {*own, *saved.base_weights}
    problems = [f"missing {key}" for key in sorted(needed - set(tensors))]
    problems += [f"unexpected {key}" for key in sorted(set(tensors) - (needed & set(known)))]
    for key in sorted(needed & set(tensors) & set(known)):
        found, expected = tensors[key], known[key]
        if found.shape != expected.shape:
            problems.append(f"{key} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        elif found.is_floating_point() != expected.is_floating_point():
            problems.append(f"{key} holds {found.dtype}, expected {expected.dtype}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"The patch does not fit the model: {'; '.join(problems[:8])}{more}.")
