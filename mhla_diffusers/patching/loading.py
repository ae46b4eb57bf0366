"""Load a saved patch from a folder or the Hub."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..config import MHLAConfig, adapted_patch_folder, adapted_patch_names, patch_names
from ..families import get_family
from ..files import file_hash
from .finding import find_transformers, mhla_layers
from .record import CONFIG_NAME, PICKLE_SUFFIXES, PatchRecord, TransformerRecord, Weights, read_record
from .removal import remove_mhla
from .replacing import apply_mhla
from .resizing import resized

Model = TypeVar("Model")


def load_mhla(
    model: Model,
    patch: str | Path,
    *,
    blocks: tuple[int, ...] | None = None,
    exact_tiles: tuple[int, ...] | None = None,
    exact_share: float | None = None,
    backend: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """Apply a saved patch and load its weights.

    If anything is refused the model is unchanged. A patch saved with ``weights="changed"`` or ``"all"`` also replaces
    weights of the model itself, which :func:`remove_mhla` does not bring back.

    Args:
        model: unpatched pipeline or transformer of the kind that the patch was made for.
        patch: folder, Hub id, or the name of an adapted patch that ships, such as "tiny-wan-exact".
        blocks: other block counts to open the patch at; mixing matrices are interpolated.
        exact_tiles: other tile counts; the scores of calibrated tiles are interpolated, and tiles chosen anew.
        exact_share: another part of all pairs of tiles to be exact; calibrated tiles are chosen anew.
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
    wanted = {"blocks": blocks, "exact_tiles": exact_tiles, "exact_share": exact_share}
    changes = {name: value for name, value in wanted.items() if value is not None}
    opened = {name: config.replace(**changes) for name, config in configs.items()}
    try:
        for name, transformer in transformers.items():
            apply_mhla(transformer, opened[name], backend=backend)
        parts = {name: _part(tensors, name, record.transformers[name], opened[name]) for name in transformers}
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
            for layer in mhla_layers(transformer).values():
                if layer.exact is not None:
                    layer.exact.make_lists()
    return model


def _find_folder(patch: str | Path, revision: str | None, token: str | None) -> Path:
    if not str(patch):
        raise ValueError("patch is empty; give a folder or a Hub id.")
    path = Path(patch)
    if path.suffix in PICKLE_SUFFIXES:
        raise ValueError(f"{path} is a pickle file, which is never loaded; save the patch with save_mhla().")
    if path.is_dir():
        return path
    shipped = adapted_patch_folder(str(patch))
    if shipped is not None:
        return shipped
    if str(patch) in patch_names():
        raise ValueError(
            f"{patch} is a ready patch, settings alone; apply_mhla(model, {str(patch)!r}) opens it, or --patch."
        )
    if "/" not in str(patch) and not path.exists():
        near = get_close_matches(str(patch), adapted_patch_names(), n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise FileNotFoundError(
            f"{patch} is no folder, no Hub id (owner/name) and no adapted patch that ships.{hint} "
            f"These ship: {', '.join(adapted_patch_names()) or 'none'}."
        )
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


def _read_tensors(folder: Path, record: PatchRecord) -> dict[str, torch.Tensor]:
    path = folder / record.file
    if path.suffix != ".safetensors" or path.parent != folder:
        raise ValueError(f"{CONFIG_NAME} names {record.file!r}, which is no safetensors file in {folder}.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the patch is incomplete.")
    if file_hash(path) != record.sha256:
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
    tensors: dict[str, torch.Tensor], component: str, record: TransformerRecord, opened: MHLAConfig
) -> dict[str, torch.Tensor]:
    """One transformer's tensors, brought to the wanted block counts, tile counts and share."""
    prefix, saved = f"{component}.", MHLAConfig.from_dict(record.mhla)
    part = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if record.mhla.get("near_field") == "softmax":
        part = _without_near_field(part, record.heads)
    return resized(part, saved, opened, record.heads)


def _without_near_field(part: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Tensors of a patch from before there were exact tiles, whose far field left a query's own block out."""
    part = dict(part)
    for key in [key for key in part if key.endswith(".mhla.mixing")]:
        part[key] = part[key].clone()
        part[key].diagonal(dim1=-2, dim2=-1).zero_()
        # a single block had no far field, and no weight of it
        part.setdefault(key.replace(".mixing", ".far_field_log_weight"), torch.zeros(heads))
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
