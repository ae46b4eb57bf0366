"""What is particular to Flux.2: attention that runs the feed-forward, and ids of four."""

import torch
from diffusers import Flux2Pipeline

import mhla_diffusers as mhla
from mhla_diffusers.benchmark.counts import ATTENTION, count_parts
from mhla_diffusers.families import Clip, get_family
from mhla_diffusers.families.grids import keep_with
from mhla_diffusers.training.roles import add_lora

from ..models import relative_change
from ..refusals import refused
from .cases import ROUNDING, all_listed, case_of, output, plain

flux2 = case_of("flux2")

FAMILY = get_family("flux2")
SETTINGS = plain("flux2")
CLIP = Clip(1, 1.0, ((32, 32),))
GRID = (7, 5)
LATENTS = torch.zeros(2, 16, *GRID)


def test_ids_tell_the_grid():
    assert FAMILY.grid(None, {"img_ids": Flux2Pipeline._prepare_latent_ids(LATENTS)}) == GRID


def test_reference_pictures_are_refused():
    own = Flux2Pipeline._prepare_latent_ids(LATENTS)
    for sizes in ([(7, 5)], [(2, 2), (1, 3)]):
        others = Flux2Pipeline._prepare_image_ids([torch.zeros(1, 16, *size) for size in sizes])
        with refused("Flux.2", "remove_mhla(pipe)"):
            FAMILY.grid(None, {"img_ids": torch.cat([own, others.expand(2, -1, -1)], dim=1)})


def test_cached_reference_pictures_are_refused():
    model = mhla.apply_mhla(flux2.transformer(), **SETTINGS)
    with refused("kv_cache_mode"):
        output(model, {**flux2.inputs(), "kv_cache_mode": "extract"})


def test_the_layer_of_attention_and_feed_forward_runs_once():
    model, calls = mhla.apply_mhla(flux2.transformer(), **SETTINGS), []
    attentions = [block.attn for block in model.single_transformer_blocks]
    for attn in attentions:
        attn.to_qkv_mlp_proj.register_forward_hook(lambda *_: calls.append(1))
    output(model, flux2.inputs())
    assert len(calls) == len(attentions)


def test_lora_adapts_both_kinds_of_blocks():
    model = mhla.apply_mhla(flux2.transformer(), **all_listed("flux2"))
    expected = output(model, flux2.inputs())
    add_lora(model, 2, seed=0)
    names = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert {f"single_transformer_blocks.1.attn.{part}" for part in ("to_qkv_mlp_proj", "to_out")} <= names
    assert {f"transformer_blocks.1.attn.{part}" for part in ("to_q", "to_out.0", "add_k_proj", "to_add_out")} <= names
    assert relative_change(output(model, flux2.inputs()), expected) < ROUNDING


def test_single_stream_layers_are_counted_once():
    """Their projections hold the feed-forward as well; what attention does beside them is softmax over all pairs."""
    with torch.device("meta"):
        model = flux2.of_family.transformer_class("Flux2Transformer2DModel")(**flux2.transformer().config)
    arguments = {name: x.to("meta") for name, x in flux2.inputs(batch=1).items()}
    keep_with(arguments["img_ids"], (8, 8))
    costs = count_parts(model, arguments)
    heads, tokens, layers = 2 * 16, 64 + 6, 4
    assert costs[ATTENTION] == layers * 4 * tokens**2 * heads
