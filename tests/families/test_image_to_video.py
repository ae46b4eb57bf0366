"""Wan and its relatives that are shown a picture: training data has what their pipelines make of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image

from mhla_diffusers import suggest_blocks
from mhla_diffusers.families import FlowMatching, get_family
from mhla_diffusers.training.latents.data import drop_prompts

from ..models import wan_i2v
from ..pipelines import quiet
from .cases import case_of, embeddings, wan_components

_FRAMES, _HEIGHT, _WIDTH = 13, 64, 96


def _wan_pipeline() -> WanImageToVideoPipeline:
    return quiet(WanImageToVideoPipeline(transformer=wan_i2v(), **wan_components(5.0, 8)))


PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan": (_wan_pipeline, {**embeddings(512), "num_frames": _FRAMES}),
    "chronoedit": (case_of("chronoedit").pipeline, case_of("chronoedit").call),
    "skyreels_v2": (case_of("skyreels_v2_image").pipeline, case_of("skyreels_v2_image").call),
}

each_pipeline = pytest.mark.parametrize("name", PIPELINES)


def _video() -> torch.Tensor:
    """uint8 (3, F, H, W)."""
    generator = torch.Generator().manual_seed(6)
    return torch.randint(0, 256, (3, _FRAMES, _HEIGHT, _WIDTH), dtype=torch.uint8, generator=generator)


def _first_forward(pipe: Any, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the pipeline hands to its transformer first."""
    calls: list[dict[str, torch.Tensor]] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    pipe(**{**call, "output_type": "latent"}, generator=torch.Generator().manual_seed(3))
    hook.remove()
    return calls[0]


@each_pipeline
@torch.no_grad()
def test_encoded_clips_have_what_the_pipeline_makes_of_their_first_frame(name: str) -> None:
    make, call = PIPELINES[name]
    pipe, video = make(), _video()
    first = Image.fromarray(video[:, 0].movedim(0, -1).numpy())
    size = {"height": _HEIGHT, "width": _WIDTH, "num_inference_steps": 2}
    given = _first_forward(pipe, {**call, **size, "image": first})
    family, pixels = get_family(pipe.transformer), (video.float() / 127.5 - 1)[None]
    latents = family.encode_pixels(pipe, pixels)
    assert latents.shape == given["hidden_states"].shape == (1, 36, 4, 8, 12)
    # all but the noise; the picture is normalised in float32 here and there
    torch.testing.assert_close(latents[:, 16:], given["hidden_states"][:, 16:], rtol=1e-5, atol=1e-5)
    (picture,) = family.encode_picture(pipe, pixels).values()
    torch.testing.assert_close(picture, given["encoder_hidden_states_image"][0], rtol=1e-5, atol=1e-5)
    assert family.conditioning_shapes(pipe.transformer.config).keys() == {
        "encoder_hidden_states",
        "encoder_hidden_states_image",
    }


@each_pipeline
@torch.no_grad()
def test_encoded_clips_are_what_the_pipeline_decodes(name: str) -> None:
    """The noised channels alone: where they are decoded, the video comes back as the autoencoder makes it."""
    pipe = PIPELINES[name][0]()
    pixels = (_video().float() / 127.5 - 1)[None]
    latents = get_family(pipe.transformer).encode_pixels(pipe, pixels)[:, :16]
    config = pipe.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    own = pipe.vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(latents * std + mean, own, rtol=1e-4, atol=1e-5)


def test_a_transformer_of_other_channels_is_refused() -> None:
    pipe = _wan_pipeline()
    pipe.transformer.register_to_config(in_channels=52)
    with pytest.raises(ValueError, match="takes 52 channels, not the 16 of latents or the 36 with a first frame"):
        get_family(pipe.transformer).encode_pixels(pipe, torch.zeros(1, 3, 5, 16, 16))


def test_channels_of_a_picture_are_neither_noised_nor_predicted() -> None:
    process = FlowMatching(3.0, channels=2)
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 3, 5, 4, 4, generator=generator).unbind()
    batch = process.make_batch(latents, noise, torch.tensor([0.2, 0.5, 0.9]), {})
    assert torch.equal(batch.hidden_states[:, 2:], latents[:, 2:])
    alone = FlowMatching(3.0).make_batch(latents[:, :2], noise[:, :2], torch.tensor([0.2, 0.5, 0.9]), {})
    assert torch.equal(batch.hidden_states[:, :2], alone.hidden_states)
    prediction = torch.randn(3, 2, 4, 4, generator=generator)
    assert torch.equal(process.loss(prediction, batch), FlowMatching(3.0).loss(prediction, alone))


def test_dropping_the_prompt_leaves_the_picture() -> None:
    conditioning = {"encoder_hidden_states": torch.ones(2, 3), "encoder_hidden_states_image": torch.ones(2, 4)}
    found = drop_prompts(conditioning, {"encoder_hidden_states": torch.zeros(3)}, torch.tensor([True, False]))
    assert found["encoder_hidden_states"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert torch.equal(found["encoder_hidden_states_image"], torch.ones(2, 4))


@each_pipeline
def test_prompts_alone_are_refused(name: str) -> None:
    pipe = PIPELINES[name][0]()
    with pytest.raises(ValueError, match=f"{type(pipe).__name__} must be given image beside prompts.*mhla encode"):
        get_family(pipe.transformer).call(pipe, ["a cat"], [torch.Generator().manual_seed(0)])


@each_pipeline
@torch.no_grad()
def test_prompts_are_encoded_as_the_pipeline_encodes_them(name: str) -> None:
    """Longer ones than 512 tokens are cut as there."""
    pytest.importorskip("ftfy")
    make, call = PIPELINES[name]
    pipe, prompt = make(), "a cat surfing on the red wave " * 100
    texts = {key: value for key, value in call.items() if not key.endswith("prompt_embeds")}
    picture = Image.new("RGB", (_WIDTH, _HEIGHT), "red")
    settings = {"height": _HEIGHT, "width": _WIDTH, "num_inference_steps": 2, "image": picture}
    given = _first_forward(pipe, {**texts, **settings, "prompt": prompt})
    (found,) = get_family(pipe.transformer).encode_prompt(pipe, prompt).values()
    assert found.shape == (512, 32)
    assert torch.equal(found, given["encoder_hidden_states"][0])


def test_blocks_are_suggested_for_two_frames_and_for_more() -> None:
    """ChronoEdit's defaults are clamped to its usual two frames, of which a block has one."""
    pipe = case_of("chronoedit").pipeline()
    assert suggest_blocks(pipe, 720, 1280) == (2, 3, 5)
    assert suggest_blocks(pipe, 720, 1280, 81) == (21, 3, 5)
