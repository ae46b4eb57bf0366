"""Convert a Wan checkpoint that was trained with the code of the MHLA paper.

Those models keep Wan's original names and add, in every MHLA layer, ``self_attn.block_attn.conv.weight`` (the mixing
matrix as a 1 x 1 convolution, dimension 0 the query block), ``self_attn.g_norm.weight`` (output norm) and, in some,
``self_attn.g`` (gate) and ``self_attn.lepe`` (depth-wise convolution on the values). Their attention has no normaliser,
and their mixing matrices are signed, so they are never clipped.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..config import MHLAConfig
from ..files import read_json
from .patch import apply_mhla
from .saving import save_mhla

_KNOWN_BLOCKS = {105: (7, 3, 5), 150: (3, 5, 10)}
"""Block counts of the paper (Sec. 5.3) and of its code."""

_MIXING = ".self_attn.block_attn.conv.weight"
"""End of the mixing matrices' names."""

_TELL_THE_SHAPE = (
    "patch_embedding.weight",
    "proj_out.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.time_embedder.linear_1.weight",
    "blocks.0.ffn.net.2.weight",
)
"""Tensors that the transformer's sizes are read off."""

_RENAMED = {
    ".block_attn.conv.weight": ".mhla.mixing",
    ".g_norm.weight": ".mhla.output_norm",
    ".g.": ".mhla.gate.",
    ".lepe.": ".mhla.convolution.",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}


def convert_wan(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    blocks: tuple[int, ...] | None = None,
    base_model: str = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
) -> Path:
    """Convert a safetensors checkpoint to a folder for ``load_mhla``.

    The transformer's shape is read off the tensors. Everything is saved, since such training changes all weights.

    Args:
        checkpoint: safetensors file with the names of the paper's code, or the ``.index.json`` of several.
        folder: where to write.
        blocks: block counts (frames, height, width); None to infer those of the paper's code from M.
        base_model: recorded as base model.

    Returns:
        ``folder``.

    Raises:
        ValueError: not such a checkpoint, or block counts that do not fit it.
    """
    from diffusers import WanTransformer3DModel

    if blocks is not None and len(blocks) != 3:
        raise ValueError(
            f"blocks={blocks} must be three block counts (frames, height, width), for example (3, 5, 10), which the "
            "command line takes as --blocks 3,5,10."
        )
    original = _read(Path(checkpoint))
    _check_names(checkpoint, original)
    state = convert_state_dict(original)
    absent = [name for name in (*_TELL_THE_SHAPE, f"{_first_layer(state)}.output_norm") if name not in state]
    if absent:
        raise _incomplete(checkpoint, absent, [])
    config = _mhla_config(state, blocks)
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**_transformer_config(state))
    apply_mhla(transformer, config)
    missing, unexpected = transformer.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise _incomplete(checkpoint, missing, unexpected)
    return save_mhla(transformer, folder, weights="all", base_model=base_model)


def convert_state_dict(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a state dict of the paper's Wan code to that of a patched diffusers transformer."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    renamed = {}
    for name, tensor in convert_wan_transformer_to_diffusers(dict(state)).items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor.flatten(1) if name.endswith(".mhla.mixing") else tensor
    return renamed


def _incomplete(checkpoint: str | Path, missing: Sequence[str], unexpected: Sequence[str]) -> ValueError:
    lists = [
        ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "") for names in (missing, unexpected)
    ]
    return ValueError(
        f"{checkpoint} does not give a whole Wan transformer; missing: {lists[0] or 'none'}, unexpected: "
        f"{lists[1] or 'none'} (in diffusers' names). Of a checkpoint in several files give the .index.json; weights "
        "that were trained alone have to be put into the whole checkpoint first."
    )


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is no safetensors file; pickle files are never loaded, convert it to safetensors first."
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    content = read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index} has no weight_map from names to files, as the index of a checkpoint has.")
    state: dict[str, torch.Tensor] = {}
    for file in sorted(set(files.values())):
        state |= _read(index.parent / file)
    return state


def _check_names(checkpoint: str | Path, state: dict[str, torch.Tensor]) -> None:
    mixing = [name for name in state if name.endswith(_MIXING)]
    if not any(name.removeprefix("model.diffusion_model.").startswith("blocks.") for name in mixing):
        raise ValueError(
            f"{checkpoint} is no checkpoint of the paper's Wan code: it has no name like blocks.0{_MIXING}, the mixing "
            f"matrix of an MHLA layer; its first name is {min(state, default='none')!r}. What this package has saved "
            "or trained needs no conversion: load_mhla(pipe, folder)."
        )


def _mhla_layers(state: dict[str, torch.Tensor]) -> list[int]:
    return sorted(int(name.split(".")[1]) for name in state if name.endswith(".mhla.mixing"))


def _first_layer(state: dict[str, torch.Tensor]) -> str:
    return f"blocks.{_mhla_layers(state)[0]}.attn1.mhla"


def _mhla_config(state: dict[str, torch.Tensor], blocks: tuple[int, ...] | None) -> MHLAConfig:
    layers = _mhla_layers(state)
    prefix = f"{_first_layer(state)}."
    count = len(state[prefix + "mixing"])
    blocks = blocks or _KNOWN_BLOCKS.get(count)
    if blocks is None or math.prod(blocks) != count:
        raise ValueError(
            f"The checkpoint has M={count} blocks, blocks={blocks} does not fit; "
            f"give the block counts (frames, height, width) whose product is {count}."
        )
    convolution = state.get(prefix + "convolution.weight")
    return MHLAConfig(
        blocks=blocks,
        layers=layers,
        normalize=False,
        output_norm=True,
        output_gate=prefix + "gate.weight" in state,
        convolution=convolution.shape[-1] if convolution is not None else None,
        mixing_clip=False,
    )


def _transformer_config(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    norm = state[f"{_first_layer(state)}.output_norm"]
    patches = state["patch_embedding.weight"]
    inner_dim, in_channels, *patch_size = patches.shape
    config = {
        "patch_size": tuple(patch_size),
        "num_attention_heads": inner_dim // len(norm),
        "attention_head_dim": len(norm),
        "in_channels": in_channels,
        "out_channels": state["proj_out.weight"].shape[0] // math.prod(patch_size),
        "text_dim": state["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        "freq_dim": state["condition_embedder.time_embedder.linear_1.weight"].shape[1],
        "ffn_dim": state["blocks.0.ffn.net.2.weight"].shape[1],
        "num_layers": 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
        "cross_attn_norm": "blocks.0.norm2.weight" in state,
    }
    image = state.get("condition_embedder.image_embedder.norm1.weight")
    if image is not None:
        config |= {"image_dim": len(image), "added_kv_proj_dim": inner_dim}
    positions = state.get("condition_embedder.image_embedder.pos_embed")
    if positions is not None:
        config["pos_embed_seq_len"] = positions.shape[1]
    return config
