"""What is fitted to softmax attention on a run: output norms, mixing matrices, the weights of the sparse branch."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.patching import calibrate, calibrate_output_norm

from ..models import FAMILIES, inputs, output, patched, relative_change, sana, wan
from ..pipelines import PIPELINES, generate, wan22_pipeline
from .shared import MODELS, assert_same_footprint, footprint, mixings, self_attentions

SOFTMAX = ["wan", "dit"]
SPARSE = {"sparse": "content", "block_size": 4, "density": 0.2}


def run_of(model, name):
    return lambda: output(model, inputs(name))


def head_channel_rms(model, arguments):
    """Root mean square of every head channel that an unpatched model's self-attentions hand to ``to_out``."""
    seen, handles = {}, []
    for path, attn in model.named_modules():
        if path.endswith("attn1"):

            def note(_, args, path=path, heads=attn.heads):
                seen[path] = args[0].unflatten(-1, (heads, -1)).square().mean(dim=(0, 1, 2)).sqrt()

            handles.append(attn.to_out[0].register_forward_pre_hook(note))
    output(model, arguments)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_the_output_norm_takes_the_scale_of_the_replaced_attention(name):
    expected = head_channel_rms(FAMILIES[name].build(), inputs(name))
    model = patched(name, output_norm=True, normalize=False)
    before = footprint(model)
    calibrate_output_norm(model, lambda: model(**inputs(name)))
    for path, layer in mhla.mhla_layers(model).items():
        torch.testing.assert_close(layer.output_norm, expected[path.removesuffix(".mhla")], rtol=1e-4, atol=1e-6)
    after = footprint(model)
    assert all(after[part] == before[part] for part in before.keys() - {"state"})


def test_the_output_norms_of_both_transformers_of_a_pipeline():
    pipe = mhla.apply_mhla(wan22_pipeline(), sparse="none", blocks=PIPELINES["wan22"].blocks, output_norm=True)
    calibrate_output_norm(pipe, lambda: generate("wan22", pipe))
    for layer in mhla.mhla_layers(pipe).values():
        assert layer.output_norm.isfinite().all()
        assert not torch.equal(layer.output_norm, torch.ones_like(layer.output_norm))


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("name", SOFTMAX)
def test_fitted_mixing_matrices_change_the_model_less(name, per_head, tmp_path):
    arguments = inputs(name)
    before = output(FAMILIES[name].build(), arguments)
    model = patched(name, mixing_per_head=per_head)
    fresh = relative_change(output(model, arguments), before)
    mhla.calibrate_mixing(model, run_of(model, name))
    assert relative_change(output(model, arguments), before) < 0.95 * fresh
    assert all(((mixing > 0) & (mixing < 1)).all() for mixing in mixings(model))
    mhla.save_mhla(model, tmp_path)
    other = mhla.load_mhla(FAMILIES[name].build(), tmp_path)
    assert torch.equal(output(other, arguments), output(model, arguments))


def test_a_patch_without_lists_is_fitted_as_it_is_applied():
    model, other = patched("dit", mixing_per_head=True), FAMILIES["dit"].build()
    mhla.calibrate_mixing(model, run_of(model, "dit"))
    settings = {"blocks": FAMILIES["dit"].blocks, "sparse": "none", "mixing_per_head": True}
    mhla.apply_mhla(other, **settings, calibration=run_of(other, "dit"))
    assert torch.equal(output(other, inputs("dit")), output(model, inputs("dit")))


def test_a_model_that_was_cast_after_patching():
    """``pipe.to`` casts the matrices too."""
    arguments = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs("dit").items()}
    model = patched("dit").to(torch.bfloat16)
    before = [mixing.clone() for mixing in mixings(model)]
    mhla.calibrate_mixing(model, lambda: output(model, arguments))
    for old, mixing in zip(before, mixings(model), strict=True):
        assert mixing.dtype == torch.bfloat16 and not torch.equal(mixing, old)


def test_what_is_interrupted_leaves_the_matrices_of_before(monkeypatch):
    model, fit_mixing, calls = patched("wan"), calibrate.fit_mixing, []
    before = [mixing.clone() for mixing in mixings(model)]

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fit_mixing(*arguments)

    monkeypatch.setattr(calibrate, "fit_mixing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mhla.calibrate_mixing(model, run_of(model, "wan"))
    assert all(torch.equal(mixing, old) for mixing, old in zip(mixings(model), before, strict=True))


def heads_of(attn, run):
    """What every head of an attention adds to its output: (B, N, H, channels)."""
    found = []
    handle = attn.to_out[0].register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))
    run()
    handle.remove()
    weight = attn.to_out[0].weight.unflatten(1, (attn.heads, -1))
    return torch.einsum("bnhd,chd->bnhc", found[0].unflatten(-1, (attn.heads, -1)), weight)


