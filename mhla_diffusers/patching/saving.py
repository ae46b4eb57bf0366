"""Save a patched model's MHLA to a folder, which may be uploaded to the Hub as it is.

A patch is one safetensors file: MHLA's tensors, those of the model that were adapted and a LoRA's, and the settings
among the metadata. It is written aside and renamed, so that a kill in the middle of saving leaves the one before.
"""

import json
import logging
from dataclasses import field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import nn

from ..config import LinearConfig
from ..errors import check_choice
from ..files import write_tensors
from ..settings import Settings, settings
from .finding import find_transformers, is_patched, require_layers, require_patched
from .patched import Patched
from .weights import base_weights, check_plain, has_lora, lora_weights, refuse_weights_on_disk

logger = logging.getLogger(__name__)

Weights = Literal["mhla", "changed", "all"]
"""What a saved patch holds: MHLA's own tensors, these and every tensor that differs from the base, or everything."""
PATCH_FILE = "mhla.safetensors"
RECORD = "mhla"
"""Entry of the metadata."""
FORMAT_VERSION = 5
_PEFT_MARKS = ("lora_", ".base_layer.", ".modules_to_save.")
"""Parts of the names that PEFT gives to weights."""
_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@settings()
class TransformerRecord(Settings):
    """What a saved patch says of one transformer, to recognise the model that it fits."""

    family: str
    transformer: str
    """Class name."""
    layers: int
    heads: int
    head_dim: int
    patch: dict[str, Any]
    """Fields of the :class:`PatchConfig`."""
    base_weights: list[str] = field(default_factory=list)
    """Names of the model's own tensors that a patch with ``weights="changed"`` holds."""


