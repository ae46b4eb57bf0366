"""Frame blocks generated one after another: what the scheduler and the transformer are given, flat memory, errors."""

from typing import Any

import pytest
import torch
from diffusers import SkyReelsV2DiffusionForcingPipeline

import mhla_diffusers as mhla
from mhla_diffusers.generation.streaming import decode_latents, stream_latents

from ..families.cases import case_of
from ..models import assert_changed, bytes_alive, relative_change, wan, wan_i2v
from ..pipelines import wan22_pipeline, wan_pipeline

_CAUSAL: dict[str, Any] = {
    "blocks": (2, 2, 1),
    "causal": "block",
    "block_length": 2,
    "beyond": "relative",
}
_CALL: dict[str, Any] = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 8}


def _pipe(**settings: Any) -> Any:
    pipe = wan_pipeline(wan(num_layers=1, rope_max_seq_len=256))
    return mhla.apply_mhla(pipe, **_CAUSAL | settings)


def _latents(pipe: Any, frame_blocks: int, prompt: Any = "a cat surfing", **call: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat(list(stream_latents(pipe, prompt, frame_blocks, generator=generator, **_CALL | call)), dim=2)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_frame_block_is_denoised_beside_the_clean_ones_before_it(guidance: float) -> None:
    """The same with the whole video in one forward, each frame at its own time."""
    pipe = _pipe(blocks=(3, 2, 1))
    found = _latents(pipe, 3, guidance=guidance)
    assert found.shape == (1, 16, 6, 4, 4)
    generator, done = torch.Generator().manual_seed(0), torch.empty(1, 16, 0, 4, 4)
    encoded = pipe.encode_prompt("a cat surfing", do_classifier_free_guidance=True, max_sequence_length=8)
    for _ in range(3):
        latents = torch.randn(1, 16, 2, 4, 4, generator=generator)
        pipe.scheduler.set_timesteps(2)
        for time in pipe.scheduler.timesteps:
            frames = torch.cat([done, latents], dim=2)
            times = torch.cat([torch.zeros(done.shape[2]), time.expand(2)]).repeat_interleave(4)[None]
            with torch.no_grad():
                cond, uncond = (pipe.transformer(frames, times, text)[0][:, :, -2:] for text in encoded)
            velocity = uncond + guidance * (cond - uncond)
            latents = pipe.scheduler.step(velocity, time, latents, return_dict=False)[0]
        done = torch.cat([done, latents], dim=2)
    # float32 sums in another order, through three times two steps
    assert relative_change(found, done) < 1e-4


def test_samples_of_a_batch_have_prompts_and_noise_of_their_own() -> None:
    pipe, prompts = _pipe(), ["a cat", "the red dog"]
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 5)]
    both = torch.cat(list(stream_latents(pipe, prompts, 2, generator=generators, **_CALL)), dim=2)
    assert relative_change(both[:1], _latents(pipe, 2, prompts[0])) < 1e-4  # sums of another batch
    assert_changed(both[1:], both[:1])


def test_memory_is_flat_in_the_number_of_frame_blocks() -> None:
    alive = {}
    for number, _ in enumerate(stream_latents(_pipe(), "a cat", None, **_CALL), start=1):
        if number in (10, 40):
            alive[number] = bytes_alive()
        if number == 40:
            break
    assert alive[40] <= alive[10]  # less where something of another test was freed meanwhile


@pytest.mark.parametrize("forcing", [False, True])
def test_skyreels_v2_streams(forcing: bool) -> None:
    pipe = case_of("skyreels_v2_forcing" if forcing else "skyreels_v2").pipeline()
    assert isinstance(pipe, SkyReelsV2DiffusionForcingPipeline) == forcing
    mhla.apply_mhla(pipe, **_CAUSAL)
    found = _latents(pipe, 3, steps=3)
    assert found.shape == (1, 16, 6, 4, 4) and found.isfinite().all()


def test_pixels_are_those_that_the_pipeline_makes() -> None:
    pipe = _pipe()
    latents = _latents(pipe, 2)
    seen: list[torch.Tensor] = []
    decode = pipe.vae.decode
    call = {"num_frames": 13, "height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 8}

    def of_stream(z: torch.Tensor, **settings: Any) -> Any:
        seen.append(z)
        return decode(z, **settings)

    pipe.vae.decode = of_stream
    pipe("a cat", latents=latents, **call, output_type="np")
    del pipe.vae.decode
    one = (1, -1, 1, 1, 1)
    mean, deviation = (torch.tensor(x).view(one) for x in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std))
    end = (seen[0] - mean) / deviation
    pixels = decode_latents(pipe, end)
    with torch.no_grad():
        expected = pipe.video_processor.postprocess_video(decode(seen[0], return_dict=False)[0], output_type="pt")
    assert pixels.shape == (1, 13, 32, 32, 3)
    # the mean and deviation undone and done again, in float32
    assert torch.allclose(pixels, expected.permute(0, 1, 3, 4, 2), atol=1e-4)


@pytest.mark.parametrize(
    ("build", "call", "named"),
    [
        (lambda: mhla.apply_mhla(wan22_pipeline(), **_CAUSAL), {}, "second transformer"),
        (lambda: mhla.apply_mhla(wan_pipeline(wan_i2v()), **_CAUSAL), {}, "36 .* 16"),
        (lambda: mhla.apply_mhla(wan_pipeline(), blocks=(2, 2, 1)), {}, "causal='block'"),
        (lambda: _pipe(beyond="error"), {"frame_blocks": 3}, "6 tokens, .* 2 blocks of 2.*beyond='relative'"),
        (_pipe, {"prompt": ["a", 3]}, "prompt.1=3"),
        (_pipe, {"prompt": []}, "prompt="),
        (_pipe, {"frame_blocks": 2.5}, "frame_blocks=2.5"),
        (_pipe, {"frame_blocks": 0}, "frame_blocks=0"),
        (_pipe, {"frame_blocks": 129}, "256 .*1 to 258.*rope_max_seq_len"),
        (_pipe, {"height": 20}, "height=20 .*16"),
        (_pipe, {"steps": None}, "steps=None"),
    ],
)
def test_pipelines_and_arguments_that_cannot_stream_are_refused(build: Any, call: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        stream_latents(build(), **{"prompt": "a cat", "frame_blocks": 2, **_CALL, **call})


def test_what_just_fits_is_streamed() -> None:
    for pipe, frame_blocks in ((_pipe(), 128), (_pipe(beyond="error"), 2)):
        stream_latents(pipe, "a cat", frame_blocks, **_CALL)


@pytest.mark.parametrize(
    ("message", "latents"),
    [
        (r"\(2, 2\)", torch.zeros(2, 2)),
        (r"\(1, 16, 0, 4, 4\)", torch.zeros(1, 16, 0, 4, 4)),
        ("torch.int64", torch.zeros(1, 16, 2, 4, 4, dtype=torch.int64)),
    ],
)
def test_latents_that_are_none_are_refused(message: str, latents: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        decode_latents(wan_pipeline(), latents)


def test_gradients_are_off_within_and_as_they_were_outside() -> None:
    pipe = _pipe()
    for latents in stream_latents(pipe, "a cat", 2, **_CALL):
        assert torch.is_grad_enabled() and not latents.requires_grad
