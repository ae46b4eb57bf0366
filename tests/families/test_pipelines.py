"""A family hands to its transformer what the pipeline hands to it, at the sizes that the pipeline makes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, Family, get_family
from mhla_diffusers.families.training import scaled_latents

from .cases import Case as FamilyCase
from .cases import case_of

NAMES = ("cogvideox", "cogvideox_two_frames", "flux", "hunyuan_video", "ltx", "pixart", "pixart_sigma", "qwenimage")
NAMES += ("sana_video", "sd3")
OTHERS = ("anyflow", "auraflow", "chroma", "cogview4", "flux2", "hunyuan_dit", "hunyuan_image", "hunyuan_video15")
OTHERS += ("krea2", "latte", "longcat_image", "ltx2", "lumina2", "mochi", "z_image")
"""Families that are not trained, whose pipelines are called all the same."""
OF_THE_REAL_AUTOENCODER = {"ltx": {"rope_interpolation_scale"}}
"""Arguments that tell the strides of the autoencoder, which are others in a tiny one."""

GUIDANCE = {"flux": 3.5, "hunyuan_video": 6.0}
"""Guidance of a call with one forward per step, where it is not 1: models that embed it take the pipeline's default."""

each_family = pytest.mark.parametrize("name", NAMES)
# text of Qwen-Image is filled up: its own file looks at that
forward_alike = pytest.mark.parametrize("name", [name for name in NAMES if name != "qwenimage"])
# these have as many tokens as their tokenizers, which are others in a tiny pipeline
real_texts = pytest.mark.parametrize("name", [name for name in NAMES if name != "sd3"])


def family_of(case: FamilyCase) -> Family:
    return get_family(case.transformer())


def clip_of(case: FamilyCase) -> Clip:
    """The clip that the case's call makes."""
    frames = next((case.call[name] for name in ("num_frames", "frames", "video_length") if name in case.call), 1)
    return Clip(frames, 8.0, ((case.call["height"], case.call["width"]),))


def recorded(pipe: Any, module: Any, method: str, run: Callable[[], object]) -> list[dict[str, Any]]:
    """Arguments of all calls of a method of a component while something runs; those by place by their number."""
    own, calls = getattr(module, method), []

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append({str(place): value for place, value in enumerate(args)} | kwargs)
        return own(*args, **kwargs)

    setattr(module, method, note)
    try:
        run()
    finally:
        delattr(module, method)
    return calls


@forward_alike
def test_forward_gets_what_the_pipeline_gives(name: str) -> None:
    case = case_of(name)
    family, pipe = family_of(case), case.pipeline()
    prompts = [case.call["prompt"], "a cat"]
    call = {**case.call, "prompt": prompts, "guidance_scale": GUIDANCE.get(name, 1.0)}
    given = recorded(pipe, pipe.transformer, "forward", lambda: pipe(**call, generator=torch.Generator()))[0]
    given = family.named_arguments(pipe.transformer, [given.pop(key) for key in list(given) if key.isdigit()], given)
    settings = {key: x for key, x in call.items() if key != "prompt"}
    samples = [family.training.encode_prompt(pipe, prompt, settings) for prompt in prompts]
    conditioning = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    latents = family.training.prediction(pipe.transformer, given["hidden_states"], torch.empty(2, *case.latents))
    assert tuple(latents.shape[1:]) == case.latents
    found = family.inputs.arguments(pipe.transformer, latents, given["timestep"], conditioning)
    for key in found.keys() - OF_THE_REAL_AUTOENCODER.get(name, set()):
        # a prompt by itself and among others: float32 sums in another order
        expected = given[key].to(found[key].dtype) if "mask" in key else given[key]
        torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6)
    usual = inspect.signature(type(pipe.transformer).forward).parameters
    left = {key: x for key, x in given.items() if key not in found and key != "return_dict"}
    assert all(x is None or x == {} or x == usual[key].default for key, x in left.items()), left.keys()


@real_texts
def test_conditioning_has_the_shapes_that_are_told(name: str) -> None:
    case = case_of(name)
    family, pipe = family_of(case), case.pipeline()
    found = family.training.encode_prompt(pipe, "")
    shapes = family.inputs.conditioning_shapes(pipe.transformer.config)
    assert {key: (x.shape, x.is_floating_point()) for key, x in found.items()} == {
        key: (x.shape, x.is_floating_point()) for key, x in shapes.items()
    }
    if name == "hunyuan_video":  # which divides by the number of tokens
        assert found["encoder_attention_mask"].any()


