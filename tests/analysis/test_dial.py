"""The density turned up and down in place, and a budget spent where an audit has found the error."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

import mhla_diffusers as mhla
from mhla_diffusers.analysis.dial import plan_spending
from mhla_diffusers.families import get_family
from mhla_diffusers.patching import mhla_disabled
from mhla_diffusers.tiny import load_tiny

from .. import models
from ..patching.shared import assert_same_footprint, footprint
from ..pipelines import PIPELINES, generate, wan22_pipeline
from .tiny import run_tiny

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1)
SOFTMAX = ["wan", "dit"]


def run_of(model, name):
    return lambda: models.output(model, models.inputs(name))


def patched(name, density=0.1):
    settings = {"sparse": "content", "block_size": 4, "density": density}
    return mhla.apply_mhla(models.FAMILIES[name].build(), blocks=models.FAMILIES[name].blocks, **settings)


def error(model, name):
    return models.relative_change(run_of(model, name)(), run_of(models.FAMILIES[name].build(), name)())


@pytest.mark.parametrize(("name", "sparse"), [("wan", True), ("dit", True), ("wan", False), ("sana", False)])
def test_the_error_falls_with_what_is_spent(name, sparse):
    model = patched(name) if sparse else models.patched(name)
    audit = mhla.audit(model, run_of(model, name))
    errors = [error(mhla.densify(model, audit, density), name) for density in DENSITIES]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0 < errors[0], "as before the patch, bit for bit"
    assert len(set(errors)) >= (8 if sparse else 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dit", "sana"])
def test_the_error_of_trained_pipelines_falls_with_what_is_spent(family):
    sparse = {} if family == "sana" else {"sparse": "content", "block_size": 4, "density": 0.1}
    pipe = mhla.apply_mhla(load_tiny(family), **sparse)
    run = run_tiny(pipe, steps=2)
    audit = mhla.audit(pipe, run)
    errors = [Along(mhla.densify(pipe, audit, density), run).error for density in DENSITIES]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0 < errors[0]


class Along:
    """Error of a transformer's output against the unpatched one's on the same input, along a pipeline's own way."""

    def __init__(self, pipe, run):
        self.transformer, self.sums, self.inside = pipe.transformer, [0.0, 0.0], False
        handle = self.transformer.register_forward_hook(self.compare, with_kwargs=True)
        with torch.no_grad():
            run()
        handle.remove()
        self.error = (self.sums[0] / self.sums[1]) ** 0.5

    def compare(self, transformer, args, kwargs, output):
        if self.inside:
            return
        self.inside = True
        with mhla_disabled(transformer):
            expected = transformer(*args, **{**kwargs, "return_dict": False})[0]
        self.inside = False
        found = output[0] if isinstance(output, tuple) else output.sample
        self.sums[0] += float((found - expected).double().square().sum())
        self.sums[1] += float(expected.double().square().sum())


def test_steps_whose_error_is_largest_are_given_back_first():
    """A budget of a quarter in a run of four steps, all error in the first one."""
    pipe = mhla.apply_mhla(PIPELINES["sana"].build(), blocks=(4, 2))
    call = {**PIPELINES["sana"].call, "num_inference_steps": 4}
    run = lambda: pipe(**call, generator=torch.Generator().manual_seed(3))  # noqa: E731
    audit = mhla.audit(pipe, run)
    for layer in audit.layers:
        layer.errors[1:] *= 1e-6
    assert plan_spending(audit.layers, 0.26, knows_steps=True).steps == 1
    mhla.densify(pipe, audit, 0.26)
    assert mhla.describe(pipe)[0].softmax_steps == 0.25
    assert mhla.audit(pipe, run).rests == (True, False, False, False)
    assert not plan_spending(audit.layers, 0.26, knows_steps=False).steps


def test_layers_whose_error_moves_most_get_their_attention_back():
    model = models.patched("sana")
    audit = mhla.audit(model, run_of(model, "sana"))
    mhla.densify(model, audit, 0.34)
    worst = max(audit.layers, key=lambda layer: layer.moves).name
    assert [layer.name for layer in mhla.describe(model) if not layer.replaced] == [worst]
    mhla.densify(model, audit, 0.1)
    assert all(layer.replaced for layer in mhla.describe(model)), "a smaller budget takes it away again"


def test_about_as_much_is_spent_as_there_is():
    model = patched("dit")
    audit = mhla.audit(model, run_of(model, "dit"))
    for density in (0.1, 0.35, 0.8):
        mhla.densify(model, audit, density)
        run_of(model, "dit")()
        found = mhla.describe(model)
        spent = sum(layer.sparse.density if layer.replaced else 1 for layer in found) / len(found)
        assert spent == pytest.approx(density, abs=0.5 / 16), "half a block of 16 in every list"


