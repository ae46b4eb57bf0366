"""Patched models in a loop of one's own: gradients, checkpointing, types, several processes, saving."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from diffusers import DiTPipeline
from safetensors.torch import load_file

import mhla_diffusers as mhla
from mhla_diffusers.patching import register_mixing_clip
from mhla_diffusers.tiny import load_tiny

from ..models import FAMILIES, assert_changed, inputs, output, patched, relative_change
from ..refusals import refused
from .shared import CAUSAL, EVERYTHING, ONE_PER_CLASS, SPARSE, in_threads, mixings


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_training_step_reaches_every_weight_of_every_layer(name):
    """And the matrix stays inside (0, 1)."""
    model = patched(name, **EVERYTHING).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    register_mixing_clip(optimizer, model)
    model(**inputs(name)).sample.square().mean().backward()
    optimizer.step()
    for key, value in model.state_dict().items():
        if ".mhla." in key:
            assert value.isfinite().all() and not torch.equal(value, before[key]), key
    assert all(((mixing > 0) & (mixing < 1)).all() for mixing in mixings(model))


@pytest.mark.parametrize("clip", [True, False])
def test_mixing_is_clipped_after_every_step_until_the_hook_is_removed(clip):
    model = patched("sana", mixing_clip=clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = register_mixing_clip(optimizer, model)
    for direction in (100.0, -100.0):
        for matrix in mixings(model):
            matrix.grad = torch.full_like(matrix, direction)
        optimizer.step()
        assert all(bool(((matrix > 0) & (matrix < 1)).all()) is clip for matrix in mixings(model))
    handle.remove()
    optimizer.step()
    assert all(matrix.max() > 1 for matrix in mixings(model))


@pytest.mark.parametrize(
    ("settings", "words"),
    [(None, "not patched"), ({"blocks": (2, 2, 3)}, "mixing matrix"), ({"density": 0.2}, "sparse")],
)
def test_an_optimizer_without_matrices_is_refused(settings, words):
    model = FAMILIES["wan"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if settings is not None:
        mhla.apply_mhla(model, **settings)
    with refused(words):
        register_mixing_clip(optimizer, model)


@pytest.mark.parametrize("settings", [{}, CAUSAL], ids=["MHLA", "causal"])
def test_an_optimizer_without_the_clip_makes_no_nan(settings):
    """It brings entries of the locality matrix, which begin at 0, below it."""
    model = patched("wan", **settings).train()
    optimizer = torch.optim.AdamW(mixings(model), lr=0.3)
    for _ in range(3):
        model(**inputs("wan"), return_dict=False)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert min(float(mixing.min()) for mixing in mixings(model)) < 0
    assert bool(output(model, inputs("wan")).isfinite().all())


def gradients(model, name, run):
    """Gradients of the latents and a weight, after another forward has run, possibly with the patch off."""
    latents = inputs(name)["hidden_states"].requires_grad_(True)
    loss = model(**(inputs(name) | {"hidden_states": latents})).sample.square().sum()
    output(model, inputs(name, ragged=name != "dit"))  # which the second pass must not take for its own
    run(loss.backward)
    weight = next(parameter for key, parameter in model.named_parameters() if key.endswith("attn1.to_q.weight"))
    return latents.grad, weight.grad


@pytest.mark.parametrize(("name", "settings"), [("wan", {}), ("dit", {}), ("sana", {}), ("wan", SPARSE)], ids=str)
def test_gradient_checkpointing_recomputes_what_ran(name, settings):
    """After another forward of another size, in another thread, and where the patch is switched off by then."""
    expected = gradients(patched(name, **settings), name, lambda run: run())

    def switched_off(run):
        with mhla.mhla_disabled(model):
            run()

    for how in (lambda run: run(), in_threads, switched_off):
        model = patched(name, **settings)
        model.enable_gradient_checkpointing()
        for found, wanted in zip(gradients(model, name, how), expected, strict=True):
            assert relative_change(found, wanted) < 1e-5
        mhla.remove_mhla(model)
        model(**inputs(name)).sample.sum().backward()


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, EVERYTHING) for name in ONE_PER_CLASS), ("wan", SPARSE), ("dit", SPARSE)], ids=str
)
def test_a_training_step_under_autocast(name, settings):
    """Weights in float32, products in bfloat16: near the step without autocast, and in the type of the weights."""

    def step(context):
        model = patched(name, **settings)
        with context:
            loss = model(**inputs(name)).sample.float().square().mean()
        loss.backward()
        kinds = ("mixing",) if settings is EVERYTHING else ("attn1.to_q.weight",)
        return loss.detach(), {key: x.grad for key, x in model.named_parameters() if key.endswith(kinds)}

    expected, of_expected = step(nullcontext())
    loss, found = step(torch.autocast("cpu", torch.bfloat16))
    # bfloat16 keeps 8 bits, and its roundings add up over layers
    assert abs(loss - expected) <= 0.05 * expected
    for path, gradient in of_expected.items():
        assert found[path].dtype == torch.float32
        assert relative_change(found[path], gradient) < 0.5, path


# Types


def cast(arguments, dtype):
    """Floating point arguments in ``dtype``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()}


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_layerwise_casting_passes_over_what_mhla_adds(name, tmp_path):
    """Stored in 8 bits: the model's linear layers. In full, also when saved: matrix, norm, gate and convolution."""
    model = patched(name, **EVERYTHING)
    expected, before = output(model, inputs(name)), own_tensors(model)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    after = own_tensors(model)
    assert all(torch.equal(after[key], tensor) and after[key].dtype == tensor.dtype for key, tensor in before.items())
    other = mhla.load_mhla(FAMILIES[name].build(), mhla.save_mhla(model, tmp_path))
    assert torch.equal(output(other, inputs(name)), expected)
    cast_first = FAMILIES[name].build().to(torch.bfloat16)
    cast_first.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    mhla.apply_mhla(cast_first, blocks=FAMILIES[name].blocks, **EVERYTHING)
    # four bits of significand round a weight by up to 6%, in every layer one after the other
    assert relative_change(output(cast_first, cast(inputs(name), torch.bfloat16)), expected) < 0.2
    assert {matrix.dtype for matrix in mixings(cast_first)} == {torch.float32}


