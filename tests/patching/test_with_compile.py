"""torch.compile of patched models: one graph per size, shared by all steps and layers."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE

from ..models import FAMILIES, assert_changed, inputs, output, seeded
from ..pipelines import wan_pipeline
from .shared import EVERYTHING, SPARSE, assert_equal_up_to_order


@pytest.fixture
def counter():
    """Counts graphs; compiles to plain PyTorch, so that what is tested is the capture."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("eager")
    torch._dynamo.reset()


CASES = [("wan", {}), ("sana", {}), ("dit", {}), ("wan", SPARSE), ("dit", SPARSE), ("wan_vace", SPARSE)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_the_whole_transformer_compiles_to_one_graph_for_a_size(name, settings, counter):
    """``fullgraph=True`` refuses graph breaks; a size that was seen compiles nothing, and layers share a graph."""
    model = FAMILIES[name].build()
    del getattr(model, "blocks" if name.startswith("wan") else "transformer_blocks")[2:]  # enough for a compiler
    mhla.apply_mhla(model, **settings or {"blocks": FAMILIES[name].blocks} | EVERYTHING)
    requests = [inputs(name, ragged=ragged) for ragged in ((False, True) if name != "dit" else (False,))] * 2
    expected = [output(model, arguments) for arguments in requests]
    compiled, counts = torch.compile(model, backend=counter, fullgraph=True), []
    for arguments, wanted in zip(requests, expected, strict=True):
        assert_equal_up_to_order(output(compiled, arguments), wanted)
        counts.append(counter.frame_count)
    assert counts == ([1, 2, 2, 2] if len(requests) == 4 else [1, 1])


@pytest.mark.slow
def test_a_backend_may_lay_its_output_out_as_it_likes():
    """As diffusers' math backend does, whose outputs are views of (B, H, N, D), in dense steps."""
    pipe = wan_pipeline()
    del pipe.transformer.blocks[2:]
    pipe.transformer.set_attention_backend("_native_math")
    mhla.apply_mhla(pipe, **SPARSE | {"dense_first": 1})
    call = {"prompt": "a cat", "height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 2}
    outputs = []
    for _ in range(2):
        outputs.append(pipe(**call, output_type="latent", generator=torch.Generator().manual_seed(0)).frames)
        pipe.transformer.compile(backend="aot_eager", fullgraph=True)
    assert_equal_up_to_order(*outputs)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "whole"])
@pytest.mark.parametrize("settings", [SPARSE, {"blocks": (1, 2, 2)}], ids=["sparse", "MHLA"])
def test_steps_stay_outside_of_graphs(what, settings, counter):
    """Dense steps, those that measure, and corrected ones run in one graph; MHLA has one for dense steps besides."""
    pipe = wan_pipeline()
    del pipe.transformer.blocks[2:]
    mhla.apply_mhla(pipe, **settings | {"dense_first": 1, "dense_every": 3})
    call = {"prompt": "a cat", "height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 11}

    def sample(seed=0):
        return pipe(**call, output_type="latent", generator=torch.Generator().manual_seed(seed)).frames

    expected = sample()
    for module in pipe.transformer.blocks if what == "blocks" else [pipe.transformer]:
        module.compile(backend=counter, fullgraph=True)
    assert_equal_up_to_order(sample(), expected)
    graphs = counter.frame_count
    assert graphs == (2 if "blocks" in settings else 1)
    assert_changed(sample(seed=1), expected)
    assert counter.frame_count == graphs


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SPARSE, {"blocks": (4, 2)}], ids=["sparse", "MHLA"])
def test_patching_and_removing_a_compiled_model(settings, counter):
    """Each compiles anew, and the compiled model is the original one again after removal."""
    model = FAMILIES["dit"].build()
    del model.transformer_blocks[1:]
    original = output(model, inputs("dit"))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_equal_up_to_order(output(compiled, inputs("dit")), original)
    mhla.apply_mhla(compiled, **settings)
    assert mhla.is_patched(model)
    assert_equal_up_to_order(output(compiled, inputs("dit")), output(model, inputs("dit")))
    assert_changed(output(compiled, inputs("dit")), original)
    mhla.remove_mhla(compiled)
    assert_equal_up_to_order(output(compiled, inputs("dit")), original)


@pytest.mark.slow
def test_diffusers_own_form_compiles_after_its_first_forward(counter):
    """Its weights are made in the first forward, which therefore runs uncompiled."""
    model = FAMILIES["wan"].build()
    del model.blocks[1:]
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=FAMILIES["wan"].grid))
    expected = output(model, inputs("wan"))
    assert_equal_up_to_order(output(torch.compile(model, backend=counter, fullgraph=True), inputs("wan")), expected)
    assert counter.frame_count == 1


class Scaled(nn.Module):
    """Works on what its block returns with numbers, which PyTorch's compiler makes arguments of its graphs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x):
        query, key, value = self.layer(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        return x * 0.25 + 0.1


@torch.no_grad()
def test_a_model_without_a_family_keeps_its_numbers(counter):
    model, x = seeded(Scaled), torch.randn(1, 192, 32)
    expected = model(x)
    mhla.apply_mhla(model, **NOTHING_DENSE, grid=(4, 6, 8), density=1.0)
    assert_equal_up_to_order(torch.compile(model, backend=counter)(x), expected)
    mhla.change_mhla(model, density=0.2)
    assert_equal_up_to_order(torch.compile(model, backend=counter)(x), model(x))
    assert_changed(model(x), expected)
