"""A patched model goes on living with diffusers: adapters, compilation, offloading, casting, caches, saving."""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload
from diffusers import DiTPipeline, FirstBlockCacheConfig
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend

import mhla_diffusers as mhla

from .models import (
    FAMILIES,
    assert_changed,
    dit_pipeline,
    inputs,
    output,
    patched,
    relative_change,
    wan_pipeline,
)

MODELS = list(FAMILIES)
ONE_PER_CLASS = ["wan", "wan_vace", "sana", "dit"]
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
EVERYTHING = {"output_norm": True, "output_gate": True, "convolution": 3}
"""Settings that give a layer every kind of weight that it can have."""


def assert_equal_up_to_order(found, expected):
    """The same operations, perhaps in another order: float32 rounding of outputs of the order of 1."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def mixings(model):
    return [layer.mixing for layer in mhla.mhla_layers(model).values()]


def self_attentions(model):
    return [module for path, module in model.named_modules() if path.endswith("attn1")]


def cast(arguments, dtype):
    """Floating point arguments in ``dtype``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()}


# ---------------------------------------------------------------- LoRA


def lora(*projections):
    """An adapter that changes the output from the start."""
    torch.manual_seed(2)
    return LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=list(projections))


def with_lora(model, *projections):
    """Diffusers' way where the class has it; DiT has not, so PEFT's own."""
    if hasattr(model, "add_adapter"):
        model.add_adapter(lora(*projections))
        return model
    return inject_adapter_in_model(lora(*projections), model).eval()


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_lora_on_every_projection_acts_and_unloads_without_a_trace(name, projection):
    model = patched(name)
    expected, keys = output(model, inputs(name)), list(model.state_dict())
    with_lora(model, projection)
    assert_changed(output(model, inputs(name)), expected)
    if hasattr(model, "unload_lora"):
        model.unload_lora()
    else:
        recurse_remove_peft_layers(model)
    assert torch.equal(output(model, inputs(name)), expected)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_lora_is_fused_and_unfused(name):
    model = with_lora(patched(name, layers="2/3"), *PROJECTIONS)
    adapted = output(model, inputs(name))
    if hasattr(model, "fuse_lora"):
        model.fuse_lora()
    else:
        for layer in lora_layers(model):
            layer.merge()
    assert all(layer.merged for layer in lora_layers(model))
    assert_equal_up_to_order(output(model, inputs(name)), adapted)
    if hasattr(model, "unfuse_lora"):
        model.unfuse_lora()
    else:
        for layer in lora_layers(model):
            layer.unmerge()
    assert not any(layer.merged for layer in lora_layers(model))
    assert_equal_up_to_order(output(model, inputs(name)), adapted)


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_patching_and_removing_under_lora(name):
    """The order of the two does not matter, and removal leaves the adapter in place."""
    only_lora = with_lora(FAMILIES[name].build(), *PROJECTIONS)
    expected = output(only_lora, inputs(name))
    mhla.apply_mhla(only_lora, blocks=FAMILIES[name].blocks)
    both = with_lora(patched(name), *PROJECTIONS)
    assert torch.equal(output(only_lora, inputs(name)), output(both, inputs(name)))
    for model in (only_lora, both):
        mhla.remove_mhla(model)
        assert torch.equal(output(model, inputs(name)), expected)


@pytest.mark.parametrize("name", [name for name in ONE_PER_CLASS if name != "dit"])
def test_lora_file_of_a_patched_model_holds_the_adapter_only_and_loads(name, tmp_path):
    """DiT has no LoRA files in diffusers."""
    model = with_lora(patched(name), *PROJECTIONS)
    model.save_lora_adapter(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert all("lora_" in key and "mhla" not in key for key in load_file(file))
    other = patched(name)
    other.load_lora_adapter(tmp_path, prefix=None, weight_name=file.name)
    assert torch.equal(output(other, inputs(name)), output(model, inputs(name)))


def test_lora_loads_into_a_patched_pipeline():
    """The form in which users have them: ``pipe.load_lora_weights``, a scale, fuse, unload."""
    weights = get_peft_model_state_dict(with_lora(FAMILIES["wan"].build(), *PROJECTIONS), adapter_name="default")
    pipe = mhla.apply_mhla(wan_pipeline(), blocks=FAMILIES["wan"].blocks)
    expected = output(pipe.transformer, inputs("wan"))
    pipe.load_lora_weights({f"transformer.{key}": value for key, value in weights.items()}, adapter_name="style")
    adapted = output(pipe.transformer, inputs("wan"))
    assert_changed(adapted, expected)
    pipe.set_adapters("style", 0.0)
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), expected)
    pipe.set_adapters("style", 1.0)
    pipe.fuse_lora(components=["transformer"])
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), adapted)
    pipe.unfuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), expected)
    assert mhla.is_patched(pipe)


