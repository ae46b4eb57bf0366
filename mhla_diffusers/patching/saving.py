"""Save a patched model's MHLA to a folder.

A folder holds ``mhla_config.json`` and one safetensors file, named after the hash of its content. The JSON is written
last and names the file, so that at every moment the folder holds one complete patch: a kill in the middle of saving
leaves the patch that was there before.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import diffusers
import torch
from safetensors.torch import save_file
from torch import nn

from ..families import get_family
from ..files import file_hash, write_json
from .finding import find_transformers, mhla_layers, require_layers
from .layer import MHLALayer
from .record import (
    CONFIG_NAME,
    FORMAT_VERSION,
    PatchRecord,
    TransformerRecord,
    Weights,
    base_model_name,
)

_ADAPTER_MARKS = ("lora_", ".base_layer.", ".modules_to_save.")
"""Parts of the names that PEFT gives to weights."""

_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_mhla(
    model: Any,
    folder: str | Path,
    *,
    weights: Weights = "mhla",
    base: Any = None,
    base_model: str | None = None,
    dtype: torch.dtype | None = None,
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
        dtype: floating point type of what is saved, such as ``torch.float16`` for half the size; None keeps each
            tensor's own. Loading brings every tensor to the type that the model has.

    Returns:
        The folder.

    Raises:
        ValueError: not patched, unknown ``weights``, LoRA adapters or offloaded weights in the way, no base known, a
            unsupported ``dtype``, or a value that ``dtype`` cannot hold.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} is unknown; allowed: {', '.join(get_args(Weights))}.")
    if dtype is not None and dtype not in _FLOAT_TYPES:
        raise ValueError(f"dtype={dtype!r} must be None or one of {', '.join(map(str, _FLOAT_TYPES))}.")
    require_layers(model)
    transformers = find_transformers(model)
    base_model = base_model or _base_model(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, transformer in transformers.items():
        chosen = _choose_tensors(name, transformer, weights, base, base_model)
        tensors |= {f"{name}.{key}": _as_saved(f"{name}.{key}", tensor, dtype) for key, tensor in chosen.items()}
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
    write_json(asdict(record), folder / CONFIG_NAME)
    for old in folder.glob("mhla-*.safetensors"):
        if old.name != file:
            old.unlink()
    return folder


def _as_saved(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    if dtype is None or not tensor.is_floating_point():
        return tensor
    saved = tensor.to(dtype)
    if not saved.isfinite().all() and tensor.isfinite().all():
        raise ValueError(f"{name} has values up to {float(tensor.abs().max()):.3g}, which {dtype} cannot hold.")
    return saved


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
    # under plain names, also where PEFT's modules_to_save has put a copy of a layer beside it
    own = {
        f"{path}.{key}": tensor
        for path, layer in mhla_layers(transformer).items()
        for key, tensor in layer.state_dict().items()
    }
    chosen = own if weights == "mhla" else state
    adapters = [key for key in chosen if any(mark in key for mark in _ADAPTER_MARKS)]
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
        # the name of its content, so that a patch which is replaced keeps its file until the JSON names the new one
        file = f"mhla-{digest[:12]}.safetensors"
        aside.replace(folder / file)
    finally:
        aside.unlink(missing_ok=True)
    return file, digest
