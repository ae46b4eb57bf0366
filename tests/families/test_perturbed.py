"""Perturbed-attention guidance of the families that diffusers has a pipeline of it for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import HunyuanDiTPAGPipeline, PixArtSigmaPAGPipeline

import mhla_diffusers as mhla

from ..models import assert_changed, relative_change
from ..pipelines import quiet
from .cases import Case, case_of

PIXART = (PixArtSigmaPAGPipeline, case_of("pixart_sigma"), "transformer_blocks.1")
CASES = {
    "pixart": (*PIXART, 1.5),
    "pixart-without-guidance": (*PIXART, 1.0),
    # diffusers' own pipeline fails without classifier-free guidance, for which it has sizes of three parts
    "hunyuan_dit": (HunyuanDiTPAGPipeline, case_of("hunyuan_dit"), "blocks.1", 1.5),
}


def generator_of(kind: type, case: Case, layer: str, guidance: float) -> tuple[Any, Callable[..., torch.Tensor]]:
    """A pipeline, and what generates latents with a scale of the perturbed guidance."""
    pipe = quiet(kind(**case.pipeline().components, pag_applied_layers=[layer]))

    def run(scale: float) -> torch.Tensor:
        call = {**case.call, "output_type": "latent", "guidance_scale": guidance, "pag_scale": scale}
        return pipe(**call, generator=torch.Generator().manual_seed(3)).images

    return pipe, run


@pytest.mark.parametrize(("kind", "case", "layer", "guidance"), CASES.values(), ids=CASES)
def test_perturbed_attention_guidance(kind, case, layer, guidance):
    """A patch that lists all pairs gives what it replaces, in all branches; a real one stays in those not perturbed."""
    pipe, run = generator_of(kind, case, layer, guidance)
    own, expected = run(0.0), run(2.0)
    assert_changed(expected, own)
    mhla.apply_mhla(pipe, blocks=(1, 1), sparse="content", density=1.0)
    assert relative_change(run(2.0), expected) < 1e-4  # float32 sums in another order, through two steps
    mhla.remove_mhla(pipe)
    mhla.apply_mhla(pipe, blocks=case.blocks, sparse="none")
    patched = run(0.0)
    assert_changed(patched, own)
    # at a scale of nearly nothing all branches but the perturbed one count
    assert relative_change(run(1e-7), patched) < 1e-4
    assert_changed(run(2.0), patched)
    assert all(layer.runs_mhla for layer in mhla.describe(pipe))
