"""SkyReels-V2: diffusion forcing without its mask, with it under a causal patch, and its mask refused."""

from typing import Any

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..models import assert_changed, output, relative_change, wan
from ..refusals import refused
from .cases import all_listed, case_of, plain

CASE, FORCING_CASE = case_of("skyreels_v2"), case_of("skyreels_v2_forcing")
FORCING_CALL = FORCING_CASE.call

_PLAIN, _ALL_LISTED = plain("skyreels_v2"), all_listed("skyreels_v2")
_REFUSED = "causal_block_size=1...layers=[...]"


def _generate(pipe: Any, **call: Any) -> torch.Tensor:
    result = pipe(**{**FORCING_CALL, **call}, generator=torch.Generator().manual_seed(3))
    return torch.as_tensor(result.frames)


def test_diffusion_forcing_without_a_mask_has_a_time_for_every_frame() -> None:
    model, arguments = CASE.transformer(), FORCING_CASE.inputs()
    expected = output(model, arguments)
    mhla.apply_mhla(model, **_ALL_LISTED)
    assert relative_change(output(model, arguments), expected) < 2e-5


def test_the_block_causal_mask_is_refused_with_the_way_out() -> None:
    """Until it is gone again, with any lag between frames."""
    pipe = FORCING_CASE.pipeline()
    with_mask = _generate(pipe)
    mhla.apply_mhla(pipe, **_PLAIN)
    with refused(_REFUSED):
        _generate(pipe)
    assert pipe.transformer.config.num_frame_per_block == FORCING_CALL["causal_block_size"]
    with refused(_REFUSED):
        _generate(pipe, causal_block_size=None)
    found = {lag: _generate(pipe, causal_block_size=1, ar_step=lag) for lag in (0, 1)}
    mhla.remove_mhla(pipe)
    for lag, patched in found.items():
        assert_changed(patched, _generate(pipe, causal_block_size=1, ar_step=lag))
    assert torch.equal(_generate(pipe), with_mask)


_CAUSAL = {"causal": "block", "block_length": 2}
"""Frame blocks as long as those of the pipeline's call."""


def test_a_causal_patch_does_without_the_mask_and_no_frame_sees_a_later_block() -> None:
    pipe = FORCING_CASE.pipeline()
    model, arguments = pipe.transformer, FORCING_CASE.inputs()
    mhla.apply_mhla(pipe, blocks=(2, 2, 3), **_CAUSAL)
    with_mask, found = _generate(pipe), output(model, arguments)
    arguments["hidden_states"] = arguments["hidden_states"].clone()
    arguments["hidden_states"][:, :, 2:] += 1
    changed = output(model, arguments)
    assert torch.equal(changed[:, :, :2], found[:, :, :2])
    assert_changed(changed[:, :, 2:], found[:, :, 2:])
    # lags of a frame block, which the call below must not change
    without = _generate(pipe, causal_block_size=1)
    assert with_mask.isfinite().all() and without.isfinite().all()


def test_a_causal_patch_gives_the_same_with_and_without_the_mask() -> None:
    """The transformer alone: in the pipeline the size of a block sets the times of its frames as well."""
    model, arguments = FORCING_CASE.transformer(), FORCING_CASE.inputs()
    mhla.apply_mhla(model, blocks=(2, 2, 3), **_CAUSAL)
    expected = output(model, arguments)
    model._set_ar_attention(1)
    assert torch.equal(output(model, arguments), expected)


def test_softmax_in_one_frame_block_is_the_masked_attention() -> None:
    """The first block has none before it, and the mask hides those after it."""
    model, arguments = FORCING_CASE.transformer(), FORCING_CASE.inputs()
    expected = output(model, arguments)
    mhla.apply_mhla(model, blocks=(2, 1, 1), **_CAUSAL)
    found = output(model, arguments)
    # float32 sums in another order, through all layers
    assert relative_change(found[:, :, :2], expected[:, :, :2]) < 2e-5
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, arguments), expected)


def test_a_mask_of_other_blocks_than_the_patch_is_refused() -> None:
    model, arguments = FORCING_CASE.transformer(), FORCING_CASE.inputs()
    mhla.apply_mhla(model, blocks=(4, 2, 3), **(_CAUSAL | {"block_length": 1}))
    with refused("block_length=1", "block_length=2"):
        output(model, arguments)


def test_a_mask_that_is_not_block_causal_is_refused() -> None:
    model, arguments = CASE.transformer(), CASE.inputs()
    mhla.apply_mhla(model, blocks=(2, 2, 3), **_CAUSAL)
    later = torch.ones(96, 96, dtype=torch.bool).triu()[None, None]
    model.blocks[0].attn1.register_forward_pre_hook(lambda _, args: (*args[:2], later, *args[3:]))
    with refused("4 frames"):
        output(model, arguments)


def test_steps_in_which_the_patch_rests_have_the_mask() -> None:
    pipe = FORCING_CASE.pipeline()
    expected = _generate(pipe)
    mhla.apply_mhla(pipe, **_PLAIN, softmax_steps=1.0)
    assert torch.equal(_generate(pipe), expected)


def test_a_model_that_is_told_the_rate_is_told_24_frames_per_second() -> None:
    model = wan(type(CASE.transformer()), num_layers=1, inject_sample_info=True)
    arguments = CASE.inputs()
    conditioning = {"encoder_hidden_states": arguments["encoder_hidden_states"]}
    latents, timestep = arguments["hidden_states"], arguments["timestep"]
    made = get_family(model).inputs.arguments(model, latents, timestep, conditioning)
    # as the pipeline tells it, 0 for 16 frames per second and 1 for any other rate
    assert torch.equal(output(model, made), output(model, {**arguments, "fps": [1, 1]}))
    assert_changed(output(model, made), output(model, {**arguments, "fps": [0, 0]}))
