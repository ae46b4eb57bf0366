"""Tiny models whose self-attention stands beside cross-attention are what their cases say."""

from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch

from ...models import output
from . import chronoedit, dig, hunyuan_dit, latte, ltx, pixart, sana_video, skyreels_v2, wan_animate
from .case import FamilyCase

CASES = {
    "pixart": pixart.CASE,
    "pixart_sigma": pixart.SIGMA_CASE,
    "ltx": ltx.CASE,
    "sana_video": sana_video.CASE,
    "sana_video_image": sana_video.IMAGE_CASE,
    "skyreels_v2": skyreels_v2.CASE,
    "skyreels_v2_forcing": skyreels_v2.FORCING_CASE,
    "skyreels_v2_image": skyreels_v2.IMAGE_CASE,
    "chronoedit": chronoedit.CASE,
    "chronoedit_edit": chronoedit.EDIT_CASE,
    "wan_animate": wan_animate.CASE,
    "latte": latte.CASE,
    "hunyuan_dit": hunyuan_dit.CASE,
    "dig": dig.CASE,
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_grid = pytest.mark.parametrize("ragged", [False, True], ids=["usual", "ragged"])


def expected_shape(model: Any, latents: torch.Tensor) -> tuple[int, ...]:
    """Of what a model predicts: its input's with other channels, the last axis of packed latents (B, tokens, C)."""
    shape = list(latents.shape)
    # HunyuanDiT has them beside its configuration
    shape[-1 if latents.ndim == 3 else 1] = model.config.get("out_channels") or model.out_channels
    return tuple(shape)


def rows(arguments: Mapping[str, Any], chosen: list[int], batch: int) -> dict[str, Any]:
    """Some rows of a batch of arguments; what has no batch axis stays as it is."""
    return {
        name: rows(value, chosen, batch)
        if isinstance(value, Mapping)
        else value[chosen]
        if isinstance(value, torch.Tensor) and value.shape[0] == batch
        else value
        for name, value in arguments.items()
    }


@each_grid
@each_case
def test_forward_is_finite_and_has_the_shape_of_its_input(case: FamilyCase, ragged):
    model, arguments = case.transformer(), case.inputs(ragged=ragged)
    found = output(model, arguments)
    assert found.isfinite().all()
    assert tuple(found.shape) == expected_shape(model, arguments["hidden_states"])


@each_grid
@each_case
def test_every_attention_over_the_grid_is_called_once_with_its_tokens(case: FamilyCase, ragged):
    model, calls = case.transformer(), []
    for name in case.attentions:

        def note(_, args, kwargs, name=name):
            calls.append((name, (args[0] if args else kwargs["hidden_states"]).shape[1]))

        model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    output(model, case.inputs(ragged=ragged))
    tokens = prod(case.ragged_grid if ragged else case.grid) + sum(case.extra)
    assert calls == [(name, tokens) for name in case.attentions]


@each_case
def test_blocks_divide_the_grid_and_not_the_ragged_one(case: FamilyCase):
    assert all(size % count == 0 for size, count in zip(case.grid, case.blocks, strict=True))
    assert any(size % count for size, count in zip(case.ragged_grid, case.blocks, strict=True))


@each_case
def test_rows_of_a_batch_do_not_know_of_each_other(case: FamilyCase):
    model, arguments = case.transformer(), case.inputs(batch=3)
    before, after = (output(model, rows(arguments, [0, other], batch=3)) for other in (1, 2))
    assert not torch.allclose(before[0], before[1])
    assert not torch.allclose(before[1], after[1])
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)


@each_case
def test_inputs_come_from_their_seed(case: FamilyCase):
    first, again, other = case.inputs(seed=1), case.inputs(seed=1), case.inputs(seed=2)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first["hidden_states"], other["hidden_states"])
    assert case.inputs(batch=1)["hidden_states"].shape[0] == 1


@each_case
def test_pipeline_generates(case: FamilyCase):
    result = case.pipeline()(**case.call, generator=torch.Generator().manual_seed(3))
    found = result.frames if hasattr(result, "frames") else result.images
    assert torch.as_tensor(found).isfinite().all()
    assert torch.as_tensor(found).std() > 0