def own_tensors(model):
    return {key: tensor.clone() for key, tensor in model.state_dict().items() if ".mhla." in key}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004), (torch.float64, 1e-5)], ids=str
)
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_other_types(name, dtype, tolerance):
    """Cast before or after the patch: close to float32. A patch on a cast model keeps its matrix in float32.

    Tolerance: some twenty roundings of 2^-9 (bfloat16), 2^-12 (float16) or 2^-24 each, in random directions.
    """
    expected = output(patched(name, **EVERYTHING), inputs(name))
    cast_after = patched(name, **EVERYTHING).to(dtype)
    cast_before = mhla.apply_mhla(FAMILIES[name].build().to(dtype), blocks=FAMILIES[name].blocks, **EVERYTHING)
    for model in (cast_after, cast_before):
        found = output(model, cast(inputs(name), dtype))
        assert found.dtype == dtype
        assert relative_change(found, expected) < tolerance
    assert {matrix.dtype for matrix in mixings(cast_before)} == {torch.float32}
    assert {matrix.dtype for matrix in mixings(cast_after)} == {dtype}
    assert {layer.gate.weight.dtype for layer in mhla.mhla_layers(cast_before).values()} == {dtype}


@pytest.mark.parametrize("name", ["dit", "wan"])
def test_sparse_attention_in_half_precision_is_the_models(name):
    model, arguments = FAMILIES[name].build().to(torch.bfloat16), cast(inputs(name), torch.bfloat16)
    expected = output(model, arguments)
    found = output(mhla.apply_mhla(model, **SPARSE | {"density": 1.0}), arguments)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert_changed(output(mhla.change_mhla(model, density=0.2), arguments), expected)


# diffusers' own saving


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_save_pretrained_writes_the_weights_and_from_pretrained_opens_the_unpatched_model(name, tmp_path):
    """diffusers knows nothing of the patch: it reports MHLA's tensors as unexpected and ignores them."""
    model, base = patched(name), FAMILIES[name].build()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert set(saved) == set(model.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == type(base).__name__
    opened, report = type(base).from_pretrained(tmp_path, output_loading_info=True)
    assert sorted(report["unexpected_keys"]) == sorted(f"{layer}.mixing" for layer in mhla.mhla_layers(model))
    assert not report["missing_keys"] and not mhla.is_patched(opened)
    assert torch.equal(output(opened, inputs(name)), output(base, inputs(name)))
    mhla.apply_mhla(opened, blocks=FAMILIES[name].blocks).load_state_dict(saved)
    assert torch.equal(output(opened, inputs(name)), output(model, inputs(name)))


def test_a_patch_beside_diffusers_own_files_opens_without_a_warning(tmp_path, recwarn):
    """The pipeline was loaded from the folder that its patch lies in; whoever opens it need not have this package."""
    pipe = load_tiny("dit")
    mhla.save_mhla(mhla.apply_mhla(pipe, blocks=(4, 2)), tmp_path)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "DiTTransformer2DModel"]
    for again in (DiTPipeline.from_pretrained(tmp_path), DiTPipeline.from_pretrained(tmp_path).transformer):
        mhla.load_mhla(again, tmp_path)
    assert not [one for one in recwarn if "does not belong" in str(one.message)]
    with pytest.warns(UserWarning, match="does not belong"):  # of another folder
        mhla.load_mhla(DiTPipeline.from_pretrained(tmp_path), shutil.copytree(tmp_path, tmp_path / "other"))
