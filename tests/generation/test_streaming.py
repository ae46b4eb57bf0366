"""pipelines/generate_wan_streaming.py: a streamed video is the whole clip's forward; flat memory; what it refuses."""

from itertools import islice

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.tiny import load_tiny

from ..models import assert_changed, bytes_alive, inputs, output, relative_change, wan, wan_i2v
from ..pipelines import wan22_pipeline, wan_pipeline
from ..refusals import refused
from ..scripts import load_script

CAUSAL = {"blocks": (2, 2, 1), "causal": "block", "block_length": 2, "beyond": "relative"}
CALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 8}


@pytest.fixture
def script(monkeypatch):
    return load_script("pipelines/generate_wan_streaming.py", monkeypatch)


def causal_pipeline(**settings):
    return mhla.apply_mhla(wan_pipeline(wan(num_layers=2, rope_max_seq_len=256)), **CAUSAL | settings)


def streamed(script, pipe, frame_blocks, prompts=("a cat surfing",), **call):
    generator = call.pop("generator", None) or torch.Generator().manual_seed(0)
    blocks = script.stream_latents(pipe, prompts, frame_blocks, generator=generator, **CALL | call)
    return torch.cat(list(blocks), dim=2)


@pytest.mark.parametrize(
    ("settings", "guidance"),
    [
        ({}, 1.0),  # the third frame block lies beyond the patch's two
        ({"blocks": (3, 2, 1)}, 4.0),
        ({"own": "linear", "mixing_per_head": True}, 1.0),
        ({"own": "linear", "normalize": False, "output_norm": True, "output_gate": True}, 1.0),
    ],
    ids=["beyond", "guided", "linear", "gated"],
)
def test_a_streamed_clip_is_the_whole_clips_forward(script, settings, guidance):
    """Each frame block denoised beside the clean ones before it, all in one forward, each frame at its own time."""
    pipe = causal_pipeline(**settings)
    found = streamed(script, pipe, 3, guidance=guidance)
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


def test_samples_of_a_batch_have_prompts_and_noise_of_their_own(script):
    pipe, prompts = causal_pipeline(), ["a cat", "the red dog"]
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 5)]
    both = streamed(script, pipe, 2, prompts, generator=generators)
    assert relative_change(both[:1], streamed(script, pipe, 2, prompts[:1])) < 1e-4  # sums of another batch
    assert_changed(both[1:], both[:1])


def test_memory_is_flat_in_the_number_of_frame_blocks(script):
    alive = {}
    blocks = script.stream_latents(causal_pipeline(), ["a cat"], None, **CALL)
    for number, _ in enumerate(islice(blocks, 40), start=1):
        if number in (10, 40):
            alive[number] = bytes_alive()
    assert alive[40] <= alive[10]  # less where something of another test was freed meanwhile


def test_after_a_stream_the_model_attends_as_before(script):
    pipe = causal_pipeline()
    before = output(pipe.transformer, inputs("wan"))
    streamed(script, pipe, 2)
    assert torch.equal(output(pipe.transformer, inputs("wan")), before)
    assert torch.is_grad_enabled()


def test_pixels_are_those_that_the_pipeline_makes(script):
    """The end of the pipeline's own call, from its latents."""
    pipe = causal_pipeline()
    call = {"num_frames": 13, "height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 8}
    latents, video = (
        torch.as_tensor(pipe("a cat", **call, generator=torch.Generator().manual_seed(0), output_type=kind).frames)
        for kind in ("latent", "np")
    )
    assert video.shape == (1, 13, 32, 32, 3)
    # the mean and deviation multiplied rather than divided by their inverse, in float32
    assert torch.allclose(script.decode_latents(pipe, latents), video, atol=1e-4)


def test_a_clip_of_the_shipped_patch_goes_on_as_its_shorter_one_began(script):
    pipe = mhla.load_mhla(load_tiny("wan"), "tiny-wan-causal")
    call = {"height": 64, "width": 64, "max_sequence_length": 10}
    long, short = (streamed(script, pipe, count, ["a seven moving left"], **call) for count in (2, 1))
    assert long.shape[2] == 6 and torch.equal(long[:, :, :3], short)


@pytest.mark.parametrize(
    ("build", "call", "named"),
    [
        (lambda: mhla.apply_mhla(wan22_pipeline(), **CAUSAL), {}, "one transformer"),
        (lambda: mhla.apply_mhla(wan_pipeline(wan_i2v()), **CAUSAL), {}, "text-to-video"),
        (lambda: mhla.apply_mhla(wan_pipeline(), blocks=(2, 2, 1)), {}, "causal='block'"),
        (lambda: causal_pipeline(layers=[0]), {}, "softmax"),
        (wan_pipeline, {}, "softmax"),
        (lambda: causal_pipeline(dense_first=1), {}, "dense_first=1"),
        (lambda: causal_pipeline(beyond="error"), {"frame_blocks": 3}, "beyond='relative'"),
        (causal_pipeline, {"frame_blocks": 129}, "frame_blocks=129...258...256...rope_max_seq_len"),
        (causal_pipeline, {"height": 20}, "height=20"),
    ],
)
def test_pipelines_and_arguments_that_cannot_stream_are_refused(script, build, call, named):
    with refused(named):
        streamed(script, build(), **{"frame_blocks": 2, **call})
