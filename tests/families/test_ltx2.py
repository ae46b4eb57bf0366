"""LTX-2: guidance that skips an attention, sound beside the video, and tokens after the grid."""

from typing import Any

import pytest
import torch

import mhla_diffusers as mhla

from ..models import assert_changed, relative_change
from ..refusals import refused
from .cases import ROUNDING, all_listed, case_of, drawer, output, plain

CASE = case_of("ltx2")
TOKENS = torch.Size(CASE.grid).numel()


def with_further_tokens(count: int) -> dict[str, Any]:
    """Arguments as of ``LTX2ConditionPipeline``, which appends keyframes with places and times of their own."""
    arguments = CASE.inputs()
    draw = drawer(2, 7)
    places = CASE.transformer().rope.prepare_video_coords(2, *CASE.grid, "cpu")
    further = draw(3, count, 1).abs().expand(-1, -1, -1, 2) * torch.tensor([1.0, 1.5])
    times = arguments["timestep"][:, None].repeat(1, TOKENS + count).float()
    times[:, TOKENS:] = 0
    latents = torch.cat([arguments["hidden_states"], draw(count, 8)], dim=1)
    return {
        **arguments,
        "hidden_states": latents,
        "video_coords": torch.cat([places, further], dim=2),
        "timestep": times,
        "audio_timestep": arguments["timestep"],
    }


def test_a_processor_on_all_attentions_leaves_cross_attention_as_it_is():
    """diffusers' own method reaches sound and text too; rotation of queries and keys is handed on."""
    model, given = CASE.transformer(), drawer(2, 3)
    attn = model.transformer_blocks[0].audio_to_video_attn
    rotary = model.cross_attn_rope(model.rope.prepare_video_coords(2, *CASE.grid, "cpu")[:, :1])
    of_keys = model.cross_attn_audio_rope(model.audio_rope.prepare_audio_coords(2, 5, "cpu"))
    call = {"encoder_hidden_states": given(5, 32), "query_rotary_emb": rotary, "key_rotary_emb": of_keys}
    hidden_states = given(TOKENS, 32)
    with torch.no_grad():
        expected = attn(hidden_states, **call)
        attn.set_processor(mhla.MHLAProcessor(**plain("ltx2")))
        assert torch.equal(attn(hidden_states, **call), expected)


@pytest.mark.parametrize("kept", [[0.0, 0.0], [0.0, 1.0]], ids=["all", "the first"])
def test_guidance_skips_an_attention_of_samples(kept):
    model, usual = CASE.transformer(), CASE.inputs()
    skipping = {**usual, "spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor(kept)}
    expected = output(model, skipping)
    assert_changed(expected, output(model, usual))
    mhla.apply_mhla(model, **all_listed("ltx2"))
    assert relative_change(output(model, skipping), expected) < ROUNDING
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, skipping), expected)


def test_appended_tokens_attend_exactly():
    """With softmax themselves, so the first layer of a patch gives them what it gives without one."""
    arguments, found = with_further_tokens(24), []
    for patched in (False, True):
        model = CASE.transformer()
        model.transformer_blocks[0].attn1.register_forward_hook(lambda _, args, out: found.append(out))
        output(mhla.apply_mhla(model, **plain("ltx2")) if patched else model, arguments)
    own, patched = found
    torch.testing.assert_close(patched[:, TOKENS:], own[:, TOKENS:], rtol=1e-4, atol=1e-5)
    assert_changed(patched[:, :TOKENS], own[:, :TOKENS])


def test_a_mask_between_tokens_is_refused():
    """References that are to be seen more or less have one."""
    model, arguments = mhla.apply_mhla(CASE.transformer(), **plain("ltx2")), CASE.inputs()
    arguments["video_self_attention_mask"] = torch.ones(2, TOKENS, TOKENS)
    with refused((2, TOKENS, TOKENS)):
        output(model, arguments)
