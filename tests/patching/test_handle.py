"""The handle of a patched transformer: one, found in one place, and switched off for a while."""

import copy
import threading

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import mhla_diffusers as mhla
from mhla_diffusers.patching import find_patched, layer_sensitivity, register_mixing_clip

from ..models import FAMILIES, inputs, output, patched
from ..pipelines import PIPELINES
from ..refusals import refused
from .shared import ONE_PER_CLASS, assert_same_footprint, footprint


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_and_its_transformers_give_the_same_handles(name):
    pipe = PIPELINES[name].build()
    assert find_patched(pipe) == {}
    mhla.apply_mhla(pipe, blocks=PIPELINES[name].blocks)
    handles = find_patched(pipe)
    assert tuple(handles) == PIPELINES[name].transformers
    for component, patch in handles.items():
        transformer = getattr(pipe, component)
        assert find_patched(transformer)["transformer"] is patch
        assert find_patched(pipe)[component] is patch and patch.transformer is transformer
        assert patch.config.blocks == PIPELINES[name].blocks
        assert list(patch.layers.values()) == list(mhla.mhla_layers(transformer).values())
    mhla.change_mhla(pipe, softmax_steps=1)
    assert find_patched(pipe) == handles, "the handle stays while settings change"
    assert all(patch.config.softmax_steps == 1 for patch in handles.values())
    mhla.remove_mhla(pipe)
    assert find_patched(pipe) == {}
    assert not any(find_patched(getattr(pipe, component)) for component in handles)


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_disabled_within_the_context_only(name):
    """With the same weights, and also when an exception leaves the context."""
    expected = output(FAMILIES[name].build(), inputs(name))
    model = patched(name)
    before, found = footprint(model), output(model, inputs(name))
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, inputs(name)), expected)
    with pytest.raises(KeyError), mhla.mhla_disabled(model):
        raise KeyError
    assert_same_footprint(model, before)
    assert torch.equal(output(model, inputs(name)), found)


def test_disabled_contexts_end_in_any_order():
    model = patched("wan")
    first, second = mhla.mhla_disabled(model), mhla.mhla_disabled(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not find_patched(model)["transformer"].running_attentions()
    second.__exit__(None, None, None)
    assert find_patched(model)["transformer"].running_attentions()


def test_removal_while_switched_off_stays_removed():
    model, expected = patched("wan"), output(FAMILIES["wan"].build(), inputs("wan"))
    with mhla.mhla_disabled(model):
        mhla.remove_mhla(model)
    assert not mhla.is_patched(model)
    assert torch.equal(output(model, inputs("wan")), expected)


def test_switched_off_before_the_first_forward_of_diffusers_own_form():
    """There are no layers yet, and the processors come back all the same."""
    model = FAMILIES["wan"].build()
    processor = mhla.MHLAProcessor(blocks=FAMILIES["wan"].blocks)
    model.set_attn_processor(processor)
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, inputs("wan")), output(FAMILIES["wan"].build(), inputs("wan")))
    assert set(model.attn_processors.values()) == {processor}


def test_mixing_is_clipped_after_every_step_until_the_hook_is_removed():
    for clip, inside in ((True, True), (False, False)):
        model = patched("sana", mixing_clip=clip)
        matrices = [layer.mixing for layer in mhla.mhla_layers(model).values()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle = register_mixing_clip(optimizer, model)
        for direction in (100.0, -100.0):
            for matrix in matrices:
                matrix.grad = torch.full_like(matrix, direction)
            optimizer.step()
            assert all(bool(((matrix > 0) & (matrix < 1)).all()) is inside for matrix in matrices)
        handle.remove()
        optimizer.step()
        assert all(matrix.max() > 1 for matrix in matrices)


def test_an_optimizer_made_too_early_is_refused():
    model = FAMILIES["wan"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("not patched"):
        register_mixing_clip(optimizer, model)
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    with refused("mixing matrix"):
        register_mixing_clip(optimizer, model)


def test_one_warning_at_the_next_forward_after_a_reset(caplog):
    """And none while it is switched off, or layers are measured one by one."""
    model = patched("wan", density=0.2)
    saved = model.attn_processors
    output(model, inputs("wan"))
    with mhla.mhla_disabled(model):
        output(model, inputs("wan"))
    layer_sensitivity(model, lambda: output(model, inputs("wan")))
    assert not caplog.records
    model.set_attn_processor(WanAttnProcessor())
    for _ in range(2):
        output(model, inputs("wan"))
    (record,) = caplog.records
    assert "4 patched layers do not run MHLA, for example blocks.0.attn1, which runs WanAttnProcessor" in record.message
    model.set_attn_processor(saved)
    output(model, inputs("wan"))
    model.set_attn_processor(WanAttnProcessor())
    output(model, inputs("wan"))
    assert len(caplog.records) == 2


def diffusion_case():
    return patched("wan"), FAMILIES["wan"].build(), lambda model: output(model, inputs("wan"))


@pytest.mark.parametrize("case", [diffusion_case])
def test_another_thread_runs_mhla_while_this_one_has_it_switched_off(case):
    model, plain, run = case()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if ".mhla." not in name})
    expected, is_off, is_done, found = run(model), threading.Event(), threading.Event(), []

    def elsewhere():
        is_off.wait(60)
        found.extend(run(model) for _ in range(2))
        is_done.set()

    other = threading.Thread(target=elsewhere)
    other.start()
    with mhla.mhla_disabled(model):
        is_off.set()
        is_done.wait(60)
        here = run(model)
    other.join()
    assert len(found) == 2
    assert all(torch.equal(one, expected) for one in found)
    assert torch.equal(here, run(plain))


def test_a_copy_made_while_it_is_switched_off_runs_mhla():
    model = patched("wan")
    expected = output(model, inputs("wan"))
    with mhla.mhla_disabled(model):
        copied = copy.deepcopy(model)
    assert torch.equal(output(copied, inputs("wan")), expected)


@pytest.mark.parametrize("settings", [{}, {"causal": "block", "block_length": 2}], ids=str)
def test_an_optimizer_without_the_clip_makes_no_nan(settings):
    """It brings entries of the locality matrix, which begin at 0, below it."""
    model, arguments = patched("wan", **settings).train(), inputs("wan")
    optimizer = torch.optim.AdamW((layer.mixing for layer in mhla.mhla_layers(model).values()), lr=0.3)
    for _ in range(3):
        model(**arguments, return_dict=False)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert min(float(layer.mixing.min()) for layer in mhla.mhla_layers(model).values()) < 0
    assert bool(output(model, arguments).isfinite().all())
