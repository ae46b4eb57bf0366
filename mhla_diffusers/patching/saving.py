"""Save a patched model's MHLA to a folder, and share it on the Hub.

A folder holds ``mhla_config.json`` and one safetensors file, named after the hash of its content. The JSON is written
last and names the file, so that at every moment the folder holds one complete patch: a kill in the middle of saving
leaves the patch that was there before. The model's own tensors go by the names of a plain model (see
:mod:`mhla_diffusers.patching.weights`).
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import nn

from ..files import file_hash, write_json, write_tensors
from .adapter import adapter_weights, has_adapter, write_adapters
from .describe import describe
from .finding import find_transformers, mhla_layers, require_layers, require_patched
from .handle import Patched
from .hooks import refuse_weights_on_disk
from .record import (
    CONFIG_NAME,
    FORMAT_VERSION,
    PatchRecord,
    TransformerRecord,
    Weights,
    base_model_name,
    check_finite,
    read_record,
)
from .weights import base_weights, is_plain

logger = logging.getLogger(__name__)

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
        model: patched pipeline or transformer; of a pipeline the transformers that are patched are saved.
        folder: is made if it is missing; a patch in it is replaced in one step, other files stay.
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
        ValueError: not patched, unknown ``weights``, a base that nothing is compared with, LoRA adapters, offloaded or
            quantised weights in the way, no base known, NaN or infinite values, an unsupported ``dtype``, or a value
            that ``dtype`` cannot hold.
        OSError: the folder cannot be written, as on a full disk; the patch that was in it stays.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights={weights!r} is unknown; allowed: {', '.join(get_args(Weights))}.")
    if base is not None and weights != "changed":
        raise ValueError(
            f"base is what weights='changed' compares with, and weights={weights!r} compares nothing; give "
            "weights='changed' as well, or leave base out."
        )
    if dtype is not None and dtype not in _FLOAT_TYPES:
        raise ValueError(f"dtype={dtype!r} must be None or one of {', '.join(map(str, _FLOAT_TYPES))}.")
    require_layers(model)
    handles = require_patched(model)
    source: Any = model if not isinstance(model, nn.Module) else next(iter(handles.values())).transformer
    base_model = base_model or str(getattr(source.config, "_name_or_path", "") or "")
    tensors: dict[str, torch.Tensor] = {}
    records = {}
    for name, patched in handles.items():
        if weights == "mhla" and patched.replaced_weights != {}:
            logger.warning(
                "The patch of the %s came with weights of the model, which weights='mhla' does not save: loaded "
                "elsewhere it draws something else. Save weights='changed' with base=the unpatched model.",
                name,
            )
        if weights == "mhla" and patched.adapter is not None and not has_adapter(patched.transformer, patched.adapter):
            logger.warning(
                "The LoRA %r of the patch of the %s was unloaded, so the patch is saved without it. If it was fused "
                "first, save weights='changed' with base=the unpatched model; else load the patch again and save that.",
                patched.adapter,
                name,
            )
        chosen = _choose_tensors(name, patched, weights, base, base_model)
        saved = {f"{name}.{key}": _as_saved(f"{name}.{key}", tensor, dtype) for key, tensor in chosen.items()}
        tensors |= _apart(saved)
        changed = sorted(key for key in chosen if ".mhla." not in key) if weights == "changed" else []
        layer = next(iter(patched.layers.values()))
        records[name] = TransformerRecord(
            patched.family.name,
            type(patched.transformer).__name__,
            len(patched.attentions),
            layer.heads,
            layer.head_dim,
            layer.config.to_dict(),
            changed,
        )
    record = PatchRecord(
        FORMAT_VERSION,
        base_model_name(base_model),
        version("diffusers"),
        weights,
        file="",
        sha256="",
        transformers=records,
        unpatched=sorted(set(find_transformers(model)) - set(handles)),
        few_steps=next((one.few_steps.to_dict() for one in handles.values() if one.few_steps is not None), {}),
    )
    adapters = {
        name: _adapter_as_saved(
            f"{name}.{patched.adapter}", adapter_weights(patched.transformer, patched.adapter), dtype
        )
        for name, patched in handles.items()
        if patched.adapter is not None
    }
    folder = _make_folder(folder)
    earlier = _earlier_files(folder)
    if any(adapters.values()):
        lora, sha256 = write_adapters(folder, adapters)
        record = replace(record, lora={"file": lora, "sha256": sha256})
    file, digest = _write_tensors(folder, tensors, record)
    record = replace(record, file=file, sha256=digest)
    write_json(record.to_dict(), folder / CONFIG_NAME)
    for path in earlier:
        if path.name not in (file, record.lora.get("file")):
            path.unlink(missing_ok=True)
    return folder


def _adapter_as_saved(
    name: str, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    return {key: _as_saved(f"{name}.{key}", tensor, dtype) for key, tensor in weights.items()}


def _as_saved(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.is_floating_point():
        return tensor
    check_finite(name, tensor)
    saved = tensor if dtype is None else tensor.to(dtype)
    if dtype is not None and not saved.isfinite().all():
        raise ValueError(f"{name} has values up to {float(tensor.abs().max()):.3g}, which {dtype} cannot hold.")
    return saved


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a copy of weights that stand in two places, as tied embeddings do: safetensors writes none that share."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return apart


def _earlier_files(folder: Path) -> list[Path]:
    """The tensors of the patch that the folder holds now, if it does."""
    try:
        record = read_record(folder)
    except (FileNotFoundError, ValueError):
        return []
    paths = [folder / name for name in (record.file, record.lora.get("file")) if name]
    return [path for path in paths if path.parent == folder and path.suffix == ".safetensors"]


def _make_folder(folder: str | Path) -> Path:
    if not isinstance(folder, str | Path) or not str(folder):
        raise ValueError(f"folder={folder!r} must be the path of the folder to save into.")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot save a patch into {folder}: {error}.") from error
    return Path(folder)


def _choose_tensors(
    name: str, patched: Patched, weights: Weights, base: Any, base_model: str
) -> dict[str, torch.Tensor]:
    transformer = patched.transformer
    refuse_weights_on_disk(transformer, "save the patch")
    whole = transformer.state_dict()
    # under plain names, also where PEFT's modules_to_save has put a copy of a layer beside it
    own = {
        f"{path}.mhla.{key}": tensor
        for path, layer in patched.layers.items()
        for key, tensor in layer.state_dict().items()
    }
    written = own if weights == "mhla" else whole
    adapters = [key for key in written if any(mark in key for mark in _ADAPTER_MARKS)]
    if adapters:
        raise ValueError(
            f"{name} has LoRA adapters ({adapters[0]}, …), which weights={weights!r} cannot tell from the model. "
            "Fuse and unload them first, or save weights='mhla' and the adapters with save_lora_weights()."
        )
    state = {key: places[0] for key, places in base_weights(transformer).items()} if weights != "mhla" else {}
    for key, tensor in (own | state).items():
        if not is_plain(tensor):
            raise ValueError(
                f"{name}.{key} is no plain tensor but a {type(tensor).__name__}: quantised or sharded weights cannot "
                "be saved. weights='mhla' saves MHLA's own tensors alone, which quantisation passes over."
            )
        if tensor.is_meta:
            raise ValueError(f"{name}.{key} is offloaded and has no data; switch offloading off before saving.")
    if weights == "changed":
        found = base_weights(_base_transformer(name, patched, base, base_model))
        reference = {key: places[0] for key, places in found.items()}
        strange = [key for key, x in state.items() if key not in reference or reference[key].shape != x.shape]
        if strange:
            raise ValueError(
                f"The base does not fit: it has no {name}.{strange[0]} of shape {state[strange[0]].shape}."
            )
        state = {
            key: tensor
            for key, tensor in state.items()
            if not torch.equal(tensor.cpu(), reference[key].to(device="cpu", dtype=tensor.dtype))
        }
    return own | state


def _base_transformer(name: str, patched: Patched, base: Any, base_model: str) -> nn.Module:
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
    kind = patched.family.transformer_class(type(patched.transformer).__name__)
    is_pipeline = patched.family.is_diffusion and not Path(base_model, "config.json").is_file()
    loaded: nn.Module = kind.from_pretrained(base_model, **({"subfolder": name} if is_pipeline else {}))
    return loaded


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], record: PatchRecord) -> tuple[str, str]:
    """Write the safetensors file; return its name and hash."""
    aside = folder / f".mhla-{os.getpid()}.safetensors"  # errors name it
    try:
        # one entry alone: safetensors writes several in any order, and the name is that of the content
        write_tensors(tensors, aside, {"mhla": json.dumps(record.settings(), sort_keys=True)})
        digest = file_hash(aside)
        # the name of its content, so that a patch which is replaced keeps its file until the JSON names the new one
        file = f"mhla-{digest[:12]}.safetensors"
        aside.replace(folder / file)
    finally:
        aside.unlink(missing_ok=True)
    return file, digest


_CARD = """\
# {title}