def test_an_adapter_freezes_mhla_like_every_other_weight_until_it_is_unfrozen():
    """PEFT leaves the adapter alone trainable; whoever trains both says so after ``add_adapter``."""
    model = with_lora(patched("wan"), *PROJECTIONS)
    assert not any(matrix.requires_grad for matrix in mixings(model))
    for matrix in mixings(model):
        matrix.requires_grad_(True)
    model(**inputs("wan")).sample.square().mean().backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert all(name.endswith("mhla.mixing") or "lora_" in name for name in trained)
    assert len(trained) == 4 + 2 * len(lora_layers(model))


# ---------------------------------------------------------------- fused projections


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_fused_query_key_and_value(name):
    """``fuse_qkv_projections`` reaches Wan only (diffusers skips ``Attention``, which SANA and DiT are made of); there
    an attention is fused one by one."""
    model = patched(name, layers="2/3")
    expected = output(model, inputs(name))
    replaced = [attn for attn in self_attentions(model) if isinstance(attn.processor, mhla.MHLAProcessor)]
    if name.startswith("wan"):
        model.fuse_qkv_projections()
    else:
        if name == "sana":
            model.fuse_qkv_projections()
            assert not any(attn.fused_projections for attn in replaced)
        for attn in replaced:
            with torch.no_grad():
                attn.fuse_projections()
    assert all(attn.fused_projections for attn in replaced)
    assert_equal_up_to_order(output(model, inputs(name)), expected)
    with torch.no_grad():
        weight = replaced[0].to_qkv.weight.clone()
        replaced[0].to_qkv.weight.mul_(2)
        assert_changed(output(model, inputs(name)), expected)
        replaced[0].to_qkv.weight.copy_(weight)
    if name.startswith("wan"):
        model.unfuse_qkv_projections()
        assert not any(hasattr(attn, "to_qkv") for attn in replaced)
        assert torch.equal(output(model, inputs(name)), expected)


