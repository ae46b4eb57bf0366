"""Offloaded weights and models on other devices."""

import pytest
import torch
from accelerate import cpu_offload

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched, relative_change
from ..refusals import refused
from .shared import EVERYTHING, MODELS, ONE_PER_CLASS, mixings

GROUPS = [{"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}]


@pytest.fixture
def poisoned():
    """Memory that nothing was written to holds NaN, so that a weight used while it is offloaded shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("settings", GROUPS)
@pytest.mark.parametrize("name", ["wan", "wan_vace", "sana"])
def test_group_offloading_brings_every_weight_in_time(name, settings, tmp_path, poisoned):
    """Offloaded to disk, so that also without an accelerator the weights are gone until their group is loaded."""
    model = patched(name, **EVERYTHING)
    expected = output(model, inputs(name))
    device = torch.device("cpu")
    model.enable_group_offload(device, device, offload_to_disk_path=str(tmp_path), **settings)
    assert not any(matrix.isfinite().any() for matrix in mixings(model))
    for _ in range(2):
        assert torch.equal(output(model, inputs(name)), expected)
    assert not any(matrix.isfinite().any() for matrix in mixings(model))
    mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs(name)), output(FAMILIES[name].build(), inputs(name)))


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_accelerate_offloading_brings_every_weight_in_time(name):
    """Between the forwards the weights are on the meta device: one that is used too early has no values."""
    model = patched(name, **EVERYTHING)
    expected = output(model, inputs(name))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(matrix.is_meta for matrix in mixings(model))
    for _ in range(2):
        assert torch.equal(output(model, inputs(name)), expected)
    assert all(matrix.is_meta for matrix in mixings(model))
    mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs(name)), output(FAMILIES[name].build(), inputs(name)))


@pytest.mark.parametrize("how", [None, *GROUPS], ids=str)
@pytest.mark.parametrize("name", ["wan", "sana"])
def test_an_offloaded_model_is_refused(name, how):
    """A new layer takes the device of the attention's weights, which may be meta here: it would have no values."""
    model, cpu = FAMILIES[name].build(), torch.device("cpu")
    cpu_offload(model, execution_device=cpu) if how is None else model.enable_group_offload(cpu, cpu, **how)
    with refused("offloaded"):
        mhla.apply_mhla(model, blocks=FAMILIES[name].blocks)
    assert not mhla.is_patched(model)


def test_weights_in_files_are_neither_saved_nor_replaced(tmp_path):
    """Those in memory are no values then: a patch saved from them or weights written over them would be lost."""
    model, cpu = patched("wan"), torch.device("cpu")
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight.mul_(1.5)
    mhla.save_mhla(model, tmp_path / "adapted", weights="changed", base=FAMILIES["wan"].build())
    model = mhla.load_mhla(FAMILIES["wan"].build(), tmp_path / "adapted")
    expected = output(model, inputs("wan"))
    model.enable_group_offload(cpu, cpu, offload_type="leaf_level", offload_to_disk_path=str(tmp_path / "weights"))
    with refused("offload_to_disk_path=", "save"):
        mhla.save_mhla(model, tmp_path / "patch")
    with refused("offload_to_disk_path=", "remove"):
        mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs("wan")), expected)


def test_weights_in_memory_are_brought_back_under_group_offloading(tmp_path):
    original, cpu = output(FAMILIES["wan"].build(), inputs("wan")), torch.device("cpu")
    model = patched("wan")
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight.mul_(1.5)
    mhla.save_mhla(model, tmp_path, weights="changed", base=FAMILIES["wan"].build())
    model = mhla.load_mhla(FAMILIES["wan"].build(), tmp_path)
    expected = output(model, inputs("wan"))
    model.enable_group_offload(cpu, cpu, offload_type="leaf_level")
    assert torch.equal(output(model, inputs("wan")), expected)
    mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs("wan")), original)


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_to_moves_every_weight(name):
    """To the meta device, which needs no accelerator; and a model on meta can be patched."""
    model = patched(name, **EVERYTHING).to("meta")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    model = mhla.apply_mhla(FAMILIES[name].build().to("meta"), blocks=FAMILIES[name].blocks, **EVERYTHING)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda(name):
    expected = output(patched(name), inputs(name))
    model = patched(name).to("cuda")
    arguments = {key: value.to("cuda") for key, value in inputs(name).items()}
    assert relative_change(output(model, arguments).cpu(), expected) < 1e-3
    assert relative_change(output(model.to("cpu"), inputs(name)), expected) == 0
