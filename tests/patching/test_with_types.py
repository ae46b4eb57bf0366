"""Layerwise casting and floating-point types."""

import pytest
import torch

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched, relative_change
from .shared import EVERYTHING, ONE_PER_CLASS, mixings


def cast(arguments, dtype):
    """Floating point arguments in ``dtype``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()}


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_layerwise_casting_passes_over_what_mhla_adds(name, tmp_path):
    """Stored in 8 bits: the model's linear layers. In full, also when saved: matrix, norm, gate and convolution."""
    model = patched(name, **EVERYTHING)
    expected, before = output(model, inputs(name)), own_tensors(model)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    # four bits of significand round a weight by up to 6%, in every layer one after the other
    assert 0 < relative_change(output(model, inputs(name)), expected) < 0.2
    after = own_tensors(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) and after[key].dtype == tensor.dtype for key, tensor in before.items())
    other = mhla.load_mhla(FAMILIES[name].build(), mhla.save_mhla(model, tmp_path))
    assert torch.equal(output(other, inputs(name)), expected)
    mhla.save_mhla(model, tmp_path, weights="all")
    other = mhla.load_mhla(FAMILIES[name].build(), tmp_path)
    assert torch.equal(output(other, inputs(name)), output(model, inputs(name)))


def own_tensors(model):
    return {key: tensor.clone() for key, tensor in model.state_dict().items() if ".mhla." in key}


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_model_under_layerwise_casting_is_patched(name, settings):
    model = FAMILIES[name].build().to(torch.bfloat16)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    mhla.apply_mhla(model, blocks=FAMILIES[name].blocks, **settings)
    expected = output(patched(name, **settings), inputs(name))
    assert relative_change(output(model, cast(inputs(name), torch.bfloat16)), expected) < 0.15
    assert {matrix.dtype for matrix in mixings(model)} == {torch.float32}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str)
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_half_precision(name, dtype, tolerance):
    """Cast before or after the patch: close to float32. A patch on a cast model keeps its matrix in float32.

    Tolerance: some twenty roundings of 2^-9 (bfloat16) or 2^-12 (float16) each, in random directions.
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


def test_float64():
    model = patched("wan", **EVERYTHING).double()
    found = output(model, cast(inputs("wan"), torch.float64))
    assert found.dtype == torch.float64
    assert relative_change(output(patched("wan", **EVERYTHING), inputs("wan")), found) < 1e-5
