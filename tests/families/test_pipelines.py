"""Real pipelines of every family with a sparse patch, with guidance that skips attentions, and with IP-Adapters."""

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import mhla_diffusers as mhla

from ..models import assert_changed
from ..pipelines import quiet
from .cases import ALL_LISTED, CASES, NAMES, SPARSE, case_of, flow, flux2_components, pipeline, plain, tally

FIRST_DENSE = {**SPARSE, "dense_first": 1, "dense_last": 0, "dense_every": 0}


def generates(pipe: Any, call: dict[str, Any], **usual: Any) -> Callable[..., torch.Tensor]:
    """What generates from the same noise."""

    def run(**settings: Any) -> torch.Tensor:
        found = pipe(**{**call, **usual, **settings}, generator=torch.Generator().manual_seed(3))
        return torch.as_tensor(found.frames if hasattr(found, "frames") else found.images)

    return run


@pytest.mark.parametrize("name", [name for name in CASES if name in NAMES or name.startswith(("skyreels", "chrono"))])
def test_a_pipeline_runs_the_patch_in_the_steps_that_are_not_dense(name: str) -> None:
    """Which the tally counts, in every transformer; removal restores the pipeline bit for bit."""
    case = case_of(name)
    pipe = case.pipeline()
    run, is_sparse = generates(pipe, case.call), case.of_family.computes == "softmax"
    expected = run()
    mhla.apply_mhla(pipe, **FIRST_DENSE if is_sparse else plain(name, dense_first=1))
    patched, forced = run(), name == "skyreels_v2_forcing"
    assert torch.equal(patched, expected) == forced
    for one in mhla.patching.find_patched(pipe).values() if is_sparse else ():
        sparse, dense = tally(one.transformer)
        assert dense.keys() == {"a mask between tokens" if forced else "dense steps"}
        later = case.call["num_inference_steps"] - 1 - (name == "minimax_h3")
        assert forced or sparse == later * dense["dense steps"] > 0
    mhla.change_mhla(pipe, **SPARSE if is_sparse else plain(name), dense_first=0)
    assert torch.equal(run(), patched) == forced
    assert mhla.describe(pipe)
    mhla.remove_mhla(pipe)
    assert torch.equal(run(), expected)


PICTURE = Image.new("RGB", (96, 64), "red")
KEYFRAMES = [LTX2VideoCondition(PICTURE, index, strength=1.0, crf=0) for index in (0, 2)]
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


@pytest.mark.parametrize(("kind", "name", "call"), OTHERS.values(), ids=OTHERS)
def test_other_pipelines_are_patched_and_restored(kind: str, name: str, call: dict[str, Any]) -> None:
    case = case_of(name)
    if kind == "Flux2KleinPipeline":
        make = pipeline(kind, lambda: flux2_components() | {"is_distilled": True})
        pipe = quiet(make(case.transformer(guidance_embeds=False)))
    else:
        parts = case.pipeline().components | ({"scheduler": flow()} if kind == "LTXConditionPipeline" else {})
        pipe = quiet(getattr(diffusers, kind)(**parts))
    run = generates(pipe, {**case.call, **call}, output_type="latent")
    expected = run()
    mhla.apply_mhla(pipe, **ALL_LISTED)
    assert torch.equal(run(), expected)
    assert {layer.grid for layer in mhla.describe(pipe)} == {case.grid}
    mhla.change_mhla(pipe, **FIRST_DENSE)
    assert_changed(run(), expected)
    assert tally(pipe)[1].keys() == {"dense steps"}
    mhla.remove_mhla(pipe)
    assert torch.equal(run(), expected)


# Guidance by attentions that are perturbed or skipped