def test_a_fused_model_is_patched_and_restored():
    model = FAMILIES["wan"].build()
    model.fuse_qkv_projections()
    original = output(model, inputs("wan"))
    mhla.apply_mhla(model, blocks=FAMILIES["wan"].blocks)
    assert_equal_up_to_order(output(model, inputs("wan")), output(patched("wan"), inputs("wan")))
    mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs("wan")), original)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    """Bit for bit, while every layer runs twice."""
    gradients, runs = [], []
    for checkpointing in (False, True):
        model = patched(name, **EVERYTHING).train()
        counted = []
        for layer in mhla.mhla_layers(model).values():
            layer.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        if checkpointing:
            model.enable_gradient_checkpointing()
        # DiT drops class labels at random
        torch.manual_seed(0)
        model(**inputs(name)).sample.square().mean().backward()
        gradients.append({path: parameter.grad for path, parameter in model.named_parameters()})
        runs.append(len(counted))
    assert runs == [FAMILIES[name].self_attentions, 2 * FAMILIES[name].self_attentions]
    for path, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][path] is None), path
        assert gradient is None or torch.equal(gradient, gradients[1][path]), path


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_reaches_every_weight_of_every_layer(name):
    """And the matrix stays inside (0, 1)."""
    model = patched(name, **EVERYTHING).train()
    before = {
        path: {key: value.clone() for key, value in layer.state_dict().items()}
        for path, layer in mhla.mhla_layers(model).items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mhla.register_mixing_clip(optimizer, model)
    model(**inputs(name)).sample.square().mean().backward()
    optimizer.step()
    for path, layer in mhla.mhla_layers(model).items():
        for key, value in layer.state_dict().items():
            assert value.isfinite().all(), f"{path}.{key}"
            assert not torch.equal(value, before[path][key]), f"{path}.{key}"
        assert layer.mixing.min() > 0
        assert layer.mixing.max() < 1


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_its_samples(name):
    """Classifier-free guidance: a batch of two gives what two batches of one give."""
    model, both = patched(name, **EVERYTHING), inputs(name)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.gate.weight.add_(0.2)
            layer.convolution.weight.add_(0.2)
    expected = output(model, both)
    for sample in range(2):
        one = {key: value[sample : sample + 1] for key, value in both.items()}
        assert_equal_up_to_order(output(model, one), expected[sample : sample + 1])


# ---------------------------------------------------------------- compilation


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_the_whole_transformer_compiles_to_one_graph(name, counter):
    """``fullgraph=True`` refuses graph breaks; the second call compiles nothing."""
    model = shortened(name, **EVERYTHING)
    expected = output(model, inputs(name))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_equal_up_to_order(output(compiled, inputs(name)), expected)
        assert counter.frame_count == 1


@pytest.mark.slow
def test_one_compilation_per_resolution(counter):
    model = shortened("wan")
    requests = [inputs("wan"), inputs("wan", ragged=True)]
    expected = [output(model, arguments) for arguments in requests]
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    counts = []
    for arguments, wanted in zip(requests * 2, expected * 2, strict=True):
        assert_equal_up_to_order(output(compiled, arguments), wanted)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]


@pytest.mark.slow
def test_a_function_around_the_model_compiles_at_every_resolution(counter):
    model = shortened("sana")
    compiled = torch.compile(lambda arguments: model(**arguments).sample, backend=counter, fullgraph=True)
    with torch.no_grad():
        for count, ragged in enumerate((False, True), start=1):
            arguments = inputs("sana", ragged=ragged)
            assert_equal_up_to_order(compiled(arguments), output(model, arguments))
            assert counter.frame_count == count


@pytest.mark.slow
def test_dynamic_compilation_is_right_at_every_resolution(counter):
    """How often it compiles is not promised: the token grid is a constant of every graph."""
    model = patched("sana")
    del model.transformer_blocks[1:]
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for ragged in (False, True):
        arguments = inputs("sana", ragged=ragged)
        assert_equal_up_to_order(output(compiled, arguments), output(model, arguments))


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
def test_repeated_blocks_compile_once_per_resolution(counter):
    """Once for all blocks, whatever their number, at three resolutions."""
    model, usual = patched("wan"), inputs("wan")
    narrow = usual | {"hidden_states": usual["hidden_states"][..., :8, :6]}
    requests = [usual, inputs("wan", ragged=True), narrow]
    expected = [output(model, arguments) for arguments in requests]
    model.compile_repeated_blocks(backend=counter, fullgraph=True)
    for _ in range(2):
        for arguments, wanted in zip(requests, expected, strict=True):
            assert_equal_up_to_order(output(model, arguments), wanted)
    assert counter.frame_count == len(requests)


@pytest.mark.slow
def test_repeated_blocks_of_vace_compile_once_for_each_kind(counter):
    """Three kinds, as without the patch: main blocks, the first control block with its input projection, the others."""
    model, arguments = patched("wan_vace"), inputs("wan_vace")
    expected = output(model, arguments)
    model.compile_repeated_blocks(backend=counter, fullgraph=True)
    for _ in range(2):
        assert_equal_up_to_order(output(model, arguments), expected)
        assert counter.frame_count == 3


@pytest.mark.parametrize("name", ["sana", "dit"])
def test_diffusers_knows_no_repeated_blocks_in_sana_and_dit(name):
    """``compile_repeated_blocks`` refuses these classes, patched or not; when that changes, test them above."""
    for model in (FAMILIES[name].build(), patched(name)):
        with pytest.raises(ValueError, match="_repeated_blocks"):
            model.compile_repeated_blocks()


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


