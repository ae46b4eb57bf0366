"""The script that converts checkpoints of the paper's own Wan code."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch.nn.functional import conv3d, rms_norm

from mhla_diffusers import apply_mhla, load_mhla, mhla_layers, save_mhla
from mhla_diffusers.attention import MHLACall, reference_attention

from . import models
from .refusals import refused

SCRIPT = Path(__file__).parents[1] / "pipelines" / "convert_paper_checkpoint.py"
HEADS, HEAD_DIM, BLOCKS = 2, 12, (2, 2, 3)
DIM, M = HEADS * HEAD_DIM, 12

TO_ORIGINAL = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "proj_out": "head.head",
}


def original_name(name: str) -> str:
    """diffusers' name of a Wan tensor as Wan's own code has it."""
    for ours, theirs in TO_ORIGINAL.items():
        name = name.replace(ours, theirs)
    if name.startswith("blocks."):
        name = name.replace("scale_shift_table", "modulation").replace(".norm2.", ".norm3.")
    return name.replace("scale_shift_table", "head.modulation") if name == "scale_shift_table" else name


def paper_checkpoint(transformer: WanTransformer3DModel, layers: list[int], gate: bool, lepe: bool) -> dict:
    """A state dict as the paper's Wan code writes it, with signed mixing matrices."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return 0.3 * torch.randn(*shape, generator=generator)

    state = {original_name(name): tensor.clone() for name, tensor in transformer.state_dict().items()}
    for index in layers:
        prefix = f"blocks.{index}.self_attn."
        state[prefix + "block_attn.conv.weight"] = draw(M, M, 1, 1)
        state[prefix + "g_norm.weight"] = 1 + draw(HEAD_DIM)
        if gate:
            state[prefix + "g.weight"], state[prefix + "g.bias"] = draw(DIM, DIM), draw(DIM)
        if lepe:
            state[prefix + "lepe.weight"], state[prefix + "lepe.bias"] = draw(DIM, 1, 3, 3, 3), draw(DIM)
    return state


def paper_forward(state: dict, index: int, x: torch.Tensor, grid: tuple[int, int, int], rotary) -> torch.Tensor:
    """Self-attention of one MHLA layer as the paper's Wan code computes it, restated from its description.

    RMSNorm over all channels of query and key, attention without a denominator, RMSNorm per head, times SiLU of the
    gate, plus LePE of the values, output projection.
    """
    prefix = f"blocks.{index}.self_attn."
    part = {name.removeprefix(prefix): x.double() for name, x in state.items() if name.startswith(prefix)}

    def linear(name, y):
        return y @ part[f"{name}.weight"].T + part[f"{name}.bias"]

    x, weights = (
        x.double(),
        {"mixing": part["block_attn.conv.weight"][:, :, 0, 0], "output_norm": part["g_norm.weight"]},
    )
    query, key = (rms_norm(linear(name, x), (DIM,), part[f"norm_{name}.weight"], 1e-6) for name in ("q", "k"))
    tensors = {"query": query, "key": key, "value": linear("v", x)}
    tensors |= {"output_gate": linear("g", x)} if "g.weight" in part else {}
    heads = {name: y.unflatten(-1, (HEADS, HEAD_DIM)) for name, y in tensors.items()}
    call = MHLACall(**heads, **weights, grid=grid, blocks=BLOCKS, rotary=rotary, normalize=False)
    output = reference_attention(call).flatten(2)
    if "lepe.weight" in part:
        volume = tensors["value"].mT.unflatten(-1, grid)
        lepe = conv3d(volume, part["lepe.weight"], part["lepe.bias"], padding=1, groups=DIM)
        output = output + lepe.flatten(2).mT
    return linear("o", output)


def convert(checkpoint, folder, blocks=BLOCKS):
    runpy.run_path(str(SCRIPT))["convert"](checkpoint, folder, blocks, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")


@pytest.mark.parametrize(("gate", "lepe"), [(False, False), (True, False), (True, True)])
def test_converted_layers_compute_what_the_paper_s_code_computes(tmp_path, gate, lepe):
    transformer = models.wan()
    state = paper_checkpoint(transformer, [1, 2], gate, lepe)
    save_file(state, tmp_path / "paper.safetensors")
    convert(tmp_path / "paper.safetensors", tmp_path / "patch")
    model = load_mhla(models.wan(), tmp_path / "patch")
    assert [name.split(".")[1] for name in mhla_layers(model)] == ["1", "2"]
    layer, mixing = mhla_layers(model)["blocks.1.attn1.mhla"], state["blocks.1.self_attn.block_attn.conv.weight"]
    layer.clip_mixing_()  # which leaves signed matrices as they are
    assert torch.equal(layer.mixing, mixing[:, :, 0, 0]) and (layer.mixing < 0).any()

    arguments = models.inputs("wan", batch=1)
    seen = {}
    for index in (1, 2):
        model.blocks[index].attn1.register_forward_hook(
            lambda _, args, output, index=index: seen.update({index: (args[0], args[3], output)})
        )
    models.output(model, arguments)
    for index, (x, rotary, output) in seen.items():
        expected = paper_forward(state, index, x.detach(), (4, 4, 6), rotary)
        torch.testing.assert_close(output, expected.to(output.dtype), rtol=1e-4, atol=1e-5)


def test_what_is_no_checkpoint_of_the_paper_or_lacks_a_part_is_refused(tmp_path):
    path, short, plain = (tmp_path / f"{name}.safetensors" for name in ("paper", "short", "plain"))
    save_file(paper_checkpoint(models.wan(), [1], False, False), path)
    save_file({"a": torch.ones(1)}, plain)
    short.write_bytes(b"short")
    saved = save_mhla(apply_mhla(models.wan()), tmp_path / "saved", weights="all")
    lacking = {"patch_embedding": "self_attn", r"blocks\.0\.attn2": "cross_attn", "attn1.*output_norm": "g_norm"}
    state = paper_checkpoint(models.wan(), [1], True, False)
    for part in lacking.values():
        kept = {name: x for name, x in state.items() if (part in name) == (part == "self_attn")}
        save_file(kept, tmp_path / f"{part}.safetensors")
    for file, blocks, value in (
        *((tmp_path / f"{part}.safetensors", BLOCKS, value) for value, part in lacking.items()),
        (path, None, "M=12.*blocks=None"),
        (path, (2, 2, 2), r"M=12.*blocks=\(2, 2, 2\)"),
        (path, (3, 4), r"M=12.*blocks=\(3, 4\)"),
        (plain, BLOCKS, "'a'"),
        (tmp_path / "paper.pth", BLOCKS, r"paper\.pth"),
        (short, BLOCKS, "short"),
        (next(saved.glob("*.safetensors")), BLOCKS, "load_mhla"),
    ):
        with pytest.raises(ValueError, match=value):
            convert(file, tmp_path / "patch", blocks)
    assert not (tmp_path / "patch").exists()


def test_a_checkpoint_in_several_files(tmp_path):
    state = paper_checkpoint(models.wan(), [1, 2], True, False)
    files = {name: f"paper-{index % 3}.safetensors" for index, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, tmp_path / file)
    index, part = tmp_path / "paper.safetensors.index.json", tmp_path / "paper-1.safetensors"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    convert(index, tmp_path / "patch")
    assert len(mhla_layers(load_mhla(models.wan(), tmp_path / "patch"))) == 2
    with refused(part.name, "index.json"):
        convert(part, tmp_path / "part")
    part.unlink()
    with refused(part.name):
        convert(index, tmp_path / "part")
