"""What is particular to Flux.2: attention that runs the feed-forward, ids of four, latents normed by token, Klein."""

import pytest
import torch
from diffusers import Flux2Pipeline
from torch.nn import functional

import mhla_diffusers as mhla
from mhla_diffusers.benchmark.counts import ATTENTION, count_parts
from mhla_diffusers.families import Clip
from mhla_diffusers.families.flux2 import FLUX2
from mhla_diffusers.families.values import keep_with
from mhla_diffusers.training.roles import add_lora

from ..models import relative_change
from ..pipelines import quiet
from ..refusals import refused
from .cases import ROUNDING, all_listed, case_of, flux2_pipeline, output, plain
from .recording import forwards

flux2 = case_of("flux2")

FAMILY = FLUX2
SETTINGS = plain("flux2")
CLIP = Clip(1, 1.0, ((32, 32),))
GRID = (7, 5)
LATENTS = torch.zeros(2, 16, *GRID)


def klein():
    """Distilled, without embedded guidance."""
    return quiet(flux2_pipeline(flux2.transformer(guidance_embeds=False), "Flux2KleinPipeline", is_distilled=True))


def test_ids_are_the_pipelines_and_tell_the_grid():
    ids, text_ids = FAMILY.forward.ids(LATENTS, GRID, 6)
    expected = Flux2Pipeline._prepare_latent_ids(LATENTS)
    assert ids.dtype == expected.dtype and torch.equal(ids, expected)
    assert torch.equal(text_ids, Flux2Pipeline._prepare_text_ids(torch.zeros(2, 6, 1)))
    assert FAMILY.forward.grid_of_arguments(None, {"img_ids": expected}) == GRID


def test_reference_pictures_are_refused():
    own = Flux2Pipeline._prepare_latent_ids(LATENTS)
    for sizes in ([(7, 5)], [(2, 2), (1, 3)]):
        others = Flux2Pipeline._prepare_image_ids([torch.zeros(1, 16, *size) for size in sizes])
        with refused("Flux.2", "remove_mhla(pipe)"):
            FAMILY.forward.grid_of_arguments(None, {"img_ids": torch.cat([own, others.expand(2, -1, -1)], dim=1)})


def test_cached_reference_pictures_are_refused():
    model = mhla.apply_mhla(flux2.transformer(), **SETTINGS)
    with refused("kv_cache_mode='extract'"):
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


@torch.no_grad()
def test_pixels_become_latents_as_reference_pictures_do():
    pipe = flux2.pipeline()
    pixels = torch.rand(2, 3, 1, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = functional.pixel_unshuffle(FAMILY.training.encode_pixels(pipe, pixels), 2)
    torch.testing.assert_close(found, pipe._encode_vae_image(pixels[:, :, 0], None), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", [flux2.pipeline, klein], ids=["dev", "klein"])
def test_generated_latents_are_of_the_scale_of_encoded_ones(make):
    """What the autoencoder decodes, encoded as its latents are."""
    pipe, decoded = make(), []
    own = pipe.vae.decode
    pipe.vae.decode = lambda z, **given: decoded.append(z) or own(z, **given)
    settings = {"num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "pt"}
    FAMILY.training.call(
        pipe,
        ["a red ball"],
        [torch.Generator().manual_seed(3)],
        **FAMILY.training.clip_arguments(pipe, CLIP),
        **settings,
    )
    found = FAMILY.training.generate_latents(pipe, "a red ball", CLIP, 2, 4.0, torch.Generator().manual_seed(3))
    bn, packed = pipe.vae.bn, functional.pixel_unshuffle(decoded[0], 2)
    expected = (packed - bn.running_mean.view(1, -1, 1, 1)) / (bn.running_var.view(1, -1, 1, 1) + 1e-4).sqrt()
    torch.testing.assert_close(found, functional.pixel_shuffle(expected, 2)[0], rtol=1e-4, atol=1e-5)
    assert found.shape == FAMILY.forward.latent_shape(pipe.transformer.config, pipe.vae.config, CLIP)


def test_prompts_of_klein_are_encoded_as_its_pipeline_hands_them_over():
    pipe = klein()
    given = forwards(pipe, **flux2.call)[0]["encoder_hidden_states"][0]
    found = FAMILY.training.encode_prompt(pipe, flux2.call["prompt"], {"max_sequence_length": 8})
    torch.testing.assert_close(found["encoder_hidden_states"], given)
    text = {name: x[None] for name, x in found.items()}
    assert "guidance" not in FAMILY.forward.arguments(
        pipe.transformer, torch.zeros(1, 4, 16, 16), given.new_tensor([0.5]), text
    )


def test_single_stream_layers_are_counted_once():
    """Their projections hold the feed-forward as well; what attention does beside them is softmax over all pairs."""
    with torch.device("meta"):
        model = flux2.of_family.transformer_class("Flux2Transformer2DModel")(**flux2.transformer().config)
    arguments = {name: x.to("meta") for name, x in flux2.inputs(batch=1).items()}
    keep_with(arguments["img_ids"], (8, 8))
    costs = count_parts(model, arguments)
    heads, tokens, layers = 2 * 16, 64 + 6, 4
    assert costs[ATTENTION] == layers * 4 * tokens**2 * heads
