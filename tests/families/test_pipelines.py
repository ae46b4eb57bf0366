"""Real pipelines of every family with a sparse patch, and with IP-Adapters."""

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


# IP-Adapters, whose processors have weights and let attentions look at a picture


_FEATURES = 8
"""Channels of the embedding of a picture."""


def load_into_flux(pipe: Any) -> None:
    """An adapter with four tokens for a picture, of the two blocks of two streams."""
    text, width = pipe.transformer.config.joint_attention_dim, pipe.transformer.inner_dim
    layers = {"weight": (width, text), "bias": (width,)}
    tokens = {"proj.weight": (4 * text, _FEATURES), "proj.bias": (4 * text,), "norm.weight": (text,)}
    shapes = {
        "image_proj": {**tokens, "norm.bias": (text,)},
        "ip_adapter": {
            f"{index}.to_{to}_ip.{kind}": x for index in (0, 1) for to in "kv" for kind, x in layers.items()
        },
    }
    generator = torch.Generator().manual_seed(0)
    adapter = {
        part: {name: torch.randn(*shape, generator=generator) / 4 for name, shape in of_part.items()}
        for part, of_part in shapes.items()
    }
    pipe.load_ip_adapter(adapter, weight_name="", image_encoder_pretrained_model_name_or_path=None)


_SEEN = torch.randn(1, 1, _FEATURES, generator=torch.Generator().manual_seed(1))
LOOKING = {"ip_adapter_image_embeds": [_SEEN], "negative_ip_adapter_image_embeds": [torch.zeros_like(_SEEN)]}


@pytest.mark.parametrize("first", ["adapter", "patch"])
def test_an_ip_adapter_goes_on_looking(first: str) -> None:
    """The adapter's own processor runs, and the call of the image's tokens among them is answered."""
    case = case_of("flux")
    own = case.pipeline()
    load_into_flux(own)
    expected = generates(own, {**case.call, **LOOKING})()
    assert_changed(expected, generates(case.pipeline(), case.call)())
    pipe = case.pipeline()
    if first == "adapter":
        load_into_flux(pipe)
    mhla.apply_mhla(pipe, **ALL_LISTED)
    if first == "patch":
        load_into_flux(pipe)
    run = generates(pipe, {**case.call, **LOOKING})
    assert torch.equal(run(), expected)
    mhla.change_mhla(pipe, **FIRST_DENSE)
    assert not torch.equal(run(), expected) and tally(pipe)[0] > 0
    pipe.unload_ip_adapter()
    assert not torch.equal(generates(pipe, case.call)(), expected)
    mhla.remove_mhla(pipe)
    assert torch.equal(generates(pipe, case.call)(), generates(case.pipeline(), case.call)())
