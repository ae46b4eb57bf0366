"""Load a saved patch from a folder or the Hub."""

import warnings
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ..config import MHLAConfig, adapted_patch_folder, adapted_patch_names, patch_names
from ..families import get_family
from .adapter import ADAPTER, load_adapter
from .finding import find_transformers, is_patched
from .handle import Patched
from .layer import MHLALayer
from .patch import plan_patch, remove_mhla
from .processor import MHLAProcessor
from .record import (
    CONFIG_NAME,
    PICKLE_SUFFIXES,
    UNIFORM_BLOCKS_SINCE,
    PatchRecord,
    TransformerRecord,
    Weights,
    check_file,
    check_finite,
    check_lora,
    new_tensors,
    read_record,
)
from .weights import base_weights, check_writable, resized

Model = TypeVar("Model")


def load_mhla(
    model: Model,
    patch: str | Path,
    *,
    blocks: tuple[int, ...] | None = None,
    block_size: int | None = None,
    density: float | None = None,
    backend: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    keep_replaced: bool = True,
) -> Model:
    """Apply a saved patch and load its weights.

    If anything is refused the model is unchanged. A patch saved with ``weights="changed"`` or ``"all"`` also replaces
    weights of the model itself, which :func:`remove_mhla` brings back. A LoRA that belongs to the patch is loaded as
    the adapter ``mhla``. For a patch that was distilled to a few steps a pipeline gets a
    :class:`mhla_diffusers.FewStepScheduler`, until :func:`remove_mhla` brings its own back.

    Args:
        model: unpatched pipeline or transformer of the kind that the patch was made for.
        patch: folder, Hub id, or the name of an adapted patch that ships, such as "tiny-wan-mhla".
        blocks: other block counts to open the patch at; mixing matrices are interpolated.
        block_size: other tokens of every uniform block, of a patch with a sparse branch; it was not trained with them,
            which a warning says.
        density: another part of all pairs of blocks to list.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        revision: of a Hub repository; with it a folder here of the owner's name does not count.
        token: for a private Hub repository.
        keep_replaced: whether to keep the weights of the model that the patch changes, in the CPU's memory. Without
            them :func:`remove_mhla` refuses, since it could not bring them back.

    Returns:
        ``model``.

    Raises:
        ValueError: wrong model, damaged or incomplete files, non-finite values, or a model that is patched already.
        FileNotFoundError: no patch there.
    """
    folder = _find_folder(patch, revision, token)
    record = read_record(folder)
    tensors = _read_tensors(folder, record)
    lora = check_lora(folder, record)
    adapters = {} if lora is None else load_file(lora)
    transformers = _check_model(record, find_transformers(model))
    if is_patched(model):
        raise ValueError("The model is already patched with MHLA; call remove_mhla() before load_mhla().")
    wanted = {"blocks": blocks, "block_size": block_size, "density": density}
    changes = {name: value for name, value in wanted.items() if value is not None}
    prepared = []
    for name, transformer in transformers.items():
        saved = record.transformers[name]
        before = MHLAConfig.from_dict(saved.mhla)
        opened = before.replace(**changes)
        if opened.block_size != before.block_size and record.format_version >= UNIFORM_BLOCKS_SINCE:
            warnings.warn(
                f"This patch was trained with blocks of {before.block_size} tokens and opens with blocks of "
                f"{opened.block_size}; adapt it, or fit its weights with calibrate_sparse(model, run).",
                stacklevel=2,
            )
        patched, layers = plan_patch(transformer, MHLAProcessor(opened, backend=backend))
        prefix = f"{name}."
        part = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        part = resized(part, before, opened)
        _check_tensors(patched, layers, part, record.weights, saved)
        prepared.append((patched, layers, part))
    try:
        for patched, layers, part in prepared:
            for name, layer in layers.items():
                own = f"{name}.mhla."
                _fill(layer, {key.removeprefix(own): part.pop(key) for key in list(part) if key.startswith(own)})
            patched.install(layers, model)
            patched.replace_weights(part, keep_replaced)
        for (patched, _, _), (name, transformer) in zip(prepared, transformers.items(), strict=True):
            prefix = f"{name}."
            of_lora = {key.removeprefix(prefix): x for key, x in adapters.items() if key.startswith(prefix)}
            if of_lora:
                load_adapter(transformer, of_lora)
                patched.adapter = ADAPTER
            if record.sampling is not None:
                patched.sample_in(record.sampling, model)
    except BaseException:  # no memory, or interrupted
        if is_patched(model) and all(patched.replaced_weights is not None for patched, _, _ in prepared):
            remove_mhla(model)
        raise
    return model


@torch.no_grad()
def _fill(layer: MHLALayer, tensors: dict[str, torch.Tensor]) -> None:
    state = layer.state_dict(keep_vars=True)
    for key, tensor in tensors.items():
        state[key].copy_(tensor)


