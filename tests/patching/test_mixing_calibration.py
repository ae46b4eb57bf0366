"""Mixing matrices fitted to softmax attention in patched models."""

import pytest
import torch

from mhla_diffusers import (
    apply_mhla,
    calibrate_mixing,
    calibrate_sparse,
    is_patched,
    load_mhla,
    mhla_layers,
    save_mhla,
)
from mhla_diffusers.patching import calibrate

from .. import models

SOFTMAX = ["wan", "dit"]


def patched(name, **settings):
    return models.patched(name, sparse="none", **settings)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("name", SOFTMAX)
def test_the_model_changes_less(name, per_head, tmp_path):
    arguments = models.inputs(name)
    before = models.output(models.FAMILIES[name].build(), arguments)
    model = patched(name, mixing_per_head=per_head)
    fresh = models.relative_change(models.output(model, arguments), before)
    calibrate_mixing(model, lambda: models.output(model, arguments))
    assert models.relative_change(models.output(model, arguments), before) < 0.95 * fresh
    for layer in mhla_layers(model).values():
        assert ((layer.mixing > 0) & (layer.mixing < 1)).all()
    save_mhla(model, tmp_path)
    other = load_mhla(models.FAMILIES[name].build(), tmp_path)
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


def test_a_patch_without_lists_is_fitted_as_it_is_applied():
    """By its calibration; where that is refused the model is as before."""
    arguments, model = models.inputs("dit"), patched("dit", mixing_per_head=True)
    calibrate_mixing(model, lambda: models.output(model, arguments))
    other = models.FAMILIES["dit"].build()
    settings = {"blocks": models.FAMILIES["dit"].blocks, "sparse": "none", "mixing_per_head": True}
    apply_mhla(other, **settings, calibration=lambda: models.output(other, arguments))
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))
    sana = models.sana()
    with pytest.raises(ValueError, match="linear: mixing_init='uniform' is the same"):
        apply_mhla(sana, blocks=(4, 2), calibration=lambda: None)
    assert not is_patched(sana)


def test_what_cannot_be_fitted_is_refused():
    for model, message in (
        (models.wan(), "not patched with MHLA"),
        (models.patched("sana"), "linear: mixing_init='uniform' is the same"),
        (models.patched("wan", sparse="content"), "got sparse='content'"),
        (patched("wan", normalize=False, output_norm=True), "normalize=False"),
        (patched("wan", output_norm=True), "output_norm=True"),
        (patched("wan"), "did not run transformer"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate_mixing(model, lambda: None)


_CAUSAL = {"blocks": (2, 2, 3), "causal": "block", "block_length": 2}


@pytest.mark.parametrize(("sparse", "calibrate"), [("none", calibrate_mixing), ("own", calibrate_sparse)])
def test_what_sees_later_frames_calibrates_no_causal_patch(sparse, calibrate):
    message = r"causal='block' is not to see later ones.*trained, as docs/stream.md"
    model = apply_mhla(models.wan(), **_CAUSAL, sparse=sparse)
    with pytest.raises(ValueError, match=calibrate.__name__ + r"\(\) goes by .*" + message):
        calibrate(model, lambda: models.output(model, models.inputs("wan")))
    other, ran = models.wan(), []
    for layers in ("all", "auto:1/2"):
        with pytest.raises(ValueError, match="calibration goes by .*" + message):
            apply_mhla(other, **_CAUSAL, sparse=sparse, layers=layers, calibration=lambda: ran.append(1))
    assert not ran and not is_patched(other)


def test_a_grid_of_fewer_blocks_is_refused_and_leaves_the_model_patched():
    model = models.wan()
    apply_mhla(model, blocks=(99, 2, 2), clamp_blocks=True, sparse="none")
    arguments = models.inputs("wan")
    patched_output = models.output(model, arguments)
    with pytest.raises(ValueError, match="the matrix is for \\(99, 2, 2\\)"):
        calibrate_mixing(model, lambda: models.output(model, arguments))
    assert torch.equal(models.output(model, arguments), patched_output)


def test_a_model_that_was_cast_after_patching():
    """``pipe.to`` casts the matrices too."""
    arguments = {name: x.bfloat16() if x.is_floating_point() else x for name, x in models.inputs("dit").items()}
    model = patched("dit").to(torch.bfloat16)
    before = [layer.mixing.clone() for layer in mhla_layers(model).values()]
    calibrate_mixing(model, lambda: models.output(model, arguments))
    for old, layer in zip(before, mhla_layers(model).values(), strict=True):
        assert layer.mixing.dtype == torch.bfloat16 and not torch.equal(layer.mixing, old)


def test_what_is_interrupted_leaves_the_matrices_of_before(monkeypatch):
    model = patched("wan")
    before = {name: layer.mixing.clone() for name, layer in mhla_layers(model).items()}
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fit_mixing(*arguments)

    fit_mixing = calibrate.fit_mixing
    monkeypatch.setattr(calibrate, "fit_mixing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate_mixing(model, lambda: models.output(model, models.inputs("wan")))
    assert all(torch.equal(layer.mixing, before[name]) for name, layer in mhla_layers(model).items())
