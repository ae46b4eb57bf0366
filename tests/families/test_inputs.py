"""What trained families hand to their transformers is what the pipelines hand to them, at the pipelines' sizes."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch.nn.functional import scaled_dot_product_attention

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family, imported
from mhla_diffusers.families.training import scaled_latents
from mhla_diffusers.generation.pipelines import PipelineChoice
from mhla_diffusers.tiny import load_tiny

from ..models import assert_changed, output, wan
from ..pipelines import wan_pipeline
from .cases import case_of, first_forward

NAMES = ("cogvideox", "cogvideox_two_frames", "flux", "hunyuan_video", "ltx", "pixart", "pixart_sigma", "qwenimage")
NAMES += ("sana_video", "sd3")
OTHERS = ("anyflow", "auraflow", "chroma", "cogview4", "flux2", "hunyuan_dit", "hunyuan_image", "hunyuan_video15")
OTHERS += ("chronoedit", "krea2", "latte", "longcat_image", "ltx2", "lumina2", "mochi", "skyreels_v2", "wan_animate")
OTHERS += ("z_image",)
"""Families that are not trained, whose pipelines are called all the same."""
OF_THE_REAL_AUTOENCODER = {"ltx": {"rope_interpolation_scale"}}
"""Arguments that tell the strides of the autoencoder, which are others in a tiny one."""
GUIDANCE = {"flux": 3.5, "hunyuan_video": 6.0}
"""Guidance of a call with one forward per step, where it is not 1: models that embed it take the pipeline's default."""
each_family = pytest.mark.parametrize("name", NAMES)


def clip_of(call: Mapping[str, Any]) -> Clip:
    """The clip that a call makes."""
    frames = next(
        (call[name] for name in ("num_frames", "frames", "video_length", "segment_frame_length") if name in call), 1
    )
    return Clip(frames=frames, fps=8.0, sizes=((call["height"], call["width"]),))


OTHER_SIZES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    # the tables of RoPE are scaled to the size of training, or cut out of it
    ("cogvideox", {}, {"height": 48, "width": 32}),
    ("cogvideox_two_frames", {}, {"height": 48, "width": 32}),
    # PixArt-α gets the size as conditioning at 1024 px only
    ("pixart", {"sample_size": 128}, {"width": 64}),
    ("pixart", {"sample_size": 128}, {"width": 192}),
    ("pixart", {"sample_size": 64}, {"width": 192}),
]
# whose text is filled up
AS_IN_THE_CALL = [(name, {}, {}) for name in NAMES if name != "qwenimage"]


@pytest.mark.parametrize(("name", "config", "size"), [*AS_IN_THE_CALL, *OTHER_SIZES], ids=str)
def test_forward_gets_what_the_pipeline_gives(name: str, config: dict[str, Any], size: dict[str, int]) -> None:
    case = case_of(name)
    family, pipe = case.of_family, case.pipeline(**config)
    prompts = [case.call["prompt"], "a cat"]
    call = {**case.call, "prompt": prompts, "guidance_scale": GUIDANCE.get(name, 1.0), **size}
    given = first_forward(pipe, **call)
    settings = {key: x for key, x in call.items() if key != "prompt"}
    samples = [family.training.encode_prompt(pipe, prompt, settings) for prompt in prompts]
    conditioning = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    shape = family.inputs.latent_shape(pipe.transformer.config, pipe.vae.config, clip_of(call))
    latents = family.training.prediction(pipe.transformer, given["hidden_states"], torch.empty(2, *shape))
    assert tuple(latents.shape[1:]) == shape
    found = family.inputs.arguments(pipe.transformer, latents, given["timestep"], conditioning)
    for key in found.keys() - OF_THE_REAL_AUTOENCODER.get(name, set()):
        expected = given[key].to(found[key].dtype) if "mask" in key else given[key]
        # a prompt by itself and among others: float32 sums in another order
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if key in conditioning else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[key], expected, **tolerance)
    usual = inspect.signature(type(pipe.transformer).forward).parameters
    left = {key: x for key, x in given.items() if key not in found}
    assert all(x is None or x == {} or x == usual[key].default for key, x in left.items()), left.keys()


@each_family
def test_conditioning_has_the_shapes_that_are_told(name: str) -> None:
    case = case_of(name)
    family, pipe = case.of_family, case.pipeline()
    if name == "sd3":  # as many tokens as the real tokenizers have
        pipe.tokenizer_max_length = pipe.tokenizer.model_max_length = pipe.tokenizer_2.model_max_length = 77
    found, shapes = family.training.encode_prompt(pipe, ""), family.inputs.conditioning_shapes(pipe.transformer.config)
    told, made = ({key: (x.shape, x.is_floating_point()) for key, x in one.items()} for one in (shapes, found))
    assert told == made
    assert name != "hunyuan_video" or found["encoder_attention_mask"].any()  # it divides by the number of tokens


