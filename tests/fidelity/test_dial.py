"""Exactness turned up and down in place, and spent where an audit has found the error."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from hypothesis import given, settings
from hypothesis import strategies as st

import mhla_diffusers as mhla
import mhla_diffusers.attention.merge as merge
from mhla_diffusers.attention.tile_scores import budget_of, spend
from mhla_diffusers.families import get_family
from mhla_diffusers.fidelity import dial
from mhla_diffusers.fidelity.spending import plan_spending
from mhla_diffusers.patching import mhla_disabled
from mhla_diffusers.tiny import load_tiny

from .. import models
from ..analysis.tiny import run_tiny
from ..patching.shared import assert_same_footprint, footprint
from ..pipelines import PIPELINES, generate, wan22_pipeline

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1)
TILES = {"wan": (2, 4, 3), "dit": (4, 4), "sana": None}
SOFTMAX = ["wan", "dit"]


def run_of(model, name):
    return lambda: models.output(model, models.inputs(name))


def patched(name, exact, share=0.1):
    """A model with exact tiles that are calibrated or have β and λ fitted to what they replace."""
    model = models.FAMILIES[name].build()
    tiles = {"exact": exact, "exact_tiles": TILES[name], "density": share}
    return mhla.apply_mhla(model, blocks=models.FAMILIES[name].blocks, **tiles, calibration=run_of(model, name))


def error(model, name):
    return models.relative_change(run_of(model, name)(), run_of(models.FAMILIES[name].build(), name)())


def lists(model):
    return {name: layer.sparse.mask for name, layer in mhla.mhla_layers(model).items()}


@pytest.mark.parametrize("exact", ["calibrated", "content"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_the_error_falls_with_the_share(name, exact):
    model = patched(name, exact)
    errors = [error(mhla.set_density(model, share), name) for share in SHARES]
    assert errors == sorted(errors, reverse=True)
    # at 1 softmax attention's sums in another order
    assert errors[-1] < 1e-6 < 1e-3 < errors[0]


@pytest.mark.parametrize(
    ("name", "exact"),
    [(name, exact) for name in SOFTMAX for exact in ("calibrated", "content", "none")] + [("sana", "none")],
)
def test_the_error_falls_with_what_is_spent(name, exact):
    model = models.patched(name) if exact == "none" else patched(name, exact)
    audit = mhla.audit(model, run_of(model, name))
    errors = [error(mhla.densify(model, audit, share), name) for share in SHARES]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0 < errors[0], "as before the patch, bit for bit"
    assert len(set(errors)) >= (3 if exact == "none" else 9)


@pytest.mark.parametrize("exact", ["calibrated", "content"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_what_is_spent_by_an_audit_leaves_less_than_the_dial(name, exact):
    """It knows what every pair is worth, not only the heaviest fifth, and fits β and λ to the new share."""
    model = patched(name, exact)
    audit = mhla.audit(model, run_of(model, name))
    by_dial = error(mhla.set_density(model, 0.5), name)
    assert error(mhla.densify(model, audit, 0.5), name) < 0.95 * by_dial


@pytest.mark.parametrize("how", ["dial", "densify"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_at_a_share_of_one_no_linear_branch_is_computed(name, how, monkeypatch):
    model = patched(name, "calibrated")
    audit = mhla.audit(model, run_of(model, name))
    calls = []

    def counted(call):
        calls.append(call)
        return linear_branch(call)

    linear_branch = merge.linear_branch
    monkeypatch.setattr(merge, "linear_branch", counted)
    run_of(model, name)()
    assert len(calls) == len(mhla.mhla_layers(model)), "of every layer, as long as the share is below 1"
    calls.clear()
    mhla.set_density(model, 1) if how == "dial" else mhla.densify(model, audit, 1)
    run_of(model, name)()
    assert not calls


def test_one_and_back_gives_the_lists_of_before(tmp_path):
    model = patched("wan", "calibrated", 0.3)
    before, expected = lists(model), run_of(model, "wan")()
    mhla.set_density(model, 1)
    mhla.save_mhla(model, tmp_path)
    for one in (model, mhla.load_mhla(models.wan(), tmp_path)):
        mhla.set_density(one, 0.3)
        assert all(torch.equal(mask, before[name]) for name, mask in lists(one).items())
        assert torch.equal(run_of(one, "wan")(), expected)
    mhla.set_density(model, 0.6)
    mhla.set_density(model, 1)
    other = mhla.set_density(patched("wan", "calibrated", 0.3), 0.5)
    mhla.set_density(model, 0.5)
    assert all(torch.equal(mask, lists(other)[name]) for name, mask in lists(model).items())


@pytest.mark.parametrize("share", [0.3, 0.55, 0.9])
def test_beyond_what_is_known_a_budget_is_spread_evenly(share):
    """Rows of all heads and layers get one pair in turn, and no key tile is preferred."""
    scores = [torch.zeros(2, 8, 8) for _ in range(3)]
    masks = spend(scores, share)
    of_rows = torch.stack(masks).sum(dim=-1)
    assert int(of_rows.max()) - int(of_rows.min()) <= 1
    of_keys = torch.stack(masks).sum(dim=2)
    assert int(of_keys.max()) - int(of_keys.min()) <= 1
    assert int(of_rows.sum()) == round(share * 3 * 128)


@settings(deadline=None, max_examples=50)
@given(
    share=st.floats(0.01, 1),
    seed=st.integers(0, 99),
    known=st.floats(0, 1),
    layers=st.integers(1, 3),
    tiles=st.integers(1, 7),
)
def test_a_budget_is_spent_to_the_last_pair(share, seed, known, layers, tiles):
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, 2, tiles, tiles)
    scores = torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) < known)
    masks = torch.stack(spend(list(scores), share))
    assert int(masks.sum()) == budget_of([layer.shape for layer in scores], share)
    assert masks.any(dim=-1).all()
    best = scores.amax(dim=-1)
    assert torch.equal((scores * masks).amax(dim=-1), best), "every query tile has its best key tile"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tiles"), [("wan", {"exact_tiles": (3, 4, 4)}), ("dit", {"exact_tiles": (4, 4)}), ("sana", {})]
)
def test_the_error_of_trained_pipelines_falls_with_what_is_spent(family, tiles):
    pipe = mhla.apply_mhla(load_tiny(family), **tiles)
    run = run_tiny(pipe, steps=2 if family == "wan" else 4)
    audit = mhla.audit(pipe, run)
    errors = [Along(mhla.densify(pipe, audit, share), run).error for share in SHARES]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0 < errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tiles"), [("wan", (3, 4, 4)), ("dit", (4, 4))])
@pytest.mark.parametrize("exact", ["calibrated", "content"])
def test_the_error_of_trained_pipelines_falls_with_the_share(family, tiles, exact):
    pipe = load_tiny(family)
    run = run_tiny(pipe, steps=2 if family == "wan" else 4)
    mhla.apply_mhla(pipe, sparse=exact, exact_tiles=tiles, calibration=run)
    errors = [Along(mhla.set_density(pipe, share), run).error for share in SHARES]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < 1e-2 < errors[0]


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


@pytest.mark.parametrize("exact", ["calibrated", "content"])
def test_no_more_is_spent_than_there_is(exact):
    model = patched("dit", exact)
    audit = mhla.audit(model, run_of(model, "dit"))
    for share in (0.1, 0.35, 0.8):
        mhla.densify(model, audit, share)
        found = mhla.describe(model)
        spent = sum(layer.sparse.share if layer.replaced else 1 for layer in found) / len(found)
        # a pair more or less in a layer of 512
        assert share - 0.07 <= spent <= share + 0.002


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
    model = patched("wan", "content")
    mhla.densify(model, mhla.audit(model, run_of(model, "wan")), 0.3)
    mhla.save_mhla(model, tmp_path)
    loaded = mhla.load_mhla(models.wan(), tmp_path)
    assert torch.equal(run_of(loaded, "wan")(), run_of(model, "wan")())
    mhla.remove_mhla(model)
    assert torch.equal(run_of(model, "wan")(), run_of(models.wan(), "wan")())


@pytest.mark.parametrize("name", ["wan", "sana"])
def test_what_the_dial_cannot_turn_is_refused(name):
    model = models.patched(name)
    before = footprint(model)
    with pytest.raises(ValueError, match="sparse='none' has no share to set.*densify"):
        mhla.set_density(model, 0.1)
    assert_same_footprint(model, before)
    with pytest.raises(ValueError, match="not patched"):
        mhla.set_density(models.FAMILIES[name].build(), 0.1)


def test_a_causal_patch_gives_no_layer_back_to_attention_that_sees_later_frames():
    model = models.wan()
    mhla.apply_mhla(model, blocks=(2, 2, 3), causal="block", block_length=2, sparse="own")
    audit, before = mhla.audit(model, run_of(model, "wan")), footprint(model)
    for turn in (mhla.set_density, lambda model, share: mhla.densify(model, audit, share)):
        for share in (0.3, 1):
            with pytest.raises(ValueError, match=r"causal='block' is not to see later ones"):
                turn(model, share)
    assert_same_footprint(model, before)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, True, "5%", float("nan")])
def test_shares_that_are_none_are_refused(share):
    model = patched("dit", "calibrated")
    audit = mhla.audit(model, run_of(model, "dit"))
    before = footprint(model)
    for turn in (mhla.set_density, lambda model, share: mhla.densify(model, audit, share)):
        with pytest.raises(ValueError, match=r"must be (in \(0, 1\]|a number|a part)"):
            turn(model, share)
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
    with pytest.raises(ValueError, match="not patched"):
        mhla.densify(models.dit(), of_other, 0.5)
    audit = mhla.audit(model, run_of(model, "sana"))
    with mhla_disabled(model), pytest.raises(ValueError, match="switched off"):
        mhla.densify(model, audit, 0.5)


def test_an_interruption_leaves_the_model_as_it_was(monkeypatch):
    model = patched("wan", "content")
    found, before, layers = mhla.audit(model, run_of(model, "wan")), run_of(model, "wan")(), mhla.mhla_layers(model)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dial, "fit_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mhla.densify(model, found, 0.5)
    assert mhla.mhla_layers(model) == layers
    assert torch.equal(run_of(model, "wan")(), before)


def test_a_share_without_a_step_to_matter_in_is_refused():
    model = patched("dit", "calibrated")
    found = mhla.audit(model, run_of(model, "dit"))
    mhla.densify(model, found, 1)
    assert "rest, which it does in every step" in str(mhla.audit(model, run_of(model, "dit")))
    with pytest.raises(ValueError, match=r"softmax_steps=1.0 leaves the patch no step .*softmax_steps=0\)"):
        mhla.set_density(model, 0.2)
    mhla.set_density(mhla.change_mhla(model, softmax_steps=0), 0.2)
    with pytest.raises(ValueError, match="audit=None must be what audit"):
        mhla.densify(model, None, 0.2)
    with pytest.raises(ValueError, match="run='a cat' must be a function"):
        mhla.audit(model, "a cat")
    with mhla.mhla_disabled(model), pytest.raises(ValueError, match="switched off in some layers"):
        mhla.calibrate_sparse(model, run_of(model, "dit"))


def test_the_dial_keeps_the_backend_that_was_set_before_patching():
    model = models.wan()
    model.set_attention_backend("_native_math")
    mhla.apply_mhla(model, blocks=(2, 2, 3), sparse="content", exact_tiles=(2, 4, 3))
    mhla.remove_mhla(mhla.set_density(model, 0.5))
    assert {attn.processor._attention_backend for attn in get_family(model).self_attentions(model).values()} == {
        AttentionBackendName._NATIVE_MATH
    }
