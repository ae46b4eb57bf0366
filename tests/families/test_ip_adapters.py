"""IP-Adapters: their processors have weights and let attentions look at a picture, which a patch must not drop."""

import logging
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection

import mhla_diffusers as mhla

from ..models import assert_changed, relative_change, seeded
from ..refusals import refused
from .cases import ROUNDING, all_listed, case_of, plain

flux, sd3 = case_of("flux"), case_of("sd3")

DOUBLE, SINGLE = [0, 1], [2, 3]
"""Layers of the tiny Flux, with an IP-Adapter and without."""
_FEATURES = 8
"""Channels of the embedding of a picture."""


def random_tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name.replace("__", "."): torch.randn(*shape, generator=generator) / 4 for name, shape in shapes.items()}


def load_into_flux(pipe: Any) -> None:
    """An adapter with four tokens for a picture."""
    text = pipe.transformer.config.joint_attention_dim
    projection = random_tensors(
        proj__weight=(4 * text, _FEATURES), proj__bias=(4 * text,), norm__weight=(text,), norm__bias=(text,)
    )
    layers: dict[str, torch.Tensor] = {}
    for index in DOUBLE:
        shapes = {"weight": (pipe.transformer.inner_dim, text), "bias": (pipe.transformer.inner_dim,)}
        shapes = {f"{side}__{kind}": shape for side in ("to_k_ip", "to_v_ip") for kind, shape in shapes.items()}
        layers |= {f"{index}.{name}": tensor for name, tensor in random_tensors(**shapes).items()}
    pipe.load_ip_adapter(
        {"image_proj": projection, "ip_adapter": layers},
        weight_name="",
        image_encoder_pretrained_model_name_or_path=None,
    )


def load_into_sd3(pipe: Any) -> None:
    """An adapter of every layer."""
    width = pipe.transformer.inner_dim
    projection = seeded(
        IPAdapterTimeImageProjection,
        embed_dim=_FEATURES,
        output_dim=width,
        hidden_dim=64,
        heads=1,
        num_queries=3,
        timestep_in_dim=320,
    ).state_dict()
    timestep = projection["time_embedding.linear_2.weight"].shape[0]
    layers: dict[str, torch.Tensor] = {}
    for index in range(len(pipe.transformer.attn_processors)):
        processor = seeded(
            SD3IPAdapterJointAttnProcessor2_0,
            hidden_size=width,
            ip_hidden_states_dim=width,
            head_dim=pipe.transformer.config.attention_head_dim,
            timesteps_emb_dim=timestep,
        )
        layers |= {f"{index}.{name}": tensor for name, tensor in processor.state_dict().items()}
    pipe.load_ip_adapter({"image_proj": projection, "ip_adapter": layers}, weight_name="", image_encoder_folder=None)


LOADERS = {"flux": load_into_flux, "sd3": load_into_sd3}
PIPELINES = {"flux": flux.pipeline, "sd3": sd3.pipeline}


def image(pipe: Any, name: str, looks: bool = True) -> torch.Tensor:
    """What the pipeline makes, looking at a picture or, in a pipeline without an adapter, not."""
    picture = torch.randn(1, 1, _FEATURES, generator=torch.Generator().manual_seed(1))
    none = torch.zeros_like(picture)
    seen: dict[str, Any] = {
        "flux": {"ip_adapter_image_embeds": [picture], "negative_ip_adapter_image_embeds": [none]},
        "sd3": {"ip_adapter_image_embeds": torch.cat([none, picture])},
    }
    call = {"flux": flux.call, "sd3": sd3.call}[name] | (seen[name] if looks else {})
    return torch.as_tensor(pipe(**call, generator=torch.Generator().manual_seed(3)).images)


