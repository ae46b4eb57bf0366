"""Save a patched model's MHLA to a folder, load it from a folder or the Hub, share it.

A folder holds ``mhla_config.json`` and one safetensors file, named after the hash of its content. The JSON is written
last and names the file, so that at every moment the folder holds one complete patch: a kill in the middle of saving
leaves the patch that was there before.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

from .families import get_family
from .layer import MHLALayer
from .patch_loading import load_mhla
from .patch_record import (
    CONFIG_NAME,
    FORMAT_VERSION,
    PatchRecord,
    TransformerRecord,
    Weights,
    base_model_name,
    file_hash,
    read_record,
)
from .patching import find_transformers, mhla_layers, require_layers

__all__ = ["CONFIG_NAME", "PatchRecord", "Weights", "load_mhla", "push_mhla", "read_record", "save_mhla"]


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
        base_model: Hub id or path of the base; None for the one that the model was loaded from. Of a path only the
            name of the folder is recorded.

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
        base_model_name(base_model),
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

    Raises:
        ValueError: what :func:`save_mhla` raises, or a ``repo_id`` that cannot be one.
        OSError: the Hub cannot be reached, or refused.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # of the HTTP library, whose errors of connection are no OSErrors

    from .model_card import model_card

    with TemporaryDirectory() as folder:
        save_mhla(model, folder, weights=weights, base=base)
        Path(folder, "README.md").write_text(model_card(model, repo_id, read_record(Path(folder))), encoding="utf-8")
        hub = HfApi(token=token)
        try:
            hub.create_repo(repo_id, private=private, exist_ok=True)
            commit = hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload MHLA patch")
        except (HTTPError, OSError) as error:
            raise OSError(
                f"The patch could not be uploaded to the Hub repository {repo_id!r}: {error} Check the connection, "
                "HF_HUB_OFFLINE and the token (hf auth login) and call push_mhla again; until then "
                "save_mhla(model, folder) keeps the patch here."
            ) from error
    return str(commit.commit_url)


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
        digest = file_hash(aside)
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
