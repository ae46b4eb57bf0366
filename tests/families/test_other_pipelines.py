"""Pipelines beside a family's own: with pictures and keyframes, distilled, and with perturbed-attention guidance."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import mhla_diffusers as mhla

from ..models import assert_changed, relative_change
from ..pipelines import quiet
from .cases import Case, all_listed, case_of, flow, flux2_pipeline, plain

PICTURE = Image.new("RGB", (96, 64), "red")
KEYFRAMES = [LTX2VideoCondition(PICTURE, index, strength=1.0, crf=0) for index in (0, 2)]
KLEIN: dict[str, Any] = {"guidance_embeds": False}
# pipeline, case, what differs in its call
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "klein": ("Flux2KleinPipeline", "flux2", {}),
    # conditions as tokens before or after those of the video, and a time for every token, 0 in the first frame
    "ltx, conditions": (
        "LTXConditionPipeline",
        "ltx",
        {"image": [PICTURE] * 2, "frame_index": [0, 8], "strength": [1.0, 0.8]},
    ),
    "ltx2, picture": ("LTX2ImageToVideoPipeline", "ltx2", {"image": PICTURE, "image_crf": 0}),
    "ltx2, keyframes": ("LTX2ConditionPipeline", "ltx2", {"conditions": KEYFRAMES}),
}


def generates(pipe: Any, call: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """What generates latents from the same noise."""

    def run(**settings: Any) -> torch.Tensor:
        given = {**call, "output_type": "latent", **settings}
        found = pipe(**given, generator=torch.Generator().manual_seed(3))
        return found.frames if hasattr(found, "frames") else found.images

    return run


@pytest.mark.parametrize(("kind", "name", "call"), OTHERS.values(), ids=OTHERS)
def test_other_pipelines_are_patched_and_restored(kind: str, name: str, call: dict[str, Any]) -> None:
    case = case_of(name)
    if kind == "Flux2KleinPipeline":
        pipe = quiet(flux2_pipeline(case.transformer(**KLEIN), kind, is_distilled=True))
    else:
        parts = case.pipeline().components | ({"scheduler": flow()} if kind == "LTXConditionPipeline" else {})
        pipe = quiet(getattr(diffusers, kind)(**parts))
    run = generates(pipe, {**case.call, **call})
    expected = run()
    mhla.apply_mhla(pipe, **all_listed(name))
    assert relative_change(run(), expected) < 1e-4  # float32 sums in another order, through two steps
    assert {layer.grid for layer in mhla.describe(pipe)} == {case.grid}
    mhla.remove_mhla(pipe)
    mhla.apply_mhla(pipe, **plain(name))
    assert_changed(run(), expected)
    mhla.change_mhla(pipe, softmax_steps=2)
    assert torch.equal(run(), expected)
    mhla.remove_mhla(pipe)
    assert torch.equal(run(), expected)


# pipeline, case, perturbed layer, guidance
PERTURBED = {
    "pixart": ("PixArtSigmaPAGPipeline", case_of("pixart_sigma"), "transformer_blocks.1", 1.5),
    "sana-without-guidance": ("SanaPAGPipeline", case_of("sana"), "transformer_blocks.1", 1.0),
    # diffusers' own pipeline fails without classifier-free guidance, for which it has sizes of three parts
    "hunyuan_dit": ("HunyuanDiTPAGPipeline", case_of("hunyuan_dit"), "blocks.1", 1.5),
}


@pytest.mark.parametrize(("kind", "case", "layer", "guidance"), PERTURBED.values(), ids=PERTURBED)
def test_perturbed_attention_guidance(kind: str, case: Case, layer: str, guidance: float) -> None:
    """A patch that lists all pairs gives what it replaces, in all branches; a real one stays in those not perturbed."""
    pipe = quiet(getattr(diffusers, kind)(**case.pipeline().components, pag_applied_layers=[layer]))
    run = generates(pipe, {**case.call, "guidance_scale": guidance})
    own, expected = run(pag_scale=0.0), run(pag_scale=2.0)
    assert_changed(expected, own)
    mhla.apply_mhla(pipe, **all_listed(case.name))
    assert relative_change(run(pag_scale=2.0), expected) < 1e-4  # float32 sums in another order, through two steps
    mhla.remove_mhla(pipe)
    mhla.apply_mhla(pipe, **plain(case.name))
    patched = run(pag_scale=0.0)
    assert_changed(patched, own)
    # at a scale of nearly nothing all branches but the perturbed one count
    assert relative_change(run(pag_scale=1e-7), patched) < 1e-4
    assert_changed(run(pag_scale=2.0), patched)
    assert all(layer.runs_mhla for layer in mhla.describe(pipe))
    assert torch.equal(run(pag_scale=0.0), patched)
    mhla.change_mhla(pipe, softmax_steps=1.0)  # the branches are then attended to in other batches
    assert relative_change(run(pag_scale=2.0), expected) < 1e-4
    mhla.remove_mhla(pipe)
    assert torch.equal(run(pag_scale=0.0), own)