@pytest.mark.parametrize("settings", [{}, {"fit_pooled_bias": False}, {"pooled": False}], ids=str)
@pytest.mark.parametrize("name", SOFTMAX)
def test_fitted_weights_of_the_sparse_branch_bring_heads_closer(name, settings):
    """Than other ones do, on the run that they were fitted on and with the same lists."""
    model = patched(name, layers=[1], **SPARSE | settings)
    run, ((path, layer),) = run_of(model, name), mhla.mhla_layers(model).items()
    assert layer.needs_calibration == bool(settings), "β that is fitted in the call needs none"
    mhla.calibrate_sparse(model, run)
    assert not layer.needs_calibration
    attn = model.get_submodule(path.removesuffix(".mhla"))
    with mhla.mhla_disabled(model):
        softmax = heads_of(attn, run)

    def error():
        return (heads_of(attn, run) - softmax).square().sum(dim=(0, 1, 3))

    fitted = error()
    for pooled_bias in (-1.0, 0.0, 1.0) if layer.pooled_bias is not None else (0.0,):
        for log_weight in (-3.0, 0.0, 3.0):
            with torch.no_grad():
                layer.linear_log_weight.fill_(log_weight)
                if layer.pooled_bias is not None:
                    layer.pooled_bias.fill_(pooled_bias)
            assert (fitted < 1.01 * error()).all()


def test_calibration_finds_the_weights_that_were_hidden():
    """Where every token looks alike, pooled keys miss nothing, and a linear branch adds nothing that is not there."""
    model, arguments = FAMILIES["dit"].build(), inputs("dit")
    for attn in self_attentions(model):
        for projection in (attn.to_q, attn.to_k):
            torch.nn.init.zeros_(projection.weight)
            torch.nn.init.constant_(projection.bias, 2.0)
    before = output(model, arguments)
    settings = SPARSE | {"blocks": FAMILIES["dit"].blocks, "fit_pooled_bias": False, "mixing_init": "uniform"}
    mhla.apply_mhla(model, **settings)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.pooled_bias.fill_(3.0)
    assert relative_change(output(model, arguments), before) > 1e-6
    mhla.calibrate_sparse(model, run_of(model, "dit"))
    torch.testing.assert_close(output(model, arguments), before, rtol=1e-4, atol=1e-5)


NORM, MIXING, FIT = calibrate_output_norm, mhla.calibrate_mixing, mhla.calibrate_sparse
REFUSED = {
    # what calibrates, the model, offending value
    "no norms": (NORM, lambda: patched("sana"), "output_norm=True"),
    "no patch with norms": (NORM, sana, "not patched"),
    "norms that run() does not reach": (NORM, lambda: patched("sana", output_norm=True), "3 of 3 layers.*attn1"),
    "no patch": (MIXING, wan, "not patched"),
    "matrices of linear attention": (MIXING, lambda: patched("sana"), "mixing_init='uniform'"),
    "matrices beside lists": (MIXING, lambda: patched("wan", sparse="content"), "sparse='content'"),
    "no normaliser": (MIXING, lambda: patched("wan", normalize=False, output_norm=True), "normalize=False"),
    "matrices before norms": (MIXING, lambda: patched("wan", output_norm=True), "output_norm=True"),
    "matrices that run() does not reach": (MIXING, lambda: patched("wan"), "did not run transformer"),
    "no sparse branch": (FIT, lambda: patched("wan"), "no sparse branch"),
    "no patch with a sparse branch": (FIT, wan, "not patched"),
    "lists that run() does not reach": (FIT, lambda: patched("wan", **SPARSE), "did not run transformer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fitted_is_named_and_left_as_it_was(case):
    calibrate, build, value = REFUSED[case]
    model = build()
    before = footprint(model)
    with pytest.raises(ValueError, match=value):
        calibrate(model, lambda: None)
    assert_same_footprint(model, before)


def test_a_run_that_fails_leaves_the_model_as_it_was():
    model = patched("sana", output_norm=True)
    before = footprint(model)
    with pytest.raises(RuntimeError, match="out of prompts"):
        NORM(model, lambda: (_ for _ in ()).throw(RuntimeError("out of prompts")))
    assert_same_footprint(model, before)
    model = patched("wan", **SPARSE)
    with mhla.mhla_disabled(model), pytest.raises(ValueError, match="switched off in some layers"):
        FIT(model, lambda: None)
    for name, settings in (("wan", SPARSE | {"blocks": (2, 2, 3)}), ("sana", {"blocks": (4, 2)})):
        model = FAMILIES[name].build()
        before = footprint(model)
        with pytest.raises(ValueError, match=r"did not run transformer|mixing_init='uniform'"):
            mhla.apply_mhla(model, **settings, calibration=lambda: None)
        assert_same_footprint(model, before)


def test_a_grid_of_fewer_blocks_is_refused_and_leaves_the_model_patched():
    model = patched("wan", blocks=(99, 2, 2), clamp_blocks=True)
    expected = output(model, inputs("wan"))
    with pytest.raises(ValueError, match=r"the matrix is for \(99, 2, 2\)"):
        mhla.calibrate_mixing(model, run_of(model, "wan"))
    assert torch.equal(output(model, inputs("wan")), expected)


@pytest.mark.parametrize(("sparse", "calibrate"), [("none", MIXING), ("own", FIT)])
def test_what_sees_later_frames_calibrates_no_causal_patch(sparse, calibrate):
    settings = {"blocks": (2, 2, 3), "causal": "block", "block_length": 2, "sparse": sparse}
    model, other, ran = mhla.apply_mhla(wan(), **settings), wan(), []
    with pytest.raises(ValueError, match=rf"{calibrate.__name__}\(\) .*causal='block'.*docs/stream.md"):
        calibrate(model, run_of(model, "wan"))
    for layers in ("all", "auto:1/2"):
        with pytest.raises(ValueError, match="calibration .*causal='block'.*docs/stream.md"):
            mhla.apply_mhla(other, **settings, layers=layers, calibration=lambda: ran.append(1))
    assert not ran and not mhla.is_patched(other)
