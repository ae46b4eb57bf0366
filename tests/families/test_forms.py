"""What runs beside a patch and changes how a model projects or runs: on one family of every form of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mhla_diffusers as mhla

from ..models import assert_changed, output, relative_change
from ..patching.shared import PROJECTIONS, with_lora
from .cases import ALL_LISTED, ROUNDING, SPARSE, case_of, handle, tally

FORMS = (
    "dit",  # calls PyTorch's attention itself, as do sd3, cogvideox, mochi and others below
    "flux",  # blocks of two streams, then of one
    "flux2",  # attention that also runs the feed-forward
    "framepack",  # extra tokens before and after the grid
    "hunyuan_video",  # text after the grid, masked by key
    "ideogram4",  # segments as a mask between tokens, padding that is alike
    "krea2",  # heads that share keys
    "ltx2",  # gates, sound beside the video
    "minimax_h3",  # one packed sequence found by indices
    "mochi",  # every sample by itself
    "sd3",
    "skyreels_v2",
    "wan",
    "z_image",  # lists of pictures and texts
)
forms = pytest.mark.parametrize("name", FORMS)


def gradients(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """Gradients of the output's mean square with respect to all weights."""
    model.zero_grad()
    torch.manual_seed(0)  # DiT drops labels
    found = model(**arguments, return_dict=False)[0]
    (found if isinstance(found, torch.Tensor) else torch.stack(list(found))).square().mean().backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@forms
def test_gradients_are_the_same_under_gradient_checkpointing(name: str) -> None:
    """And of a patch that lists all pairs those of the model's own attention."""
    case = case_of(name)
    model, arguments = case.short().train(), case.inputs()
    own = gradients(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    if name != "ideogram4":  # whose padding has other outputs, which nothing reads
        assert relative_change(gradients(model, arguments), own) < ROUNDING
    mhla.change_mhla(model, **SPARSE)
    expected = gradients(model, arguments)
    assert_changed(expected, own)
    model.enable_gradient_checkpointing()
    assert torch.equal(gradients(model, arguments), expected)
    assert handle(model).tally.sparse > 0  # of blocks that ran again


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("framepack", "mochi")])
def test_a_compiled_model_gives_what_an_eager_one_gives(name: str) -> None:
    """In one graph where the model dispatches its attention; elsewhere attention runs between graphs."""
    case = case_of(name)
    model, arguments = mhla.apply_mhla(case.short(), **SPARSE), case.inputs()
    expected = output(model, arguments)
    counted = tally(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=case.of_family.dispatches, backend="eager")
    assert torch.equal(output(compiled, arguments), expected)
    assert tally(model) == counted


# Weights


FUSED = ("auraflow", "cogvideox", "flux", "hunyuan_dit", "ltx", "ltx2", "pixart", "sd3", "wan", "chronoedit")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("first", ["fused", "patched"])
def test_fused_projections_are_the_models_own(name: str, first: str) -> None:
    """Projections that are unfused, patched or not, see the changes of a LoRA loaded later: no weights are stale."""
    case = case_of(name)
    arguments = case.inputs()
    model, reference = case.transformer(), case.transformer()
    steps: list[Callable[[], Any]] = [model.fuse_qkv_projections, lambda: mhla.apply_mhla(model, **ALL_LISTED)]
    for step in steps if first == "fused" else reversed(steps):
        step()
    reference.fuse_qkv_projections()
    assert torch.equal(output(model, arguments), output(reference, arguments))
    mhla.change_mhla(model, **SPARSE)
    assert_changed(output(model, arguments), output(reference, arguments))
    assert not tally(model)[1]
    mhla.change_mhla(model, **ALL_LISTED)
    for one in (model, reference):
        one.unfuse_qkv_projections()
    assert torch.equal(output(model, arguments), output(reference, arguments))
    expected = output(with_lora(reference, *PROJECTIONS[:3]), arguments)
    assert torch.equal(output(with_lora(model, *PROJECTIONS[:3]), arguments), expected)
    assert torch.equal(output(mhla.remove_mhla(model), arguments), expected)
    mhla.apply_mhla(model, **SPARSE).fuse_qkv_projections()
    mhla.remove_mhla(model).unfuse_qkv_projections()
    assert torch.equal(output(model, arguments), expected)
