"""Convert a Wan checkpoint that was trained with the code of the MHLA paper into a patch for load_mhla.

python pipelines/convert_paper_checkpoint.py paper.safetensors paper-patch --blocks 3,5,10

Such checkpoints keep Wan's original names and add to every MHLA layer ``self_attn.block_attn.conv.weight`` (the mixing
matrix as a 1 x 1 convolution, dimension 0 the query block), ``self_attn.g_norm.weight`` (output norm) and, in some,
``self_attn.g`` (gate) and ``self_attn.lepe`` (depth-wise convolution of the values). Their attention has no normaliser,
and their mixing matrices are signed, so they are never clipped. All weights are saved, since such training changes all.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import SafetensorError
from safetensors.torch import load_file

from mhla_diffusers import MHLAConfig, apply_mhla, save_mhla
from mhla_diffusers.files import read_json

BLOCKS = {105: (7, 3, 5), 150: (3, 5, 10)}
"""Block counts of the paper (Sec. 5.3) and of its code, by M."""
RENAMED = {
    ".block_attn.conv.weight": ".mhla.mixing",
    ".g_norm.weight": ".mhla.output_norm",
    ".g.": ".mhla.gate.",
    ".lepe.": ".mhla.convolution.",
}


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file, or the several that an ``.index.json`` lists."""
    if path.name.endswith(".index.json"):
        content = read_json(path)
        files = sorted(set(content["weight_map"].values()))
        return {name: x for file in files for name, x in read(path.parent / file).items()}
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} is no safetensors file; pickle files are never loaded, convert it first.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error


def convert(checkpoint: Path, folder: Path, blocks: tuple[int, ...] | None, base_model: str) -> None:
    """Convert one checkpoint; the sizes of the transformer are read off its tensors.

    Args:
        checkpoint: safetensors file, or the ``.index.json`` of several.
        folder: where to write the patch.
        blocks: block counts (frames, height, width); None for those that the paper has with as many blocks.
        base_model: Hub id to record.

    Raises:
        ValueError: no such checkpoint, or block counts that do not fit it.
    """
    original = read(checkpoint)
    if not any(name.endswith(".self_attn.block_attn.conv.weight") for name in original):
        raise ValueError(
            f"{checkpoint} is no checkpoint of the paper's Wan code: it has no blocks.0.self_attn.block_attn.conv."
            f"weight, the mixing matrix of an MHLA layer; its first name is {min(original, default='none')!r}. What "
            "save_mhla wrote needs no conversion: load_mhla(pipe, folder)."
        )
    state = {}
    for name, tensor in convert_wan_transformer_to_diffusers(dict(original)).items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = tensor.flatten(1) if name.endswith(".mhla.mixing") else tensor
    layers = sorted(int(name.split(".")[1]) for name in state if name.endswith(".mhla.mixing"))
    layer = f"blocks.{layers[0]}.attn1.mhla."
    count = len(state[layer + "mixing"])
    blocks = blocks or BLOCKS.get(count)
    if blocks is None or len(blocks) != 3 or math.prod(blocks) != count:
        raise ValueError(
            f"The checkpoint has M={count} blocks, which blocks={blocks} does not fit; give the three block counts "
            f"(frames, height, width) whose product is {count}, such as --blocks 3,5,10."
        )
    try:
        convolution = state.get(layer + "convolution.weight")
        config = MHLAConfig(
            blocks=blocks,
            layers=layers,
            normalize=False,
            output_norm=True,
            output_gate=layer + "gate.weight" in state,
            convolution=None if convolution is None else convolution.shape[-1],
            mixing_clip=False,
        )
        head_dim = len(state[layer + "output_norm"])
        inner, channels, *patch = state["patch_embedding.weight"].shape
        with torch.device("meta"):
            transformer = WanTransformer3DModel(
                patch_size=tuple(patch),
                num_attention_heads=inner // head_dim,
                attention_head_dim=head_dim,
                in_channels=channels,
                out_channels=state["proj_out.weight"].shape[0] // math.prod(patch),
                text_dim=state["condition_embedder.text_embedder.linear_1.weight"].shape[1],
                freq_dim=state["condition_embedder.time_embedder.linear_1.weight"].shape[1],
                ffn_dim=state["blocks.0.ffn.net.2.weight"].shape[1],
                num_layers=1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
                cross_attn_norm="blocks.0.norm2.weight" in state,
            )
        apply_mhla(transformer, config)
        transformer.load_state_dict(state, assign=True)
    except (KeyError, RuntimeError) as error:  # a tensor that is missing, or one that is left over
        raise ValueError(
            f"{checkpoint} does not give a whole Wan transformer: {error} Of a checkpoint in several files give the "
            ".index.json; weights that were trained alone have to be put into the whole checkpoint first."
        ) from error
    save_mhla(transformer, folder, weights="all", base_model=base_model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="safetensors file, or the .index.json of several")
    parser.add_argument("folder", type=Path, help="where to write the patch")
    parser.add_argument("--blocks", help="block counts (frames, height, width), for example 3,5,10")
    parser.add_argument("--base-model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", help="Hub id to record")
    given = parser.parse_args()
    try:
        counts = tuple(int(part) for part in given.blocks.split(",")) if given.blocks else None
        convert(given.checkpoint, given.folder, counts, given.base_model)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