@pytest.mark.parametrize(
    ("kind", "name", "layer"),
    [
        ("PixArtSigmaPAGPipeline", "pixart_sigma", "transformer_blocks.1"),
        ("HunyuanDiTPAGPipeline", "hunyuan_dit", "blocks.1"),
        ("StableDiffusion3PAGPipeline", "sd3", "blocks.1"),
    ],
)
def test_perturbed_attention_guidance(kind: str, name: str, layer: str) -> None:
    """A sparse patch that lists all pairs gives what it replaces in all branches."""
    case = case_of(name)
    made = getattr(diffusers, kind)
    taken = inspect.signature(made.__init__).parameters
    parts = {key: part for key, part in case.pipeline().components.items() if key in taken}
    pipe = quiet(made(**parts, pag_applied_layers=[layer]))
    run = generates(pipe, {**case.call, "guidance_scale": 1.5}, output_type="latent")
    own, expected = run(pag_scale=0.0), run(pag_scale=2.0)
    assert_changed(expected, own)
    mhla.apply_mhla(pipe, **ALL_LISTED)
    assert torch.equal(run(pag_scale=2.0), expected)
    mhla.change_mhla(pipe, **SPARSE, dense_first=0, dense_last=0)
    patched = run(pag_scale=2.0)
    assert not torch.equal(patched, expected) and not torch.equal(run(pag_scale=0.0), patched)
    mhla.remove_mhla(pipe)
    assert torch.equal(run(pag_scale=0.0), own)


def test_skip_layer_guidance_of_sd3() -> None:
    case = case_of("sd3")
    pipe = case.pipeline()
    run = generates(pipe, {**case.call, "skip_guidance_layers": [1], "skip_layer_guidance_stop": 1.0})
    expected = run()
    mhla.apply_mhla(pipe, **ALL_LISTED)
    assert torch.equal(run(), expected)
    mhla.change_mhla(pipe, **FIRST_DENSE)
    assert not torch.equal(run(), expected)
    # the first step skips nothing; the second has another forward, with two of its three layers
    assert tally(pipe) == (5, {"dense steps": 3})


# IP-Adapters, whose processors have weights and let attentions look at a picture


_FEATURES = 8
"""Channels of the embedding of a picture."""


def random_tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name.replace("__", "."): torch.randn(*shape, generator=generator) / 4 for name, shape in shapes.items()}


def load_into_flux(pipe: Any) -> None:
    """An adapter with four tokens for a picture, of the two blocks of two streams."""
    text, width = pipe.transformer.config.joint_attention_dim, pipe.transformer.inner_dim
    projection = random_tensors(
        proj__weight=(4 * text, _FEATURES), proj__bias=(4 * text,), norm__weight=(text,), norm__bias=(text,)
    )
    shapes = {f"{side}__{kind}": (width, text)[: 1 + (kind == "weight")] for side in ("to_k_ip", "to_v_ip")
              for kind in ("weight", "bias")}  # fmt: skip
    layers = {f"{index}.{key}": x for index in (0, 1) for key, x in random_tensors(**shapes).items()}
    none = {"weight_name": "", "image_encoder_pretrained_model_name_or_path": None}
    pipe.load_ip_adapter({"image_proj": projection, "ip_adapter": layers}, **none)


_SEEN = torch.randn(1, 1, _FEATURES, generator=torch.Generator().manual_seed(1))
LOOKING = {"ip_adapter_image_embeds": [_SEEN], "negative_ip_adapter_image_embeds": [torch.zeros_like(_SEEN)]}


@pytest.mark.parametrize("first", ["adapter", "patch"])
def test_an_ip_adapter_goes_on_looking(first: str) -> None:
    """The adapter's own processor runs, and the call of the image's tokens among them is answered."""
    case, load, seen = case_of("flux"), load_into_flux, LOOKING
    own = case.pipeline()
    load(own)
    expected = generates(own, {**case.call, **seen})()
    assert_changed(expected, generates(case.pipeline(), case.call)())
    pipe = case.pipeline()
    if first == "adapter":
        load(pipe)
    mhla.apply_mhla(pipe, **ALL_LISTED)
    if first == "patch":
        load(pipe)
    run = generates(pipe, {**case.call, **seen})
    assert torch.equal(run(), expected)
    mhla.change_mhla(pipe, **FIRST_DENSE)
    assert not torch.equal(run(), expected) and tally(pipe)[0] > 0
    pipe.unload_ip_adapter()
    assert not torch.equal(generates(pipe, case.call)(), expected)
    mhla.remove_mhla(pipe)
    assert torch.equal(generates(pipe, case.call)(), generates(case.pipeline(), case.call)())
