"""The context of a call: threads, recomputation, copies and compilation each see their own token grid."""

import copy
import io
import threading
from functools import partial

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from mhla_diffusers.patching.context import CallContext, call_context, current
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mhla_diffusers as mhla
from mhla_diffusers.config import Step

from ..models import FAMILIES, inputs, output, patched
from ..refusals import refused
from .shared import assert_equal_up_to_order

BLOCKS = {"wan": (2, 2, 2), "sana": (2, 2), "dit": (2, 2)}


SPARSE = "sparse wan"


def gridded(name):
    """With blocks and random convolutions over the grid, or lists, so that a wrong grid shows everywhere."""
    if name == SPARSE:
        return patched("wan", density=0.2, block_size=4)
    model, generator = patched(name, blocks=BLOCKS[name], convolution=3), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.convolution.weight.copy_(torch.randn(layer.convolution.weight.shape, generator=generator))
    return model


def two_inputs(name):
    """Inputs of one number of tokens and different grids: landscape and portrait; of two sizes for DiT, of squares."""
    wide = inputs(name.removeprefix("sparse "))
    if name == "dit":
        return wide, inputs(name, ragged=True)
    latents = wide["hidden_states"][..., :4, :] if name == "sana" else wide["hidden_states"]
    return wide | {"hidden_states": latents}, wide | {"hidden_states": latents.mT.contiguous()}


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def interleave():
    """Runs something in another thread in the middle of a model's next forward: before its last block."""

    def run(model, work):
        blocks = getattr(model, "blocks", None) or model.transformer_blocks

        def between(*_):
            handle.remove()
            in_thread(work)

        handle = blocks[-1].register_forward_pre_hook(between)

    return run


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, pickled], ids=["one model", "copy", "pickle"])
@pytest.mark.parametrize("name", [*BLOCKS, SPARSE])
def test_two_threads_run_one_transformer_or_its_copy_at_two_sizes(name, copied, interleave):
    """The second forward happens while the first is between two layers."""
    model = gridded(name)
    wide, tall = two_inputs(name)
    expected = [output(model, arguments) for arguments in (wide, tall)]
    other, found = copied(model), {}
    interleave(model, lambda: found.update(tall=output(other, tall)))
    assert torch.equal(output(model, wide), expected[0])
    assert torch.equal(found["tall"], expected[1])


