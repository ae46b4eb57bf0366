"""LTX-Video: RoPE over the channels of all heads, grids told by coordinates, and conditions beside the grid."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

import mhla_diffusers as mhla

from ..models import assert_changed, output, relative_change
from ..refusals import refused
from .cases import all_listed, case_of, plain

CASE = case_of("ltx")

ALL_LISTED, PLAIN = all_listed("ltx"), plain("ltx")


def coordinates(*frames: list[float], batch: int = 2) -> torch.Tensor:
    """(B, 3, N) of pieces of video, of which the times of the frames are given; 4x6 tokens in each."""
    pieces = [
        torch.cartesian_prod(torch.tensor(times), *(32.0 * torch.arange(size) for size in (4, 6))) for times in frames
    ]
    return torch.cat(pieces).T.expand(batch, -1, -1).contiguous()


def told_by(places: torch.Tensor, seed: int = 1) -> dict[str, Any]:
    """Arguments of a forward as of ``LTXConditionPipeline``, whose grid nothing but coordinates tells."""
    arguments = CASE.inputs(seed=seed)
    for name in ("num_frames", "height", "width", "rope_interpolation_scale"):
        del arguments[name]
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, places.shape[2], arguments["hidden_states"].shape[2], generator=generator)
    return {**arguments, "hidden_states": latents, "video_coords": places}


GRID = [0.0, 1.0, 9.0, 17.0]
WITH_CONDITIONS = {"none": [GRID], "one frame": [[12.0], GRID], "two pieces": [[8.0, 16.0], [24.0], GRID]}
conditions = pytest.mark.parametrize("pieces", WITH_CONDITIONS.values(), ids=WITH_CONDITIONS)


def test_rope_in_bfloat16_is_that_of_the_model():
    """Bit for bit: both are rounded once from float32."""
    model, arguments = CASE.transformer().to(torch.bfloat16), CASE.inputs()
    attn, adapter = model.transformer_blocks[0].attn1, CASE.of_family.adapter
    latents = arguments["hidden_states"]
    rotary = model.rope(latents, *CASE.grid, arguments["rope_interpolation_scale"])
    hidden_states = torch.randn(2, latents.shape[1], 32).bfloat16()
    arguments = {"hidden_states": hidden_states, "rotary_emb": rotary}
    given = adapter.read(attn, arguments, CASE.grid, latents.shape[1])
    assert given.rotary is None
    for found, norm, linear in ((given.query, attn.norm_q, attn.to_q), (given.key, attn.norm_k, attn.to_k)):
        expected = apply_rotary_emb(norm(linear(hidden_states)), rotary)
        torch.testing.assert_close(found.flatten(2), expected, rtol=0, atol=0)


@conditions
def test_frames_of_conditions_are_tokens_before_the_grid(pieces):
    arguments, model = told_by(coordinates(*pieces)), CASE.transformer()
    expected = output(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert relative_change(output(model, arguments), expected) < 2e-5  # float32 sums in another order
    assert {layer.grid for layer in mhla.describe(model)} == {CASE.grid}
    mhla.remove_mhla(model)
    mhla.apply_mhla(model, **PLAIN)
    assert_changed(output(model, arguments), expected)


def test_frames_behind_a_window_are_of_the_grid():
    """``LTXI2VLongMultiPromptPipeline`` repeats times there."""
    arguments, model = told_by(coordinates(GRID, [0.0, 1.0])), CASE.transformer()
    expected = output(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert relative_change(output(model, arguments), expected) < 2e-5
    assert {layer.grid for layer in mhla.describe(model)} == {(6, 4, 6)}


def test_conditions_are_attended_to_exactly():
    """They attend with softmax themselves, so in the first layer of a patch they are what they are without one."""
    arguments, found = told_by(coordinates([12.0], GRID)), []
    for patched in (False, True):
        model = CASE.transformer()
        model.transformer_blocks[0].attn1.register_forward_hook(lambda _, args, out: found.append(out))
        output(mhla.apply_mhla(model, **PLAIN) if patched else model, arguments)
    own, patched = found
    torch.testing.assert_close(patched[:, :24], own[:, :24], rtol=1e-4, atol=1e-5)
    assert_changed(patched[:, 24:], own[:, 24:])


def test_numbers_and_coordinates_of_one_grid_give_the_same():
    """The numbers' coordinates are a whole table of the base size, which the model divides the others by."""
    model, arguments = mhla.apply_mhla(CASE.transformer(), **PLAIN), CASE.inputs()
    base = torch.tensor([20.0, 2048.0, 2048.0])
    places = model.rope._prepare_video_coords(2, *CASE.grid, arguments["rope_interpolation_scale"], "cpu").mT
    found = output(model, told_by(places * base[:, None]) | {"hidden_states": arguments["hidden_states"]})
    assert relative_change(found, output(model, arguments)) < 2e-5


@pytest.mark.parametrize(
    "places",
    [
        coordinates([1.0, 9.0]),
        coordinates(GRID)[:, :, :-1],
        coordinates(GRID)[:, :, torch.randperm(96, generator=torch.Generator().manual_seed(0))],
        coordinates(GRID)[:, [0, 2, 1]],
    ],
    ids=["no beginning", "a token too few", "no order", "columns first"],
)
def test_coordinates_without_a_grid_are_refused(places):
    model = mhla.apply_mhla(CASE.transformer(), **PLAIN)
    with refused("video_coords", places.shape[2]):
        output(model, told_by(places))


def test_a_forward_that_is_told_no_size_is_refused():
    model, arguments = mhla.apply_mhla(CASE.transformer(), **PLAIN), CASE.inputs()
    del arguments["height"]
    with refused("num_frames, height and width"):
        output(model, arguments)


def test_compiles_to_one_graph_with_coordinates():
    """Which holds the grid; coordinates of another one with as many tokens do not run in it."""
    arguments = told_by(coordinates([12.0], GRID))
    model = mhla.apply_mhla(CASE.transformer(), **PLAIN)
    expected = output(model, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_change(output(compiled, arguments), expected) < 2e-5
    other = arguments["video_coords"].clone()
    other[:, 1], other[:, 2] = arguments["video_coords"][:, 2], arguments["video_coords"][:, 1]
    with refused("compiled for another token grid", error=RuntimeError):
        output(compiled, {**arguments, "video_coords": other})
