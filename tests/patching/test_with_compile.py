"""torch.compile and torch.export of patched models."""

import copy
import gc
import re
from weakref import WeakSet

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mhla_diffusers as mhla
from mhla_diffusers.patching import recompiling

from ..models import FAMILIES, assert_changed, inputs, output, patched
from .shared import EVERYTHING, ONE_PER_CLASS, assert_equal_up_to_order


@pytest.fixture
def counter():
    """Counts graphs; compiles to plain PyTorch, so that what is tested is the capture."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("eager")
    torch._dynamo.reset()


def shortened(name, **settings):
    """A patched model of one kept and one replaced layer, which is enough for a compiler."""
    model = FAMILIES[name].build()
    for attribute in ("blocks", "transformer_blocks"):
        if hasattr(model, attribute):
            del getattr(model, attribute)[2:]
    return mhla.apply_mhla(model, blocks=FAMILIES[name].blocks, **({"layers": [-1]} | settings))


def runs(compiled, counter, requests, expected):
    """Check what comes out of some inputs, and return how many graphs there are after each."""
    counts = []
    for arguments, wanted in zip(requests, expected, strict=True):
        assert_equal_up_to_order(output(compiled, arguments), wanted)
        counts.append(counter.frame_count)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_the_whole_transformer_compiles_to_one_graph_per_resolution(name, counter):
    """``fullgraph=True`` refuses graph breaks; a resolution that was seen compiles nothing."""
    model, sizes = shortened(name, **EVERYTHING), (False, True) if name in ("wan", "sana") else (False,)
    requests = [inputs(name, ragged=ragged) for ragged in sizes] * 2
    expected = [output(model, arguments) for arguments in requests]
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert runs(compiled, counter, requests, expected) == ([1, 2, 2, 2] if len(sizes) == 2 else [1, 1])


@pytest.mark.slow
def test_more_resolutions_than_pytorch_allows_graphs(counter, monkeypatch):
    """PyTorch's limit is raised, 8 as it comes and 2 here, and back after removal."""
    monkeypatch.setattr(recompiling, "_owners", WeakSet())
    monkeypatch.setattr(recompiling, "_limits_before", [])
    model, other = FAMILIES["sana"].build(), FAMILIES["sana"].build()
    del model.transformer_blocks[1:]
    with torch._dynamo.config.patch(recompile_limit=2):
        for one in (model, other):
            mhla.apply_mhla(one, blocks=(1, 1))
        assert torch._dynamo.config.recompile_limit == 64
        model.compile(backend=counter, fullgraph=True)
        for rows in (2, 3, 4):
            arguments = inputs("sana") | {"hidden_states": torch.randn(2, 4, rows, 3)}
            assert output(model, arguments).shape == (2, 4, rows, 3)
        mhla.remove_mhla(other)
        assert torch._dynamo.config.recompile_limit == 64
        mhla.remove_mhla(model)
        assert torch._dynamo.config.recompile_limit == 2


@pytest.mark.slow
def test_dynamic_compilation_is_right_at_every_resolution(counter):
    """How often it compiles is not promised: the token grid is a constant of every graph."""
    model, requests = patched("sana"), [inputs("sana", ragged=ragged) for ragged in (False, True)]
    del model.transformer_blocks[1:]
    expected = [output(model, arguments) for arguments in requests]
    runs(torch.compile(model, backend=counter, fullgraph=True, dynamic=True), counter, requests, expected)


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [False, True])
def test_another_graph_for_another_resolution_is_logged_once(in_blocks, counter, caplog):
    caplog.set_level("INFO", "mhla_diffusers")
    model = patched("sana")
    del model.transformer_blocks[1:]
    said = "SanaTransformer2DModel is compiled again: .* one graph per resolution"
    (model.transformer_blocks[0] if in_blocks else model).compile(backend=counter, fullgraph=True, dynamic=True)
    for ragged, count in ((False, 0), (False, 0), (True, 1), (False, 1), (True, 1)):
        output(model, inputs("sana", ragged=ragged))
        assert sum(re.match(said, record.getMessage()) is not None for record in caplog.records) == count


@pytest.mark.slow
def test_patching_and_removing_a_compiled_model(counter):
    """Each compiles anew, and the compiled model is the original one again after removal."""
    model = FAMILIES["sana"].build()
    del model.transformer_blocks[1:]
    original = output(model, inputs("sana"))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_equal_up_to_order(output(compiled, inputs("sana")), original)
    mhla.apply_mhla(compiled, blocks=(4, 2))
    assert mhla.is_patched(model)
    assert_equal_up_to_order(output(compiled, inputs("sana")), output(model, inputs("sana")))
    assert_changed(output(compiled, inputs("sana")), original)
    mhla.remove_mhla(compiled)
    assert_equal_up_to_order(output(compiled, inputs("sana")), original)


@pytest.mark.slow
def test_diffusers_own_form_compiles_after_its_first_forward(counter):
    """Its weights are made in the first forward, which therefore runs uncompiled."""
    model = FAMILIES["wan"].build()
    del model.blocks[1:]
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=FAMILIES["wan"].grid))
    expected = output(model, inputs("wan"))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_equal_up_to_order(output(compiled, inputs("wan")), expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_export_gives_a_program_for_one_resolution(name):
    """``torch.export`` works; the token grid is a constant of the program, so another resolution is refused."""
    model = shortened(name, **EVERYTHING)
    fixed = {"return_dict": False}
    with torch.no_grad():
        program = torch.export.export(model, args=(), kwargs=inputs(name) | fixed).module()
    assert_equal_up_to_order(program(**inputs(name, seed=8), **fixed)[0], output(model, inputs(name, seed=8)))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        program(**inputs(name, ragged=True), **fixed)


def test_a_copy_of_a_patched_model_and_one_that_is_gone_count_too(monkeypatch):
    monkeypatch.setattr(recompiling, "_owners", WeakSet())
    monkeypatch.setattr(recompiling, "_limits_before", [])
    with torch._dynamo.config.patch(recompile_limit=2):
        model = mhla.apply_mhla(FAMILIES["sana"].build(), blocks=(1, 1))
        copied = copy.deepcopy(model)
        mhla.remove_mhla(model)
        assert torch._dynamo.config.recompile_limit == 64
        del copied
        gc.collect()
        assert torch._dynamo.config.recompile_limit == 2