def test_layers_with_an_adapter_are_refused_by_name_with_the_way_out():
    pipe = PIPELINES["flux"]()
    load_into_flux(pipe)
    expected = image(pipe, "flux")
    first_layers = "transformer_blocks.0.attn, transformer_blocks.1.attn...FluxIPAdapterAttnProcessor"
    with refused(first_layers, "layers=[2, 3]", "unload_ip_adapter()"):
        mhla.apply_mhla(pipe, **plain("flux"))
    assert torch.equal(image(pipe, "flux"), expected)
    mhla.apply_mhla(pipe, **plain("flux"), layers=SINGLE)
    with refused(first_layers):
        mhla.change_mhla(pipe, layers="all")
    assert_changed(image(pipe, "flux"), expected)
    mhla.remove_mhla(pipe)
    assert torch.equal(image(pipe, "flux"), expected)


def test_where_every_layer_has_an_adapter_it_must_go():
    pipe = PIPELINES["sd3"]()
    load_into_sd3(pipe)
    expected = image(pipe, "sd3")
    with refused("SD3IPAdapterJointAttnProcessor2_0"):
        mhla.apply_mhla(pipe, **plain("sd3"))
    assert torch.equal(image(pipe, "sd3"), expected)
    pipe.unload_ip_adapter()
    mhla.apply_mhla(pipe, **plain("sd3"))
    assert_changed(image(pipe, "sd3", looks=False), expected)


def test_an_adapter_goes_on_beside_the_layers_that_are_patched():
    pipe = PIPELINES["flux"]()
    without = image(pipe, "flux", looks=False)
    load_into_flux(pipe)
    expected = image(pipe, "flux")
    assert_changed(expected, without)
    mhla.apply_mhla(pipe, **all_listed("flux"), layers=SINGLE)
    # two steps, and an autoencoder after them
    assert relative_change(image(pipe, "flux"), expected) < 5 * ROUNDING


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_loading_an_adapter_onto_a_patched_pipeline_is_warned_of(name, caplog):
    pipe = PIPELINES[name]()
    mhla.apply_mhla(pipe, **plain(name), backend="eager")
    count, first = len(mhla.mhla_layers(pipe)), next(iter(mhla.mhla_layers(pipe))).removeprefix("transformer.")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mhla_diffusers"):
        LOADERS[name](pipe)
        image(pipe, name)
    held = len(DOUBLE) if name == "flux" else count
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("mhla_diffusers")]
    assert len(messages) == 1
    assert messages[0].startswith(f"{held} patched layers do not run MHLA, for example {first.removesuffix('.mhla')}")
    running = [layer.runs_mhla for layer in mhla.describe(pipe)]
    assert running == [False] * held + [True] * (count - held)
    # what Flux's loader put on layers without an adapter is again what they had
    processors = {
        attn.processor
        for attn in pipe.transformer.modules()
        if isinstance(getattr(attn, "processor", None), mhla.MHLAProcessor)
    }
    assert all(processor.backend == "eager" and not processor.is_blank for processor in processors)


def test_an_adapter_that_came_after_the_patch_stays_without_it():
    expected = PIPELINES["flux"]()
    load_into_flux(expected)
    pipe = mhla.apply_mhla(PIPELINES["flux"](), **plain("flux"))
    load_into_flux(pipe)
    with refused("layers=[2, 3]"):
        mhla.change_mhla(pipe, blocks=(2, 2))
    mhla.change_mhla(pipe, layers=SINGLE)
    assert_changed(image(pipe, "flux"), image(expected, "flux"))
    mhla.remove_mhla(pipe)
    assert torch.equal(image(pipe, "flux"), image(expected, "flux"))


def test_the_patch_outlives_an_adapter_that_is_unloaded():
    pipe = mhla.apply_mhla(PIPELINES["flux"](), **plain("flux"), layers=SINGLE)
    expected = image(pipe, "flux", looks=False)
    load_into_flux(pipe)
    assert_changed(image(pipe, "flux"), expected)
    pipe.unload_ip_adapter()
    assert torch.equal(image(pipe, "flux", looks=False), expected)


def test_a_blank_processor_of_nobody_says_what_it_lacks():
    model = flux.transformer()
    model.set_attn_processor(mhla.MHLAProcessor())
    with refused("MHLAProcessor(blocks=", "adapter"), torch.no_grad():
        model(**flux.inputs())
