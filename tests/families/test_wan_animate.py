"""Wan Animate: poses and faces, and a picture that stands before the frames of a segment."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family

from ..models import assert_changed, output
from .cases import case_of, plain

CASE = case_of("wan_animate")


def test_sizes_are_those_of_a_segment_with_the_picture() -> None:
    pipe = CASE.pipeline()
    family, clip = get_family(pipe.transformer), Clip(9, 30.0, ((64, 96),))
    assert family.calling.clip_arguments(pipe, clip) == {"height": 64, "width": 96, "segment_frame_length": 9}
    mhla.apply_mhla(pipe, **plain("wan_animate"))
    pipe(**{**CASE.call, **family.calling.clip_arguments(pipe, clip)})
    assert mhla.describe(pipe)[0].grid == mhla.describe(pipe, height=64, width=96, num_frames=9)[0].grid == (4, 4, 6)
    assert mhla.describe(pipe, height=720, width=1280)[0].grid == (21, 45, 80)


def test_pose_and_face_of_a_sample_are_used_and_else_there_are_none() -> None:
    model, arguments = CASE.transformer(), CASE.inputs()
    moved = dict(arguments)
    latents, timestep = moved.pop("hidden_states"), moved.pop("timestep")
    made = CASE.of_inputs.arguments(model, latents, timestep, moved)
    assert torch.equal(output(model, made), output(model, arguments))
    still = {name: x for name, x in moved.items() if name.startswith("encoder_hidden_states")}
    made = CASE.of_inputs.arguments(model, latents, timestep, still)
    nothing = {
        "pose_hidden_states": 0 * arguments["pose_hidden_states"],
        "face_pixel_values": 0 * arguments["face_pixel_values"] - 1,
    }
    assert torch.equal(output(model, made), output(model, {**arguments, **nothing}))
    assert_changed(output(model, made), output(model, arguments))
