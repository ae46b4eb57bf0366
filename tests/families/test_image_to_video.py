"""Image-to-video: training data has what the pipelines make of the first frame."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import WanImageToVideoPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from mhla_diffusers import apply_mhla
from mhla_diffusers.families import FlowMatching, arguments_of, get_family, predict
from mhla_diffusers.training.data.batches import drop_prompts

from ..models import seeded, wan_i2v
from ..pipelines import quiet
from ..refusals import refused
from .cases import SPARSE, TEXT_TOKENS, case_of, first_forward, language_settings, text_tokenizer, wan_components

_FRAMES, _HEIGHT, _WIDTH = 13, 64, 96


def _wan_pipeline() -> Any:
    return quiet(WanImageToVideoPipeline(transformer=wan_i2v(), **wan_components(5.0, 8)))


_TEMPLATE = {
    "template": "red <image> blue {} a cat dog <|end_header_id|>",  # the pipeline leaves out the last four tokens
    "crop_start": 3,
    "image_emb_start": 1,
    "image_emb_end": 5,
    "image_emb_len": 4,
}


def _llava() -> dict[str, Any]:
    """Text encoder and tokenizer that see a picture as four tokens."""
    tokenizer = text_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<|end_header_id|>"]})
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**language_settings(layers=3, vocab_size=32)),
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.pad_token_id, side = 0, {"height": 8, "width": 8}
    return {
        "text_encoder": seeded(transformers.LlavaForConditionalGeneration, config=config),
        "tokenizer": tokenizer,
        "image_processor": transformers.CLIPImageProcessor(size=side, crop_size=side),
    }


def _of(kind: str, name: str, others: Callable[[], dict[str, Any]] = dict, **config: Any) -> Any:
    """An image-to-video pipeline with the parts of a case's pipeline, unless there are others."""
    parts = case_of(name).pipeline(**config).components | others()
    return quiet(getattr(diffusers, f"{kind}ImageToVideoPipeline")(**parts))


def _cogvideox_1_5() -> Any:
    pipe = _of("CogVideoX", "cogvideox_two_frames", in_channels=8, ofs_embed_dim=8)
    pipe.vae.register_to_config(invert_scale_latents=True)
    return pipe


_TOLD = {"prompt": "a red ball", "max_sequence_length": 8, "guidance_scale": 1.0}
_IN_PLACE = {"in_channels": 4, "image_condition_type": "token_replace", "guidance_embeds": False}
_BESIDE = {"in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False}
_PLAIN_TEMPLATE = {"template": "red blue {}", "crop_start": 2}
_HUNYUAN = {**_TOLD, "prompt_template": _TEMPLATE, "num_frames": _FRAMES}
_COG = {**_TOLD, "max_sequence_length": TEXT_TOKENS, "num_frames": _FRAMES}
# longer than the 512 tokens that it is cut to
_WAN = {"prompt": "a cat surfing on the red wave " * 100, "guidance_scale": 1.0, "num_frames": _FRAMES}
_SANA = {**_TOLD, "frames": _FRAMES, "complex_human_instruction": None, "use_resolution_binning": False}
# pipeline, call, and which of the transformer's latents are the picture's
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    "hunyuan_video, in place": (
        lambda: _of("HunyuanVideo", "hunyuan_video", _llava, **_IN_PLACE), _HUNYUAN, lambda x: x[:, :, :1]),
    "hunyuan_video, beside": (
        lambda: _of("HunyuanVideo", "hunyuan_video", _llava, **_BESIDE), _HUNYUAN, lambda x: x[:, 4:]),
    # whose text is encoded by itself
    "skyreels_v1": (
        lambda: _of("HunyuanSkyreels", "hunyuan_video", in_channels=8, guidance_embeds=True),
        {**_HUNYUAN, "prompt_template": _PLAIN_TEMPLATE}, lambda x: x[:, 4:]),
    "cogvideox": (lambda: _of("CogVideoX", "cogvideox", in_channels=8), _COG, lambda x: x[:, :, 4:]),
    "cogvideox1.5": (_cogvideox_1_5, _COG, lambda x: x[:, :, 4:]),
    "ltx": (lambda: _of("LTX", "ltx"), {**_TOLD, "num_frames": _FRAMES, "frame_rate": 25}, lambda x: x[:, : 4 * 6]),
    "sana_video": (case_of("sana_video_image").pipeline, _SANA, lambda x: x[:, :, :1]),
    "wan": (_wan_pipeline, _WAN, lambda x: x[:, 16:]),
    "skyreels_v2": (case_of("skyreels_v2_image").pipeline, _WAN, lambda x: x[:, 16:]),
}  # fmt: skip
_NOISED = {"hidden_states", "timestep", "sigma", "rope_interpolation_scale"}


