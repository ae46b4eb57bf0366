"""Which layers hurt least, and the automatic choice."""

import pytest
import torch

from mhla_diffusers import (
    MHLAConfig,
    apply_mhla,
    is_patched,
    layer_sensitivity,
    load_mhla,
    remove_mhla,
    save_mhla,
)
from mhla_diffusers.families import get_family
from mhla_diffusers.patching.describe import describe
from mhla_diffusers.patching.settings import choose_layers

from .. import models, pipelines

NAMES = ["dit", "sana_qk_norm", "wan", "wan_i2v", "wan_vace"]


def run_of(model, name):
    return lambda: model(**models.inputs(name))


@pytest.mark.parametrize("name", NAMES)
def test_sensitivity_is_the_change_when_one_layer_alone_is_replaced(name):
    model = models.patched(name)
    before = models.output(model, models.inputs(name))
    found = layer_sensitivity(model, run_of(model, name))
    assert torch.equal(models.output(model, models.inputs(name)), before)
    layers = list(get_family(model).self_attentions(model))
    assert list(found) == layers
    original = models.output(models.FAMILIES[name].build(), models.inputs(name))
    for index, layer in enumerate(layers):
        alone = models.output(models.patched(name, layers=[index]), models.inputs(name))
        assert found[layer] == pytest.approx(models.relative_change(alone, original) ** 2, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_automatic_choice_takes_the_layers_that_hurt_least_and_records_them(name):
    model = models.FAMILIES[name].build()
    blocks = models.FAMILIES[name].blocks
    patched = models.patched(name)
    found = list(layer_sensitivity(patched, run_of(patched, name)).values())
    apply_mhla(model, sparse="none", blocks=blocks, layers="auto:2/3", calibration=run_of(model, name))
    configs = {attn.mhla.config for attn in get_family(model).self_attentions(model).values() if hasattr(attn, "mhla")}
    (config,) = configs
    count = len(choose_layers("2/3", len(found)))
    assert config.layers == tuple(sorted(sorted(range(len(found)), key=found.__getitem__)[:count]))
    assert [layer.replaced for layer in describe(model)] == [i in config.layers for i in range(len(found))]
    before = models.output(models.FAMILIES[name].build(), models.inputs(name))
    assert torch.equal(models.output(remove_mhla(model), models.inputs(name)), before)


def test_every_transformer_of_a_pipeline_gets_its_own_choice_and_keeps_it(tmp_path):
    pipe = pipelines.wan22_pipeline()
    call = pipelines.PIPELINES["wan22"].call
    settings = {"blocks": (1, 2, 2), "layers": "auto:1/2"}
    apply_mhla(pipe, **settings, calibration=lambda: pipe(**call, generator=torch.Generator().manual_seed(0)))
    chosen = [layer.name for layer in describe(pipe) if layer.replaced]
    assert {name.split(".")[0] for name in chosen} == {"transformer", "transformer_2"}
    save_mhla(pipe, tmp_path)
    loaded = load_mhla(pipelines.wan22_pipeline(), tmp_path)
    assert [layer.name for layer in describe(loaded) if layer.replaced] == chosen
    assert set(layer_sensitivity(pipe, lambda: pipe(**call))) == set(chosen)


def test_refused_choices_leave_the_model_alone():
    model = models.wan()
    run = run_of(model, "wan")

    def fail():
        raise RuntimeError("out of memory")

    for settings, message in (
        ({"layers": "auto:2/3"}, "chosen by measuring.*calibration="),
        ({"layers": "auto:3/2"}, "layers='auto:3/2' is unknown"),
        ({"layers": "auto:"}, "layers='auto:' is unknown"),
        ({"layers": "auto:2/3", "calibration": lambda: None}, "did not run transformer"),
        ({"layers": "auto:2/3", "calibration": run, "output_norm": True}, "output norm that is not fitted"),
        ({"layers": "auto:2/3", "calibration": run, "blocks": (9, 9, 9)}, "blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_mhla(model, **{"blocks": (2, 2, 3), "sparse": "none", **settings})
        assert not is_patched(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        apply_mhla(model, sparse="none", blocks=(2, 2, 3), layers="auto:2/3", calibration=fail)
    assert not is_patched(model)
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match="not patched"):
        layer_sensitivity(model, run)


def test_automatic_choice_is_a_setting_like_others():
    config = MHLAConfig(blocks=(2, 2), layers="auto:2/3")
    assert MHLAConfig.from_dict(config.to_dict()) == config