@each_family
def test_latents_are_of_the_scale_of_the_pipeline(name: str) -> None:
    """What the pipeline has when it is done, and what its autoencoder then gets."""
    case = case_of(name)
    family, pipe, clip = case.of_family, case.pipeline(), clip_of(case.call)
    call = {**family.calling.clip_arguments(pipe, clip), **family.calling.guidance_arguments(3.0), "output_type": "pt"}
    prompt = [case.call["prompt"]]
    own, decoded = pipe.vae.decode, []
    pipe.vae.decode = lambda z, *others, **named: decoded.append(z) or own(z, *others, **named)
    family.calling.call(pipe, prompt, [torch.Generator().manual_seed(3)], num_inference_steps=2, **call)
    found = family.training.generate_latents(pipe, prompt[0], clip, 2, 3.0, torch.Generator().manual_seed(3))
    assert tuple(found.shape) == family.inputs.latent_shape(pipe.transformer.config, pipe.vae.config, clip)
    torch.testing.assert_close(found[None], scaled_as(found[None], pipe.vae, decoded), rtol=1e-4, atol=1e-5)


def scaled_as(found: torch.Tensor, vae: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """An autoencoder's latents, which may be those of single frames, in the scale and shape of a family's."""
    scaled = scaled_latents(vae, torch.cat(parts))
    scaled = scaled[None].movedim(1, 2) if len(scaled) > 1 else scaled
    return scaled.reshape(found.shape)  # an image may be one frame of a video


@each_family
def test_pixels_become_latents_of_the_grid(name: str) -> None:
    case = case_of(name)
    family, pipe, clip = case.of_family, case.pipeline(), clip_of(case.call)
    pixels = torch.rand(1, 3, clip.frames, *clip.sizes[0], generator=torch.Generator().manual_seed(0)) * 2 - 1
    own, encoded = pipe.vae.encode, []
    pipe.vae.encode = lambda x: encoded.append(own(x)) or encoded[-1]
    latents = family.training.encode_pixels(pipe, pixels)
    if name == "cogvideox_two_frames":  # the frame that a token misses comes first, and is not decoded
        assert torch.equal(latents[:, :, 0], latents[:, :, 1]) or latents.shape[2] % 2 == 0
    else:
        modes = [one.latent_dist.mode() if hasattr(one, "latent_dist") else one.latent for one in encoded]
        torch.testing.assert_close(latents, scaled_as(latents, pipe.vae, modes), rtol=1e-5, atol=1e-6)
    assert tuple(latents.shape[1:]) == family.inputs.latent_shape(pipe.transformer.config, pipe.vae.config, clip)
    assert tuple(latents.shape[1:]) == case.latents
    assert family.token_grid(pipe.transformer, latents) == case.grid
    assert not torch.allclose(family.training.encode_pixels(pipe, pixels.roll(1, dims=3)), latents)


# an image, and videos by each name that pipelines have for their frames
@pytest.mark.parametrize("name", ["flux", "hunyuan_video", "latte", "ltx2", "sana_video"])
def test_samples_are_what_files_are_written_of(name: str) -> None:
    case = case_of(name)
    family, clip = case.of_family, clip_of(case.call)
    prompts, others = [case.call["prompt"], "a cat"], ("prompt", "negative_prompt", "output_type")
    settings = {key: x for key, x in case.call.items() if key not in others}
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    found = family.calling.call(case.pipeline(), prompts, generators, **settings)
    assert len(found) == 2
    for sample in found:
        if family.makes_videos:
            assert sample.shape == (clip.frames, *clip.sizes[0], 3) and 0 <= sample.min() < sample.max() <= 1
        else:
            assert (sample.height, sample.width) == clip.sizes[0]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_size_in_pixels_tells_the_grid(name: str) -> None:
    case = case_of(name)
    pipe, clip = case.pipeline(), clip_of(case.call)
    size = dict(zip(("height", "width"), clip.sizes[0], strict=True))
    size |= {"num_frames": clip.frames} if case.of_family.makes_videos else {}
    assert {layer.grid for layer in mhla.describe(pipe, **size)} == {case.grid}


# Single families


def test_prompts_of_qwen_image_are_encoded_as_the_pipeline_hands_them_over() -> None:
    """Two texts of other lengths in one batch, the shorter one masked; and one that is cut."""
    case = case_of("qwenimage")
    pipe, prompts, encode = case.pipeline(), ["a red ball", "dog"], case.of_family.training.encode_prompt
    call = {**case.call, "negative_prompt": None}
    batch = first_forward(pipe, **{**call, "prompt": prompts})
    assert not batch["encoder_hidden_states_mask"].all()
    for place, prompt in enumerate(prompts):
        found = encode(pipe, prompt, {"max_sequence_length": 8})
        text, mask = batch["encoder_hidden_states"][place], batch["encoder_hidden_states_mask"][place]
        tokens = len(text)
        assert tokens < 8 and mask.equal(found["encoder_hidden_states_mask"][:tokens])
        # a batch with another text: the same operations, summed in another order
        torch.testing.assert_close(found["encoder_hidden_states"][:tokens], text, rtol=1e-4, atol=1e-5)
        assert not any(one[tokens:].any() for one in found.values())
    found = encode(pipe, call["prompt"], {"max_sequence_length": 2})
    cut = first_forward(pipe, **{**call, "max_sequence_length": 2})
    assert found["encoder_hidden_states"].equal(cut["encoder_hidden_states"][0])


def test_embedded_guidance_and_the_frame_rate_are_given_to_models_that_take_them() -> None:
    case, latents = case_of("flux"), torch.zeros(1, 4, 16, 16)
    for embeds in (True, False):
        model = case.transformer(guidance_embeds=embeds, num_layers=1, num_single_layers=1)
        text = {"encoder_hidden_states": torch.zeros(1, 6, 32)}
        assert ("guidance" in case.of_family.inputs.arguments(model, latents, torch.tensor([0.5]), text)) is embeds
    case = case_of("skyreels_v2")
    model, given = wan(type(case.transformer()), num_layers=1, inject_sample_info=True), case.inputs()
    text = {"encoder_hidden_states": given["encoder_hidden_states"]}
    made = case.of_family.inputs.arguments(model, given["hidden_states"], given["timestep"], text)
    # as the pipeline tells it, 0 for 16 frames per second and 1 for any other rate
    assert torch.equal(output(model, made), output(model, {**given, "fps": [1, 1]}))
    assert_changed(output(model, made), output(model, {**given, "fps": [0, 0]}))


def test_guidance_of_hunyuan_video_15_is_a_component() -> None:
    pipe = case_of("hunyuan_video15").pipeline()
    family, guider = get_family(pipe.transformer), pipe.guider
    call = {"num_frames": 7, "height": 16, "width": 24, "num_inference_steps": 1, "output_type": "latent"}
    generator = torch.Generator()
    found = [
        family.calling.call(pipe, ["a dog"], [generator.manual_seed(1)], guidance_scale=scale, **call)[0]
        for scale in (1.0, 6.0)
    ]
    expected = pipe("a dog", generator=generator.manual_seed(1), **call).frames[0]
    assert pipe.guider is guider and torch.equal(found[1], expected) and not torch.equal(found[0], expected)


def test_softmax_in_place_of_sana_videos_attention_has_its_norms_and_rope() -> None:
    case = case_of("sana_video")
    model = case.transformer()
    attn, rotary = model.transformer_blocks[0].attn1, model.rope(case.inputs()["hidden_states"])
    hidden_states = torch.randn(2, rotary[0].shape[1], 48, generator=torch.Generator().manual_seed(0))
    query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
    heads = [x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (query, key, attn.to_v(hidden_states))]
    turned = [apply_rotary_emb(x, [table[0, :, 0] for table in rotary]) for x in heads[:2]]
    expected = attn.to_out[0](scaled_dot_product_attention(*turned, heads[2]).transpose(1, 2).flatten(2))
    attn.set_processor(imported(get_family("sana_video").softmax_processor)())
    torch.testing.assert_close(attn(hidden_states, rotary_emb=rotary), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 9])
def test_wans_pipelines_get_as_many_frames_as_a_clip_has(frames: int) -> None:
    """diffusers rounds a number of frames that the temporal stride divides, as 1 always does, and adds one."""
    pipe, clip = wan_pipeline(), Clip(frames=frames, fps=16.0, sizes=((32, 48),))
    size = {"height": 32, "width": 48}
    assert get_family("wan").calling.clip_arguments(pipe, clip) == {**size, "num_frames": frames}
    choice = PipelineChoice("wan", settings={"num_frames": frames, "num_inference_steps": 1})
    generators = [torch.Generator().manual_seed(0)]
    (latents,) = choice.call(load_tiny("wan"), ["a seven"], generators, output_type="latent")
    assert latents.shape[1] == frames