def _find_folder(patch: str | Path, revision: str | None, token: str | None) -> Path:
    if not isinstance(patch, str | Path) or not str(patch):
        raise ValueError(f"patch={patch!r} must be a folder, a Hub id, or the name of an adapted patch that ships.")
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
            f"{patch} is a preset, settings without weights; apply_mhla(model, {str(patch)!r}) opens it, or --patch."
        )
    if "/" not in str(patch) and not path.exists():
        near = get_close_matches(str(patch), adapted_patch_names(), n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise FileNotFoundError(
            f"{patch} is no folder, no Hub id (owner/name) and no adapted patch that ships.{hint} "
            f"These ship: {', '.join(adapted_patch_names()) or 'none'}."
        )
    if path.exists():
        raise FileNotFoundError(f"{patch} is no folder; load_mhla takes the folder that save_mhla wrote, or a Hub id.")
    if not _is_hub_id(patch):
        known = path.name in adapted_patch_names() and len(path.parts) == 1
        hint = f" The adapted patch that ships is {path.name!r}, without a slash." if known else ""
        raise FileNotFoundError(
            f"There is no folder {patch}, and it is no Hub id (owner/name).{hint} load_mhla takes the folder that "
            "save_mhla wrote."
        )
    if path.parent.is_dir() and revision is None:
        raise FileNotFoundError(
            f"The folder {path.parent} that is here has no {path.name}. If the Hub's {patch} is meant, say so with "
            "revision='main'."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [CONFIG_NAME, "mhla-*.safetensors"]
    try:
        return Path(snapshot_download(str(patch), revision=revision, token=token, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{patch} is neither a folder here nor a repository that the Hub gave: {error}"
        ) from error


def _is_hub_id(patch: str | Path) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(str(patch))
    except HFValidationError:
        return False
    return "/" in str(patch)


def _read_tensors(folder: Path, record: PatchRecord) -> dict[str, torch.Tensor]:
    path = check_file(folder, record)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    for name, tensor in tensors.items():
        check_finite(f"{path}: {name}", tensor)
    return tensors if record.format_version >= UNIFORM_BLOCKS_SINCE else new_tensors(tensors)


def _check_model(record: PatchRecord, transformers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The transformers to patch."""
    if {*record.transformers, *record.unpatched} != set(transformers):
        kept = f", with {', '.join(record.unpatched)} left as it is" if record.unpatched else ""
        raise ValueError(
            f"The patch is for {', '.join(sorted(record.transformers))}{kept} (base model {record.base_model!r}), "
            f"but the model has {', '.join(sorted(transformers))}."
        )
    found = {name: transformers[name] for name in record.transformers}
    for name, transformer in found.items():
        _check_transformer(name, transformer, record)
    return found


def _check_transformer(name: str, transformer: nn.Module, record: PatchRecord) -> None:
    saved, family = record.transformers[name], get_family(transformer)
    attentions = family.self_attentions(transformer)
    attn: Any = next(iter(attentions.values()))
    heads, head_dim = family.adapter_of(attn).heads(attn)
    found = {
        "transformer": type(transformer).__name__,
        "layers": len(attentions),
        "heads": heads,
        "head_dim": head_dim,
    }
    for what, value in found.items():
        if getattr(saved, what) != value:
            raise ValueError(
                f"The patch does not fit the {name}: it was made for {what}={getattr(saved, what)!r}, the model "
                f"has {value!r}. Base model of the patch: {record.base_model or 'not recorded'}."
            )


def _check_tensors(
    patched: Patched,
    layers: dict[str, MHLALayer],
    tensors: dict[str, torch.Tensor],
    weights: Weights,
    saved: TransformerRecord,
) -> None:
    """Raise unless the tensors are those of the new layers and those of the model that the patch should hold.

    Raises:
        ValueError: naming what is missing, unexpected or of another shape, or weights that cannot be replaced.
    """
    own = {f"{name}.mhla.{key}": x for name, layer in layers.items() for key, x in layer.state_dict().items()}
    base = {key: places[0] for key, places in base_weights(patched.transformer).items()} if weights != "mhla" else {}
    needed = {*own, *(base if weights == "all" else saved.base_weights)}
    known = own | base
    problems = [f"missing {key}" for key in sorted(needed - set(tensors))]
    problems += [f"unexpected {key}" for key in sorted(set(tensors) - set(known))]
    for key in sorted(set(tensors) & set(known)):
        if tensors[key].shape != known[key].shape:
            problems.append(f"{key} has shape {tuple(tensors[key].shape)}, expected {tuple(known[key].shape)}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"The patch does not fit the model: {'; '.join(problems[:8])}{more}.")
    check_writable(patched.transformer, set(tensors) - set(own), "load the patch")
