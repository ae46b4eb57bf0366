"""What is particular to MiniMax-H3: one sequence of text, pictures, sound and video, found by indices."""

from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, trained_family
from mhla_diffusers.families.inputs import pack

from ..models import assert_changed, relative_change
from ..refusals import refused
from .cases import ROUNDING, SOUND_CALL, case_of, output, plain
from .recording import forwards

CASE = case_of("minimax_h3")
FAMILY = CASE.of_family
NAMES = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")


def with_pictures(anchors: tuple[str, ...], sound: int = 3) -> dict[str, Any]:
    """Arguments as the pipeline packs them, with the first or last frame given, and its rows nearly clean."""
    arguments, (frames, height, width) = CASE.inputs(batch=1), CASE.grid
    tags = torch.ones(arguments["encoder_hidden_states"].shape[1], dtype=torch.int64)
    sizes = frames, 2 * height, 2 * width, sound, (1, 2, 2), 2, 2, 0
    made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *sizes, anchors)
    layout, given = dict(zip(NAMES, made, strict=False)), made[5]
    pictures = torch.randn(1, given, 96, generator=torch.Generator().manual_seed(2))
    times = torch.zeros(len(layout["position_ids"]), dtype=torch.int64)
    times[layout["video_indices"][:given]] = 1
    rows = torch.cat([pictures, arguments["hidden_states"]], dim=1)
    heard = torch.randn(1, 2 * sound, 32, generator=torch.Generator().manual_seed(3))
    own = {"hidden_states": rows, "audio_hidden_states": heard, "timestep_indices": times}
    return {**arguments, **layout, **own, "timestep": torch.tensor([0.2, 0.999])}


@torch.no_grad()
def test_forward_gets_what_the_pipeline_gives():
    pipe = CASE.pipeline()
    given = forwards(pipe, **SOUND_CALL, generator=torch.Generator().manual_seed(1))
    assert len(given) == 2
    first, clip = given[0], Clip(124, 24.0, ((64, 96),))
    grid = FAMILY.calling.grid(pipe, pipe.transformer, clip)
    assert grid == FAMILY.grid(pipe.transformer, first) == (37, 2, 3)
    latents = torch.randn(1, 24, 37, 4, 6)
    conditioning = {name: first[name] for name in ("encoder_hidden_states", "audio_hidden_states")}
    made = CASE.of_inputs.arguments(pipe.transformer, latents, torch.tensor([0.0]), conditioning)
    assert torch.equal(made["hidden_states"], pack(latents, (1, 2, 2)))
    assert made["hidden_states"].shape == first["hidden_states"].shape
    for name in NAMES:
        assert torch.equal(made[name], first[name])


@pytest.mark.parametrize(("anchors", "sound"), [(("first",), 0), (("last",), 3), (("first", "last"), 3)], ids=str)
def test_conditioning_rows_stay_exact(anchors, sound):
    """Each is one frame before the sound, or before the video itself where there is none."""
    model, arguments = CASE.transformer(), with_pictures(anchors, sound)
    assert FAMILY.grid(model, arguments) == CASE.grid
    expected = output(model, arguments)
    mhla.apply_mhla(model, density=1.0)
    assert relative_change(output(model, arguments), expected) < ROUNDING
    mhla.remove_mhla(model)
    # a patch whose grid is the whole of the sequence would change the first attention's output for text, too
    outputs = []
    attn = model.transformer_blocks[0].attn
    hook = attn.register_forward_hook(lambda _, args, found: outputs.append(found))
    output(model, arguments)
    mhla.apply_mhla(model, **plain("minimax_h3"))
    output(model, arguments)
    hook.remove()
    own, patched = outputs
    count = own.shape[1] - torch.Size(CASE.grid).numel()
    assert relative_change(patched[:, :count], own[:, :count]) < ROUNDING
    assert_changed(patched[:, count:], own[:, count:])


@pytest.mark.parametrize("which", ["not last", "two videos", "another order"])
def test_other_sequences_are_refused(which):
    model, arguments = mhla.apply_mhla(CASE.transformer(), **plain("minimax_h3")), CASE.inputs()
    places, tokens = arguments["position_ids"].clone(), torch.Size(CASE.grid).numel()
    if which == "not last":
        for name in NAMES[2:]:
            arguments[name] = (arguments[name] + 7) % len(places)
    else:
        places[-tokens:] = places[-tokens:].flip(0) if which == "another order" else places[-tokens // 2 :].repeat(2, 1)
    arguments["position_ids"] = places
    with refused("one token grid"):
        output(model, arguments)


def test_latent_frames_are_those_of_the_pipeline():
    for frames, latent in ((124, 37), (125, 42), (141, 42), (22, 7)):
        assert FAMILY.latent_frames(None, frames, 1) == latent


def test_training_and_other_times_in_a_batch_are_refused():
    model = CASE.transformer()
    with refused("not say how its models are encoded for"):
        trained_family(model)
    latents, conditioning = CASE.drawn(CASE.grid, 2, seed=1)
    with refused("one time"):
        CASE.of_inputs.arguments(model, latents, torch.tensor([0.5, 0.25]), conditioning)