def gradients(model):
    found = {path: parameter.grad for path, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def reentrant(block, *args):
    return checkpoint(block.__call__, *args, use_reentrant=True)


@pytest.mark.parametrize("function", [None, reentrant], ids=["without reentry", "with reentry"])
@pytest.mark.parametrize("name", [*BLOCKS, SPARSE])
def test_two_forwards_of_two_sizes_before_one_backward_under_gradient_checkpointing(name, function):
    """The gradients without checkpointing; the backward pass runs in a thread of its own."""
    model = gridded(name)
    requests = two_inputs(name)
    for arguments in requests:
        arguments["hidden_states"].requires_grad_(True)  # reentry needs it

    def loss():
        return sum(model(**arguments).sample.square().mean() for arguments in requests)

    loss().backward()
    expected = gradients(model)
    model.enable_gradient_checkpointing(function)
    total = loss()
    in_thread(total.backward)
    found = gradients(model)
    assert list(found) == list(expected)
    for path, gradient in expected.items():  # reentry adds the two gradients in another order
        torch.testing.assert_close(found[path], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("disabled", [False, True], ids=["MHLA", "disabled step"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_recomputation_in_another_thread_has_the_context_of_its_forward(name, disabled):
    """Where CUDA runs the backward pass; here another forward of another size has run since, in this thread."""
    model = gridded(name)
    if disabled:
        mhla.change_mhla(model, softmax_steps=0.5)
    wide, tall = two_inputs(name)

    def loss():
        with call_context(step=Step(0, 2), step_disabled=disabled):
            return model(**wide).sample.square().mean()

    loss().backward()
    expected = gradients(model)
    assert any(path.endswith("mhla.mixing") for path in expected) is not disabled
    model.enable_gradient_checkpointing()
    total = loss()
    with call_context(step=Step(1, 2), step_disabled=False):
        output(model, tall)
        in_thread(total.backward)
    assert current().grid is None
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())


def test_removal_gives_back_the_checkpointing_of_diffusers():
    model = FAMILIES["wan"].build()
    model.enable_gradient_checkpointing()
    before = model._gradient_checkpointing_func
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    model(**inputs("wan"))
    assert model._gradient_checkpointing_func is not before
    mhla.remove_mhla(model)
    assert model._gradient_checkpointing_func is before


def test_checkpointing_that_is_not_diffusers_own():
    """Wan reads the grid off what its attention is handed; SANA has nothing there, and says what does it."""
    for name in ("wan", "sana"):
        model = gridded(name)
        wide, tall = two_inputs(name)
        (model(**wide).sample.mean() + model(**tall).sample.mean()).backward()
        expected = gradients(model)
        for block in getattr(model, "blocks", None) or model.transformer_blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        total = model(**wide).sample.mean() + model(**tall).sample.mean()
        if name == "sana":
            with refused("transformer.enable_gradient_checkpointing()"):
                total.backward()
        else:
            total.backward()
            found = gradients(model)
            assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())


def test_a_grid_is_forgotten_after_the_forward_and_after_a_failure():
    model = patched("sana")
    output(model, inputs("sana"))
    attn = model.transformer_blocks[0].attn1
    with refused("token grid"):
        attn(torch.zeros(1, 64, 32))
    with refused("1 tokens, too few for 4 blocks"):
        output(model, inputs("sana") | {"hidden_states": torch.zeros(2, 4, 1, 8)})
    with refused("token grid"):
        attn(torch.zeros(1, 8, 32))
    # and so is that the patch was disabled, which models without hooks of their own would read
    mhla.change_mhla(model, softmax_steps=1.0)
    output(model, inputs("sana"))
    assert not current().disabled


def test_distributed_data_parallel():
    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        model = gridded("wan")
        wide, tall = two_inputs("wan")
        (model(**wide).sample.mean() + model(**tall).sample.mean()).backward()
        expected = gradients(model)
        model.enable_gradient_checkpointing()
        parallel = DistributedDataParallel(model)
        with parallel.no_sync():  # so that one backward may follow two forwards
            (parallel(**wide).sample.mean() + parallel(**tall).sample.mean()).backward()
        found = gradients(model)
        assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())
    finally:
        destroy_process_group()


def test_first_block_cache_at_two_sizes(interleave):
    """Its hooks run blocks through functions of their own."""
    model = gridded("wan")
    wide, tall = two_inputs("wan")
    expected = output(model, wide)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    clone = gridded("wan")
    interleave(model, lambda: output(clone, tall))
    with model.cache_context("cond"):
        assert torch.equal(output(model, wide), expected)


def compiled_parts(model, blocks_alone, backend):
    """The transformer as a whole, or its blocks alone."""
    torch._dynamo.reset()
    if not blocks_alone:
        return torch.compile(model, backend=backend, fullgraph=True)
    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("blocks_alone", [False, True], ids=["whole transformer", "repeated blocks"])
def test_threads_share_compiled_graphs(blocks_alone):
    """One graph per resolution, of all four blocks too; a second thread compiles nothing anew, and has its own grid."""
    counter, model = CompileCounterWithBackend("eager"), gridded("wan")
    if not blocks_alone:
        del model.blocks[1:]
    requests, found = two_inputs("wan"), []
    expected = [output(model, arguments) for arguments in requests]
    compiled = compiled_parts(model, blocks_alone, counter)

    def run():
        found.extend(output(compiled, arguments) for arguments in requests)

    run()
    assert counter.frame_count == 2
    in_thread(run)
    assert counter.frame_count == 2
    for one, wanted in zip(found, expected * 2, strict=True):
        assert_equal_up_to_order(one, wanted)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("blocks_alone", [False, True], ids=["whole transformer", "repeated blocks"])
def test_compiled_under_gradient_checkpointing(blocks_alone):
    model = gridded("wan")
    del model.blocks[1:]
    wide, tall = two_inputs("wan")

    def loss(run):
        return run(**wide).sample.square().mean() + run(**tall).sample.square().mean()

    loss(model).backward()
    expected = gradients(model)
    model.enable_gradient_checkpointing()
    loss(compiled_parts(model, blocks_alone, "aot_eager")).backward()
    for path, gradient in gradients(model).items():
        assert_equal_up_to_order(gradient, expected[path])
    torch._dynamo.reset()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_forward_within_another_leaves_its_grid_alone(name):
    """As a hook of a student that asks a patched teacher, here at another resolution."""
    wide, tall = two_inputs(name)
    student, teacher = gridded(name), gridded(name)
    expected, asked = output(student, wide), output(teacher, tall)
    blocks = getattr(student, "blocks", None) or student.transformer_blocks
    found = []
    blocks[0].register_forward_hook(lambda *_: found.append(output(teacher, tall)))
    assert torch.equal(output(student, wide), expected)
    assert torch.equal(found[0], asked)
    assert current().grid is None


def refuse(*_):
    raise RuntimeError("refused before the patch's own hook")


def test_what_fails_before_the_forward_begins_leaves_the_context_alone():
    model = FAMILIES["dit"].build()
    expected = output(model, inputs("dit"))
    hook = model.register_forward_pre_hook(refuse)  # before the patch's
    mhla.apply_mhla(model, blocks=FAMILIES["dit"].blocks)
    with mhla.mhla_disabled(model):
        with pytest.raises(RuntimeError, match="refused"):
            output(model, inputs("dit"))
        hook.remove()
        assert torch.equal(output(model, inputs("dit")), expected)


def test_ctrl_c_within_a_forward_leaves_the_next_one_alone():
    """PyTorch runs its hooks after exceptions, and not after KeyboardInterrupt."""

    def interrupt(*_):
        raise KeyboardInterrupt

    model = patched("dit")
    expected = output(model, inputs("dit"))
    hook = model.transformer_blocks[1].register_forward_pre_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            output(model, inputs("dit"))
    hook.remove()
    assert torch.equal(output(model, inputs("dit")), expected)
    assert current() == CallContext()


def test_a_forward_that_is_not_called_tells_that_dense_steps_have_no_effect():
    model = FAMILIES["wan"].build()
    mhla.apply_mhla(model, density=0.5, softmax_steps=2)
    with pytest.warns(UserWarning, match="softmax_steps=2 has no effect"), torch.no_grad():
        model.forward(**inputs("wan"))