# ---------------------------------------------------------------- offloading


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


def test_diffusers_offloads_no_groups_of_dit():
    """It refuses the class, patched or not."""
    for model in (FAMILIES["dit"].build(), patched("dit")):
        with pytest.raises(ValueError, match="does not support group offloading"):
            model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")


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


def test_an_offloaded_model_is_refused():
    """A new layer takes the device of the attention's weights, which is meta here: it would have no values."""
    model = FAMILIES["wan"].build()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="offloaded; patch it before"):
        mhla.apply_mhla(model, blocks=FAMILIES["wan"].blocks)
    assert not mhla.is_patched(model)


@pytest.mark.parametrize("settings", GROUPS)
@pytest.mark.parametrize("name", ["wan", "sana"])
def test_a_model_under_group_offloading_is_refused(name, settings):
    model = FAMILIES[name].build()
    model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), **settings)
    with pytest.raises(ValueError, match="offloaded; patch it before"):
        mhla.apply_mhla(model, blocks=FAMILIES[name].blocks)
    assert not mhla.is_patched(model)


# ---------------------------------------------------------------- types and devices


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_layerwise_casting_keeps_the_mixing_matrix(name):
    """Stored in 8 bits: the linear layers, the gate's too. In full: the matrix and the output norm."""
    model = patched(name, **EVERYTHING)
    expected, before = output(model, inputs(name)), [matrix.clone() for matrix in mixings(model)]
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    # four bits of significand round a weight by up to 6%, in every layer one after the other
    assert 0 < relative_change(output(model, inputs(name)), expected) < 0.2
    for layer, matrix in zip(mhla.mhla_layers(model).values(), before, strict=True):
        assert layer.mixing.dtype == layer.output_norm.dtype == torch.float32
        assert torch.equal(layer.mixing, matrix)
        assert layer.gate.weight.dtype == layer.convolution.weight.dtype == torch.float8_e4m3fn


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
@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_to_moves_every_weight(name):
    """To the meta device, which needs no accelerator; and a model on meta can be patched."""
    model = patched(name, **EVERYTHING).to("meta")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    model = mhla.apply_mhla(FAMILIES[name].build().to("meta"), blocks=FAMILIES[name].blocks, **EVERYTHING)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda(name):
    expected = output(patched(name), inputs(name))
    model = patched(name).to("cuda")
    arguments = {key: value.to("cuda") for key, value in inputs(name).items()}
    assert relative_change(output(model, arguments).cpu(), expected) < 1e-3
    assert relative_change(output(model.to("cpu"), inputs(name)), expected) == 0


# ---------------------------------------------------------------- caches and attention backends


def test_first_block_cache():
    """A threshold of 0 never skips; with a high one the second step runs the first block only."""
    expected = output(patched("wan"), inputs("wan"))
    later = inputs("wan") | {"timestep": torch.tensor([490, 240])}
    for threshold, runs in ((0.0, 4), (10.0, 1)):
        model = patched("wan")
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        with model.cache_context("cond"):
            assert torch.equal(output(model, inputs("wan")), expected)
            counted = []
            for layer in mhla.mhla_layers(model).values():
                layer.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
            found = output(model, later)
        assert len(counted) == runs
        assert found.isfinite().all()
        model.disable_cache()
        assert torch.equal(output(model, inputs("wan")), expected)


def test_a_model_with_a_cache_is_patched_and_restored():
    model = FAMILIES["wan"].build()
    original = output(model, inputs("wan"))
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    mhla.apply_mhla(model, blocks=FAMILIES["wan"].blocks)
    with model.cache_context("cond"):
        assert torch.equal(output(model, inputs("wan")), output(patched("wan"), inputs("wan")))
    mhla.remove_mhla(model)
    with model.cache_context("cond"):
        assert torch.equal(output(model, inputs("wan")), original)


@pytest.mark.parametrize("name", ["sana", "dit"])
def test_diffusers_has_no_caches_for_sana_and_dit(name):
    """When that changes, test them above."""
    assert not hasattr(FAMILIES[name].build(), "enable_cache")


