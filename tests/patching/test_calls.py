"""Which layers hurt least, and the automatic choice."""

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla, is_patched, load_mhla, remove_mhla, save_mhla
from mhla_diffusers.families import get_family
from mhla_diffusers.patching import layer_sensitivity, record_calls
from mhla_diffusers.patching.describe import describe
from mhla_diffusers.patching.settings import choose_layers
from mhla_diffusers.tiny import load_tiny

from .. import models, pipelines
from ..analysis.tiny import run_tiny
from .shared import assert_same_footprint, footprint

NAMES = ["dit", "sana_qk_norm", "wan", "wan_i2v", "wan_vace"]


def run_of(model, name):
    return lambda: model(**models.inputs(name))


@pytest.mark.parametrize("name", NAMES)
def test_sensitivity_is_the_change_when_one_layer_alone_is_replaced(name):
    """And the automatic choice takes the layers that hurt least, and records them."""
    model, case = models.patched(name), models.FAMILIES[name]
    before = models.output(model, models.inputs(name))
    sensitivities = layer_sensitivity(model, run_of(model, name))
    assert torch.equal(models.output(model, models.inputs(name)), before)
    layers, found = list(get_family(model).self_attentions(model)), list(sensitivities.values())
    assert list(sensitivities) == layers
    original = models.output(case.build(), models.inputs(name))
    for index, sensitivity in enumerate(found):
        alone = models.output(models.patched(name, layers=[index]), models.inputs(name))
        assert sensitivity == pytest.approx(models.relative_change(alone, original) ** 2, rel=1e-4)

    model = case.build()
    apply_mhla(model, sparse="none", blocks=case.blocks, layers="auto:2/3", calibration=run_of(model, name))
    configs = {attn.mhla.config for attn in get_family(model).self_attentions(model).values() if hasattr(attn, "mhla")}
    (config,) = configs
    count = len(choose_layers("2/3", len(found)))
    assert config.layers == tuple(sorted(sorted(range(len(found)), key=found.__getitem__)[:count]))
    assert [layer.replaced for layer in describe(model)] == [i in config.layers for i in range(len(found))]
    assert torch.equal(models.output(remove_mhla(model), models.inputs(name)), original)


def test_every_transformer_of_a_pipeline_gets_its_own_choice_and_keeps_it(tmp_path):
    pipe, call = pipelines.wan22_pipeline(), pipelines.PIPELINES["wan22"].call
    settings = {"blocks": (1, 2, 2), "layers": "auto:1/2"}
    apply_mhla(pipe, **settings, calibration=lambda: pipe(**call, generator=torch.Generator().manual_seed(0)))
    chosen = [layer.name for layer in describe(pipe) if layer.replaced]
    assert {name.split(".")[0] for name in chosen} == {"transformer", "transformer_2"}
    save_mhla(pipe, tmp_path)
    loaded = load_mhla(pipelines.wan22_pipeline(), tmp_path)
    assert [layer.name for layer in describe(loaded) if layer.replaced] == chosen
    assert set(layer_sensitivity(pipe, lambda: pipe(**call))) == set(chosen)


def test_automatic_choice_moves_the_output_no_more_than_the_fixed_one():
    """On the untrained patch, judged on other noise and another class than it was chosen on."""
    pipe = load_tiny("dit")
    judged = record_calls(
        {"transformer": pipe.transformer},
        lambda: pipe(class_labels=[4], num_inference_steps=6, generator=torch.Generator().manual_seed(9)),
    )["transformer"]
    with torch.no_grad():
        expected = [call.predict(pipe.transformer) for call in judged]
    changes = {}
    for layers in ("2/3", "auto:2/3"):
        patched = load_tiny("dit")
        calibration = {"calibration": run_tiny(patched, steps=6)} if layers.startswith("auto") else {}
        apply_mhla(patched, sparse="none", blocks=(4, 4), layers=layers, **calibration)
        with torch.no_grad():
            found = [call.predict(patched.transformer) for call in judged]
        changes[layers] = sum(models.relative_change(f, e) ** 2 for f, e in zip(found, expected, strict=True))
    assert changes["auto:2/3"] <= changes["2/3"]


def _fail():
    raise RuntimeError("out of memory")


REFUSED = [
    ({"layers": "auto:2/3"}, ValueError, "calibration="),
    ({"layers": "auto:3/2"}, ValueError, "'auto:3/2'"),
    ({"layers": "auto:"}, ValueError, "'auto:'"),
    ({"calibration": lambda: None}, ValueError, "did not run transformer"),
    ({"calibration": _fail}, RuntimeError, "out of memory"),
    ({"calibration": True, "output_norm": True}, ValueError, "output norm that is not fitted"),
    ({"calibration": True, "blocks": (9, 9, 9)}, ValueError, "9 blocks"),
]


@pytest.mark.parametrize(("settings", "error", "value"), REFUSED, ids=lambda value: str(value)[:30])
def test_refused_choices_leave_the_model_alone(settings, error, value):
    model = models.wan()
    before = footprint(model)
    if settings.get("calibration") is True:
        settings = settings | {"calibration": run_of(model, "wan")}
    with pytest.raises(error, match=value):
        apply_mhla(model, **{"blocks": (2, 2, 3), "sparse": "none", "layers": "auto:2/3"} | settings)
    assert not is_patched(model)
    assert_same_footprint(model, before)
    with pytest.raises(ValueError, match="not patched"):
        layer_sensitivity(model, run_of(model, "wan"))


def test_automatic_choice_is_a_setting_like_others():
    config = MHLAConfig(blocks=(2, 2), layers="auto:2/3")
    assert MHLAConfig.from_dict(config.to_dict()) == config
    for sparse in ("none", "content"):
        model = models.wan()
        settings = {"blocks": (2, 2, 3), "sparse": sparse, "layers": "auto:2/4"}
        apply_mhla(model, **settings, calibration=run_of(model, "wan"))
        assert sum(layer.replaced for layer in describe(model)) == 2