def _encoded(name: str, pipe: Any, pixels: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    """A sample as ``mhla encode`` makes it, noised half way, and the arguments of the transformer's forward."""
    family, call = get_family(pipe.transformer), PIPELINES[name][1]
    settings = {**call, **family.training.picture_settings(pipe, pixels)}
    sample = {
        **family.training.encode_picture(pipe, pixels),
        **family.training.encode_prompt(pipe, call["prompt"], settings),
    }
    latents, process = family.training.encode_pixels(pipe, pixels), family.training.process(pipe.transformer, 3.0)
    conditioning = {key: value[None] for key, value in sample.items()}
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
    batch = process.make_batch(latents, noise, torch.tensor([0.5]), conditioning)
    return batch, arguments_of(pipe.transformer, batch)


@pytest.mark.parametrize("name", PIPELINES)
@torch.no_grad()
def test_a_sample_gives_the_transformer_what_the_pipeline_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pipelines draw a picture's latents from their distribution, of which files hold the mode."""
    if PIPELINES[name][1] is _WAN:
        pytest.importorskip("ftfy")
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    make, call, of_picture = PIPELINES[name]
    pipe, video = make(), _video()
    first = Image.fromarray(video[:, 0].movedim(0, -1).numpy())
    size = {"height": _HEIGHT, "width": _WIDTH, "num_inference_steps": 2}
    given = first_forward(pipe, **call, **size, image=first, output_type="latent")
    _, found = _encoded(name, pipe, (video.float() / 127.5 - 1)[None])
    texts = {key for key, x in given.items() if key.startswith("encoder_") and x is not None}
    assert texts <= found.keys() and torch.equal(found["encoder_hidden_states"], given["encoder_hidden_states"])
    for key in found.keys() - _NOISED:
        torch.testing.assert_close(
            found[key], given[key].to(found[key].dtype) if torch.is_tensor(given[key]) else given[key]
        )
    assert found["hidden_states"].shape == given["hidden_states"].shape
    expected = of_picture(given["hidden_states"])
    assert expected.abs().max() > 0
    torch.testing.assert_close(of_picture(found["hidden_states"]), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found["timestep"] == 0, given["timestep"].reshape(found["timestep"].shape) == 0)


# a first frame without noise, channels beside the noised ones, and packed tokens with a time each
@pytest.mark.parametrize("name", ["hunyuan_video, in place", "cogvideox1.5", "ltx"])
def test_image_to_video_is_trained_on_what_it_predicts(name: str) -> None:
    """The loss sees neither the picture's channels nor its frame, and has gradients."""
    pipe = PIPELINES[name][0]()
    with torch.no_grad():
        batch, _ = _encoded(name, pipe, (_video().float() / 127.5 - 1)[None])
    apply_mhla(pipe, **SPARSE)
    process = get_family(pipe.transformer).training.process(pipe.transformer, 3.0)
    prediction = predict(pipe.transformer, batch)
    loss = process.loss(prediction, batch)
    loss.mean().backward()
    assert loss.isfinite().all()
    for attn in get_family(pipe.transformer).self_attentions(pipe.transformer).values():
        assert attn.to_q.weight.grad.abs().sum() > 0
    if batch.time.ndim == 2:
        changed = torch.cat([prediction[:, :, :1] + 1, prediction[:, :, 1:]], dim=2)
        torch.testing.assert_close(process.loss(changed, batch), loss)


def _video() -> torch.Tensor:
    """uint8 (3, F, H, W)."""
    generator = torch.Generator().manual_seed(6)
    return torch.randint(0, 256, (3, _FRAMES, _HEIGHT, _WIDTH), dtype=torch.uint8, generator=generator)


def test_a_transformer_of_other_channels_is_refused() -> None:
    pipe = _wan_pipeline()
    pipe.transformer.register_to_config(in_channels=52)
    with refused(52, 16, 36):
        get_family(pipe.transformer).training.encode_pixels(pipe, torch.zeros(1, 3, 5, 16, 16))


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
