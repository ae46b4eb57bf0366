"""ChronoEdit: two latent frames that RoPE sets apart, alone or in the last steps of a call."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..models import assert_changed
from .cases import case_of

CASE, EDIT_CASE = case_of("chronoedit"), case_of("chronoedit_edit")


def test_the_default_blocks_run_on_the_grids_of_one_call():
    """Temporal reasoning: four latent frames in the first step, two in the second, fewer than the blocks."""
    pipe = CASE.pipeline()
    grids = []

    def generate():
        return torch.as_tensor(pipe(**CASE.call, generator=torch.Generator().manual_seed(3)).frames)

    expected = generate()
    mhla.apply_mhla(pipe)
    pipe.transformer.register_forward_hook(lambda *_: grids.append(mhla.describe(pipe)[0].grid))
    assert_changed(generate(), expected)
    assert grids == [(4, 4, 6), (4, 4, 6), (2, 4, 6), (2, 4, 6)]


def test_frames_of_a_call():
    """Without temporal reasoning there are five, whatever is asked for."""
    pipe = EDIT_CASE.pipeline()
    family = get_family(pipe.transformer)
    assert mhla.describe(pipe, height=64, width=96)[0].grid == (2, 4, 6)
    assert mhla.describe(pipe, height=64, width=96, num_frames=13)[0].grid == (4, 4, 6)
    usual = family.default_clip
    assert not family.calling.clip_arguments(pipe, usual)["enable_temporal_reasoning"]
    longer = family.calling.clip_arguments(pipe, type(usual)(13, 16.0, ((64, 96),)))
    assert longer == {"height": 64, "width": 96, "num_frames": 13, "enable_temporal_reasoning": True}