def test_both_transformers_spend_in_their_own_steps():
    pipe = mhla.apply_mhla(wan22_pipeline(), sparse="none", blocks=(1, 1, 1))
    run = lambda: generate("wan22", pipe)  # noqa: E731
    audit = mhla.audit(pipe, run)
    for layer in audit.layers:  # all of it in the first step of each transformer
        first = int(layer.squares.sum(dim=1).nonzero()[0])
        layer.errors[first + 1 :] *= 1e-6
    mhla.densify(pipe, audit, 0.999)
    assert mhla.audit(pipe, run).rests.count(True) >= 1
    mhla.densify(pipe, audit, 1)
    assert mhla.audit(pipe, run).rests == (True,) * 3
    assert torch.equal(run(), generate("wan22", wan22_pipeline()))


def test_a_densified_patch_is_saved_and_loaded(tmp_path):
    model = patched("wan")
    mhla.densify(model, mhla.audit(model, run_of(model, "wan")), 0.3)
    mhla.save_mhla(model, tmp_path)
    loaded = mhla.load_mhla(models.wan(), tmp_path)
    assert torch.equal(run_of(loaded, "wan")(), run_of(model, "wan")())
    mhla.remove_mhla(model)
    assert torch.equal(run_of(model, "wan")(), run_of(models.wan(), "wan")())


@pytest.mark.parametrize("name", ["wan", "sana"])
def test_a_patch_without_lists_has_no_density_to_set(name):
    model = models.patched(name)
    before = footprint(model)
    with pytest.raises(ValueError, match="sparse='none' has no density to set.*densify"):
        mhla.set_density(model, 0.1)
    assert_same_footprint(model, before)


def test_a_causal_patch_gives_no_layer_back_to_attention_that_sees_later_frames():
    model = models.wan()
    mhla.apply_mhla(model, blocks=(2, 2, 3), causal="block", block_length=2, sparse="own")
    audit, before = mhla.audit(model, run_of(model, "wan")), footprint(model)
    for turn in (mhla.set_density, lambda model, density: mhla.densify(model, audit, density)):
        for density in (0.3, 1):
            with pytest.raises(ValueError, match=r"causal='block' is not to see later ones"):
                turn(model, density)
    assert_same_footprint(model, before)


def test_densities_that_are_none_are_refused():
    model = patched("dit")
    audit = mhla.audit(model, run_of(model, "dit"))
    before = footprint(model)
    for density in (0, -0.1, 1.01, True, "5%", float("nan")):
        for turn in (mhla.set_density, lambda model, density: mhla.densify(model, audit, density)):
            with pytest.raises(ValueError, match=r"density=.* must be .*\(0, 1\]"):
                turn(model, density)
            assert_same_footprint(model, before)


def test_the_audit_of_another_model_is_refused():
    model, other = models.patched("sana"), models.patched("dit")
    of_other = mhla.audit(other, run_of(other, "dit"))
    fewer = models.wan(num_layers=2)
    mhla.apply_mhla(fewer, sparse="none", blocks=(2, 2, 3))
    before = footprint(fewer)
    of_more = mhla.audit(wan := models.patched("wan"), run_of(wan, "wan"))
    with pytest.raises(ValueError, match="The audit is of another model"):
        mhla.densify(fewer, of_more, 0.5)
    assert_same_footprint(fewer, before)
    for turn in (mhla.set_density, lambda model, density: mhla.densify(model, of_other, density)):
        with pytest.raises(ValueError, match="not patched"):
            turn(models.dit(), 0.5)
    audit = mhla.audit(model, run_of(model, "sana"))
    with mhla_disabled(model), pytest.raises(ValueError, match="switched off"):
        mhla.densify(model, audit, 0.5)


def test_a_density_without_a_step_to_matter_in_is_refused():
    model = patched("dit")
    found = mhla.audit(model, run_of(model, "dit"))
    mhla.densify(model, found, 1)
    assert "disabled in every step" in str(mhla.audit(model, run_of(model, "dit")))
    with pytest.raises(ValueError, match=r"softmax_steps=1.0 disables .*softmax_steps=0\)"):
        mhla.set_density(model, 0.2)
    mhla.set_density(mhla.change_mhla(model, softmax_steps=0), 0.2)
    with pytest.raises(ValueError, match="audit=None must be"):
        mhla.densify(model, None, 0.2)
    with pytest.raises(ValueError, match="run='a cat' must be a function"):
        mhla.audit(model, "a cat")


def test_the_dial_keeps_the_backend_that_was_set_before_patching():
    model = models.wan()
    model.set_attention_backend("_native_math")
    mhla.apply_mhla(model, blocks=(2, 2, 3), sparse="content", block_size=4)
    mhla.remove_mhla(mhla.set_density(model, 0.5))
    assert {attn.processor._attention_backend for attn in get_family(model).self_attentions(model).values()} == {
        AttentionBackendName._NATIVE_MATH
    }
