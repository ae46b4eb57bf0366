"""Output norms that are fitted on a run, and which layers' replacement changes the output least."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family
from mhla_diffusers.patching import calibrate_output_norm, find_patched, layer_sensitivity
from mhla_diffusers.patching.patch import choose_layers

from ..models import FAMILIES, inputs, output, patched, relative_change, sana, wan
from ..pipelines import PIPELINES, generate, wan22_pipeline
from ..refusals import refused
from .shared import ONE_PER_CLASS, assert_same_footprint, footprint


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


@pytest.mark.parametrize("name", ONE_PER_CLASS)
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
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=PIPELINES["wan22"].blocks, output_norm=True)
    calibrate_output_norm(pipe, lambda: generate("wan22", pipe))
    for layer in mhla.mhla_layers(pipe).values():
        assert layer.output_norm.isfinite().all()
        assert not torch.equal(layer.output_norm, torch.ones_like(layer.output_norm))


REFUSED = {
    # the model, offending value
    "no norms": (lambda: patched("sana"), "output_norm=True"),
    "sparse attention": (lambda: patched("dit", density=0.2), "output_norm=True"),
    "no patch": (sana, "not patched"),
    "norms that run() does not reach": (lambda: patched("sana", output_norm=True), "attn1...3 of 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fitted_is_named_and_left_as_it_was(case):
    build, value = REFUSED[case]
    model = build()
    before = footprint(model)
    with refused(value):
        calibrate_output_norm(model, lambda: None)
    assert_same_footprint(model, before)


def _fail():
    raise RuntimeError("out of memory")


def test_what_sees_later_frames_chooses_no_layers_of_a_causal_patch():
    settings = {"blocks": (2, 2, 3), "causal": "block", "block_length": 2}
    model, ran = wan(), []
    for layers in ("all", "auto:1/2"):
        with refused("causal='block'"):
            mhla.apply_mhla(model, **settings, layers=layers, calibration=lambda: ran.append(1))
    assert not ran and not mhla.is_patched(model)


@pytest.mark.parametrize("name", ["dit", "sana_qk_norm", "wan_vace"])
def test_sensitivity_is_the_change_when_one_layer_alone_is_replaced(name):
    """And the automatic choice takes the layers that hurt least, and records them."""
    model, case = patched(name), FAMILIES[name]
    before = output(model, inputs(name))
    sensitivities = layer_sensitivity(model, run_of(model, name))
    assert torch.equal(output(model, inputs(name)), before)
    layers, found = list(get_family(model).self_attentions(model)), list(sensitivities.values())
    assert list(sensitivities) == layers
    original = output(case.build(), inputs(name))
    for index, sensitivity in enumerate(found):
        alone = output(patched(name, layers=[index]), inputs(name))
        assert sensitivity == pytest.approx(relative_change(alone, original) ** 2, rel=1e-4)

    model = case.build()
    mhla.apply_mhla(model, blocks=case.blocks, layers="auto:2/3", calibration=run_of(model, name))
    (config,) = {layer.config for layer in mhla.mhla_layers(model).values()}
    count = len(choose_layers("2/3", len(found)))
    assert config.layers == tuple(sorted(sorted(range(len(found)), key=found.__getitem__)[:count]))
    assert mhla.mhla_layers(model).keys() == {f"{layers[index]}.mhla" for index in config.layers}
    assert torch.equal(output(mhla.remove_mhla(model), inputs(name)), original)


@pytest.mark.parametrize("settings", [{"blocks": (1, 2, 2)}, {"density": 0.2, "dense_layers": 0}], ids=str)
def test_every_transformer_of_a_pipeline_gets_its_own_choice_and_keeps_it(settings, tmp_path):
    pipe, call = wan22_pipeline(), PIPELINES["wan22"].call
    mhla.apply_mhla(
        pipe,
        **settings,
        layers="auto:1/2",
        calibration=lambda: pipe(**call, generator=torch.Generator().manual_seed(0)),
    )
    chosen = {name: handle.chosen for name, handle in find_patched(pipe).items()}
    assert list(map(len, chosen.values())) == [2, 2]
    mhla.save_mhla(pipe, tmp_path)
    loaded = mhla.load_mhla(wan22_pipeline(), tmp_path)
    assert {name: handle.chosen for name, handle in find_patched(loaded).items()} == chosen
    names = [f"{component}.{name}" for component, names in chosen.items() for name in names]
    assert list(layer_sensitivity(pipe, lambda: pipe(**call))) == names


REFUSED_CHOICES = [
    ({"layers": "auto:2/3"}, ValueError, "calibration="),
    ({"layers": "auto:3/2"}, ValueError, "'auto:3/2'"),
    ({"layers": "auto:"}, ValueError, "'auto:'"),
    ({"layers": "auto:2/3", "calibration": lambda: None}, ValueError, "run()"),
    ({"layers": "auto:2/3", "calibration": _fail}, RuntimeError, "out of memory"),
    ({"layers": "auto:2/3", "calibration": True, "blocks": (9, 9, 9)}, ValueError, "9 blocks"),
    ({"calibration": True}, ValueError, "layers='auto:2/3'"),
]


@pytest.mark.parametrize(("settings", "error", "value"), REFUSED_CHOICES, ids=lambda value: str(value)[:40])
def test_refused_choices_leave_the_model_alone(settings, error, value):
    model = wan()
    before = footprint(model)
    if settings.get("calibration") is True:
        settings = settings | {"calibration": run_of(model, "wan")}
    with refused(value, error=error):
        mhla.apply_mhla(model, **{"blocks": (2, 2, 3)} | settings)
    assert not mhla.is_patched(model)
    assert_same_footprint(model, before)
    with refused("not patched"):
        layer_sensitivity(model, run_of(model, "wan"))


@pytest.mark.parametrize("measure", [mhla.audit, calibrate_output_norm, layer_sensitivity])
def test_a_run_with_nan_is_refused_and_the_layer_named(measure):
    model = patched("wan", output_norm=True)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    arguments = inputs("wan")
    arguments["hidden_states"] = arguments["hidden_states"] * float("nan")
    with refused("blocks.0.attn1"):
        measure(model, lambda: model(**arguments))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