@settings()
class PatchRecord(Settings):
    """What a saved patch says of itself."""

    format_version: int
    base_model: str
    """Hub id, or the name of a local folder; empty where it is unknown."""
    diffusers_version: str
    weights: Weights
    transformers: Annotated[dict[str, TransformerRecord], Field(min_length=1)]
    unpatched: list[str] = field(default_factory=list)
    """Transformers of the pipeline that the patch leaves alone."""


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
        model: patched pipeline or transformer; of a pipeline the transformers that are patched are saved.
        folder: is made if it is missing; its ``mhla.safetensors`` is replaced in one step, other files stay.
        weights: "mhla": MHLA's own tensors, and weights of the model that :func:`load_mhla` replaced, which makes it
            "changed"; "changed": also every other tensor that differs from ``base``; "all": the whole transformer.
        base: for "changed", the unpatched pipeline or transformer to compare with; None loads it from ``base_model``.
        base_model: Hub id or path of the base; None for the one that the model was loaded from. Of a path only the
            name of the folder is recorded.
        dtype: floating point type of what is saved, such as ``torch.float16`` for half the size; None keeps each
            tensor's own. Loading brings every tensor to the type that the model has.

    Returns:
        The folder.

    Raises:
        ValueError: not patched, unknown ``weights``, a base that nothing is compared with, LoRA adapters, offloaded or
            quantised weights in the way, no base known, NaN or infinite values, an unsupported ``dtype``, or a value
            that ``dtype`` cannot hold.
        OSError: the folder cannot be written, as on a full disk; the patch that was in it stays.
    """
    check_choice("weights", weights, get_args(Weights))
    if base is not None and weights != "changed":
        raise ValueError(f"base needs weights='changed', got weights={weights!r}; change weights, or leave base out.")
    check_choice("dtype", dtype, (*_FLOAT_TYPES, None))
    find_transformers(model)  # refuses a patch without a family
    handles = require_patched(model)
    if any(isinstance(patched.config, LinearConfig) for patched in handles.values()):
        require_layers(model)  # which diffusers' own form makes at the first forward
    base_model = base_model or loaded_from(model, next(iter(handles.values())).transformer)
    tensors: dict[str, torch.Tensor] = {}
    records = {}
    for name, patched in handles.items():
        if weights == "mhla":
            _warn_of_what_is_not_saved(name, patched)
        chosen = _choose_tensors(name, patched, weights, base, base_model)
        tensors |= {f"{name}.{key}": _as_saved(f"{name}.{key}", tensor, dtype) for key, tensor in chosen.items()}
        if patched.lora is not None:
            for key, tensor in lora_weights(patched.transformer, patched.lora).items():
                tensors[f"{name}.{key}"] = _as_saved(f"{name}.{key}", tensor, dtype)
        family = patched.of_family
        records[name] = TransformerRecord(
            family.name,
            type(patched.transformer).__name__,
            len(patched.attentions),
            *family.heads(next(iter(patched.attentions.values()))),
            patched.config.to_dict(),
            sorted(key for key in chosen if ".mhla." not in key) if weights != "all" else [],
        )
    if weights == "mhla" and any(one.base_weights for one in records.values()):
        weights = "changed"
    record = PatchRecord(
        FORMAT_VERSION,
        base_model_name(base_model),
        version("diffusers"),
        weights,
        transformers=records,
        unpatched=sorted(set(find_transformers(model)) - set(handles)),
    )
    apart, seen = {}, set()
    for name, tensor in tensors.items():  # safetensors writes no tensors that share memory, as tied embeddings do
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    write_tensors(apart, Path(folder, PATCH_FILE), {RECORD: json.dumps(record.to_dict())})
    return Path(folder)


def _warn_of_what_is_not_saved(name: str, patched: Patched) -> None:
    if patched.lora is not None and not has_lora(patched.transformer, patched.lora):
        logger.warning(
            "The LoRA %r of the patch of the %s was unloaded, so the patch is saved without it. If it was fused, "
            "save weights='changed' with base=the unpatched model; otherwise load the patch again first.",
            patched.lora,
            name,
        )
    others = sorted(set(getattr(patched.transformer, "peft_config", {})) - {patched.lora})
    if others:
        logger.warning(
            "The adapters %s of the %s do not belong to the patch and are not saved with it: save_lora_weights() does.",
            ", ".join(map(repr, others)),
            name,
        )


def _choose_tensors(
    name: str, patched: Patched, weights: Weights, base: Any, base_model: str
) -> dict[str, torch.Tensor]:
    """Return MHLA's tensors, and the model's tensors that ``weights`` selects, by their names in a plain model."""
    transformer = patched.transformer
    refuse_weights_on_disk(transformer, "save the patch")
    # under plain names, also where PEFT's modules_to_save has put a copy of a layer beside it
    own = {
        f"{path}.mhla.{key}": tensor
        for path, layer in patched.layers.items()
        for key, tensor in layer.state_dict().items()
    }
    replaced = patched.replaced_weights
    if weights == "mhla" and replaced is None:
        raise ValueError(
            f"The patch of the {name} came with weights of the model, and load_mhla(..., keep_replaced=False) did not "
            "record which. Save weights='changed' with base=the unpatched model."
        )
    state = {
        key: places[0]
        for key, places in base_weights(transformer).items()
        if weights != "mhla" or key in (replaced or ())
    }
    written = own if weights == "mhla" else transformer.state_dict()
    added = [key for key in written if any(mark in key for mark in _PEFT_MARKS)]
    if added:
        raise ValueError(
            f"{name} has LoRA adapters ({added[0]}, …), which weights={weights!r} cannot tell from the model. "
            "Fuse and unload them first, or save weights='mhla' and the adapters with save_lora_weights()."
        )
    for key, tensor in (own | state).items():
        check_plain(f"{name}.{key}", tensor, "save the patch")
    if weights != "changed":
        return own | state
    reference = base_weights(_base_transformer(name, patched, base, base_model))
    strange = [key for key, x in state.items() if key not in reference or reference[key][0].shape != x.shape]
    if strange:
        raise ValueError(f"The base does not fit: it has no {name}.{strange[0]} of shape {state[strange[0]].shape}.")
    return own | {
        key: tensor
        for key, tensor in state.items()
        if not torch.equal(tensor.cpu(), reference[key][0].to(device="cpu", dtype=tensor.dtype))
    }


def _base_transformer(name: str, patched: Patched, base: Any, base_model: str) -> nn.Module:
    if base is not None:
        found = find_transformers(base)
        if name not in found or is_patched(base):
            raise ValueError(f"base must be an unpatched model with a {name}; it has {', '.join(found)}.")
        return found[name]
    if not base_model:
        raise ValueError(
            "weights='changed' needs the base model, but this model does not record its origin; give base=the "
            "unpatched model, or base_model=its Hub id."
        )
    kind = patched.of_family.transformer_class(type(patched.transformer).__name__)
    is_pipeline = not Path(base_model, "config.json").is_file()
    loaded: nn.Module = kind.from_pretrained(base_model, **({"subfolder": name} if is_pipeline else {}))
    return loaded


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless all values of a tensor of a patch are finite."""
    if tensor.is_floating_point():
        # types of 8 bits do not know isfinite
        finite = (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isfinite()
        if not finite.all():
            count = tensor.numel() - int(finite.sum())
            raise ValueError(
                f"{name} holds NaN or infinite values, {count} of {tensor.numel()}; the patch is unusable."
            )


def _as_saved(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    check_finite(name, tensor)
    if dtype is None or not tensor.is_floating_point():
        return tensor
    saved = tensor.to(dtype)
    if not saved.isfinite().all():
        raise ValueError(f"{name} has values up to {float(tensor.abs().max()):.3g}, which {dtype} cannot hold.")
    return saved


def loaded_from(model: Any, transformer: Any) -> str:
    """Return the Hub id or path that a pipeline, or its transformer, was loaded from; empty if made in Python."""
    source = transformer if isinstance(model, nn.Module) else model
    return str(getattr(getattr(source, "config", None), "_name_or_path", "") or "")


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