A patch that gives {base_link} Multi-Head Linear Attention (MHLA),
self-attention of linear cost, through [mhla_diffusers](https://pypi.org/project/mhla-diffusers).

```python
import torch
from diffusers import DiffusionPipeline
from mhla_diffusers import load_mhla

pipe = DiffusionPipeline.from_pretrained("{base_source}", dtype=torch.bfloat16)
load_mhla(pipe, "{repo_id}")
```
{sampling}
`remove_mhla(pipe)` takes it away again.

## What it holds

{holds}

```
{table}
```

## Settings

```json
{settings}
```
"""

_HOLDS = {
    "mhla": "Only the tensors that MHLA adds; the base model's weights are used as they are.",
    "changed": "The tensors that MHLA adds and those of the base model that were adapted to it.",
    "all": "All weights of the transformer.",
}

_HOLDS_LORA = " A LoRA on the base model's linear layers, which `load_mhla` loads as the adapter `mhla`."

_SAMPLING = """
The model {few}, with fresh noise after every step but the last. `load_mhla` gives the pipeline the scheduler for it, so
call it with `num_inference_steps={count}, guidance_scale=1.0`.
"""


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


def model_card(model: Any, repo_id: str, record: PatchRecord) -> str:
    """Text of the model card.

    Args:
        model: the patched pipeline or transformer.
        repo_id: where it will be uploaded.
        record: what was saved.
    """
    from huggingface_hub import ModelCardData

    base, on_hub = record.base_model, "/" in record.base_model
    data = ModelCardData(
        base_model=base if on_hub else None, library_name="diffusers", tags=["mhla", "linear-attention"]
    )
    settings = {name: part.mhla for name, part in record.transformers.items()}
    body = _CARD.format(
        title=repo_id.split("/")[-1],
        repo_id=repo_id,
        base_link=f"[{base}](https://huggingface.co/{base})"
        if on_hub
        else f"the model {base or 'that it was made for'}",
        base_source=base if on_hub else f"path/to/{base or 'the-model'}",
        holds=_HOLDS[record.weights] + _HOLDS_LORA * bool(record.lora),
        sampling=""
        if record.sampling is None
        else _SAMPLING.format(few=record.sampling, count=len(record.sampling.times)),
        table=describe(model),
        settings=json.dumps(settings, indent=2),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body}"