@pytest.fixture
def active_backend():
    """``set_attention_backend`` also changes the backend of every other model; put it back."""
    yield
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def softmax_kernels(model, arguments):
    """How often each implementation of softmax attention ran."""
    with torch.profiler.profile() as profile:
        output(model, arguments)
    names = [event.name for event in profile.events()]
    return {
        "flash": names.count("aten::_scaled_dot_product_flash_attention_for_cpu"),
        "math": names.count("aten::_scaled_dot_product_attention_math"),
    }


@pytest.mark.parametrize("form", ["apply_mhla", "single instance"])
def test_attention_backend_reaches_kept_layers_and_cross_attention(form, active_backend):
    model, arguments = FAMILIES["wan"].build(), inputs("wan")
    if form == "apply_mhla":
        mhla.apply_mhla(model, blocks=(2, 2, 3), layers=[0, 1])
        softmax = 2 + 4
    else:
        model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=FAMILIES["wan"].grid))
        softmax = 4
    expected = output(model, arguments)
    assert softmax_kernels(model, arguments) == {"flash": softmax, "math": 0}
    model.set_attention_backend("_native_math")
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    assert softmax_kernels(model, arguments) == {"flash": 0, "math": softmax}
    assert_equal_up_to_order(output(model, arguments), expected)


@pytest.mark.parametrize("name", ["sana", "dit"])
def test_attention_backend_leaves_the_rest_working(name, active_backend):
    """SANA's and DiT's own processors do not look at it; nor does MHLA."""
    model = patched(name)
    expected = output(model, inputs(name))
    model.set_attention_backend("_native_math")
    assert torch.equal(output(model, inputs(name)), expected)


# ---------------------------------------------------------------- diffusers' own save and load


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained_writes_the_weights_and_from_pretrained_opens_the_unpatched_model(name, tmp_path):
    """diffusers knows nothing of the patch: it reports the MHLA tensors as unexpected and ignores them.
    ``save_mhla`` and ``load_mhla`` keep them.
    """
    model, base = patched(name), FAMILIES[name].build()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert set(saved) == set(model.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == type(base).__name__
    opened, report = type(base).from_pretrained(tmp_path, output_loading_info=True)
    assert sorted(report["unexpected_keys"]) == sorted(f"{layer}.mixing" for layer in mhla.mhla_layers(model))
    assert not report["missing_keys"]
    assert not mhla.is_patched(opened)
    assert torch.equal(output(opened, inputs(name)), output(base, inputs(name)))
    # patched again, it takes the whole state dict
    mhla.apply_mhla(opened, blocks=FAMILIES[name].blocks)
    opened.load_state_dict(saved)
    assert torch.equal(output(opened, inputs(name)), output(model, inputs(name)))


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_saved_pipeline_of_a_patched_dit_names_the_class_of_diffusers(made, tmp_path):
    """Whoever opens it need not have this package, whether the pipeline was made before or after the patch."""
    pipe = mhla.apply_mhla(dit_pipeline(), blocks=(4, 2))
    if made == "after":
        pipe = DiTPipeline(transformer=pipe.transformer, vae=pipe.vae, scheduler=pipe.scheduler)
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "DiTTransformer2DModel"]


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_pickled_model_is_patched(name, tmp_path):
    """``torch.save`` of a whole model, as launchers of several processes do it; the copy can be restored."""
    model = patched(name)
    torch.save(model, tmp_path / "model.pt")
    opened = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(output(opened, inputs(name, ragged=True)), output(model, inputs(name, ragged=True)))
    mhla.remove_mhla(opened)
    assert type(opened) is type(FAMILIES[name].build())
    assert torch.equal(output(opened, inputs(name)), output(FAMILIES[name].build(), inputs(name)))


def test_a_deep_copy_of_an_adapted_model_is_independent():
    model = with_lora(patched("wan"), *PROJECTIONS)
    clone = copy.deepcopy(model)
    expected = output(model, inputs("wan"))
    assert torch.equal(output(clone, inputs("wan")), expected)
    clone.unload_lora()
    mhla.remove_mhla(clone)
    assert torch.equal(output(model, inputs("wan")), expected)