@each_family
def test_latents_are_of_the_scale_of_the_pipeline(name: str) -> None:
    """What the pipeline has when it is done, and what its autoencoder then gets."""
    case = case_of(name)
    family, pipe, clip = family_of(case), case.pipeline(), clip_of(case)
    call = {
        **family.calling.clip_arguments(pipe, clip),
        "num_inference_steps": 2,
        **family.calling.guidance_arguments(3.0),
    }
    prompt = [case.call["prompt"]]

    def decode() -> None:
        family.calling.call(pipe, prompt, [torch.Generator().manual_seed(3)], **call, output_type="pt")

    decoded = [given.get("0", given.get("z")) for given in recorded(pipe, pipe.vae, "decode", decode)]
    found = family.training.generate_latents(pipe, prompt[0], clip, 2, 3.0, torch.Generator().manual_seed(3))
    assert tuple(found.shape) == family.inputs.latent_shape(pipe.transformer.config, pipe.vae.config, clip)
    torch.testing.assert_close(found[None], scaled_as(found[None], pipe.vae, decoded), rtol=1e-4, atol=1e-5)


def scaled_as(found: torch.Tensor, vae: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """An autoencoder's latents, which may be those of single frames, in the scale and shape of a family's."""
    scaled = scaled_latents(vae, torch.cat(parts))
    scaled = scaled[None].movedim(1, 2) if len(scaled) > 1 else scaled
    return scaled.reshape(found.shape)  # an image may be one frame of a video


# an image, and videos by each name that pipelines have for their frames
@pytest.mark.parametrize("name", ["flux", "hunyuan_video", "latte", "ltx2", "sana_video"])
def test_samples_are_what_files_are_written_of(name: str) -> None:
    case = case_of(name)
    family, clip = family_of(case), clip_of(case)
    prompts, others = [case.call["prompt"], "a cat"], ("prompt", "negative_prompt", "output_type")
    settings = {key: x for key, x in case.call.items() if key not in others}
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    found = family.calling.call(case.pipeline(), prompts, generators, **settings)
    assert len(found) == 2
    for sample in found:
        if family.makes_videos:
            assert sample.shape == (clip.frames, *clip.sizes[0], 3)
            assert 0 <= sample.min() < sample.max() <= 1
        else:
            assert (sample.height, sample.width) == clip.sizes[0]


@each_family
def test_pixels_become_latents_of_the_grid(name: str) -> None:
    case = case_of(name)
    family, pipe, clip = family_of(case), case.pipeline(), clip_of(case)
    pixels = torch.rand(1, 3, clip.frames, *clip.sizes[0], generator=torch.Generator().manual_seed(0)) * 2 - 1
    own, encoded = pipe.vae.encode, []
    pipe.vae.encode = lambda x: encoded.append(own(x)) or encoded[-1]
    latents = family.training.encode_pixels(pipe, pixels)
    if name != "cogvideox_two_frames":
        modes = [one.latent_dist.mode() if hasattr(one, "latent_dist") else one.latent for one in encoded]
        torch.testing.assert_close(latents, scaled_as(latents, pipe.vae, modes), rtol=1e-5, atol=1e-6)
    assert tuple(latents.shape[1:]) == family.inputs.latent_shape(pipe.transformer.config, pipe.vae.config, clip)
    assert tuple(latents.shape[1:]) == case.latents
    assert family.token_grid(pipe.transformer, latents) == case.grid
    again = family.training.encode_pixels(pipe, pixels.roll(1, dims=3))
    assert not torch.allclose(again, latents)


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_size_in_pixels_tells_the_grid(name: str) -> None:
    case = case_of(name)
    pipe, clip = case.pipeline(), clip_of(case)
    size = dict(zip(("height", "width"), clip.sizes[0], strict=True))
    size |= {"num_frames": clip.frames} if family_of(case).makes_videos else {}
    assert {layer.grid for layer in mhla.describe(pipe, **size)} == {case.grid}
    blocks = mhla.suggest_blocks(pipe, **size)
    assert all(1 <= count <= length for count, length in zip(blocks, case.grid, strict=True))
