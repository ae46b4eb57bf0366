"""Wan Animate: poses and faces, and a picture that stands before the frames of a segment."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family

from ..models import assert_changed, output
from ..refusals import refused
from .cases import case_of, plain

CASE = case_of("wan_animate")


def test_sizes_are_those_of_a_segment_with_the_picture() -> None:
    pipe = CASE.pipeline()
    family, clip = get_family(pipe.transformer), Clip(9, 30.0, ((64, 96),))
    assert family.training.clip_arguments(pipe, clip) == {"height": 64, "width": 96, "segment_frame_length": 9}
    mhla.apply_mhla(pipe, **plain("wan_animate"))
    pipe(**{**CASE.call, **family.training.clip_arguments(pipe, clip)})
    assert mhla.describe(pipe)[0].grid == mhla.describe(pipe, height=64, width=96, num_frames=9)[0].grid == (4, 4, 6)
    assert family.forward.latent_shape(pipe.transformer.config, dict(pipe.vae.config), clip) == CASE.latents
    assert mhla.describe(pipe, height=720, width=1280)[0].grid == (21, 45, 80)
    assert mhla.suggest_blocks(pipe, 720, 1280) == family.mhla_blocks


def test_pose_and_face_of_a_sample_are_used_and_else_there_are_none() -> None:
    model, arguments = CASE.transformer(), CASE.inputs()
    family = get_family(model)
    moved = dict(arguments)
    latents, timestep = moved.pop("hidden_states"), moved.pop("timestep")
    made = family.forward.arguments(model, latents, timestep, moved)
    assert torch.equal(output(model, made), output(model, arguments))
    still = {name: x for name, x in moved.items() if name.startswith("encoder_hidden_states")}
    made = family.forward.arguments(model, latents, timestep, still)
    nothing = {
        "pose_hidden_states": 0 * arguments["pose_hidden_states"],
        "face_pixel_values": 0 * arguments["face_pixel_values"] - 1,
    }
    assert torch.equal(output(model, made), output(model, {**arguments, **nothing}))
    assert_changed(output(model, made), output(model, arguments))


def test_files_with_captions_alone_are_refused() -> None:
    pipe = CASE.pipeline()
    family = get_family(pipe.transformer)
    with refused("InMemoryData"):
        family.training.encode_pixels(pipe, torch.zeros(1, 3, 5, 16, 16))
    with refused("image, pose_video, face_video"):
        family.training.call(pipe, ["a cat"], [torch.Generator().manual_seed(0)])
