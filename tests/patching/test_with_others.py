"""A patch together with what else makes a pipeline fast: adapters, quantisation, step caches, casting, offloading.

Each is held to three things. With a patch that lists every pair of tokens, and so computes softmax attention, the
pipeline draws what it draws without the patch. With others it draws something else. And once the patch is removed, it
draws bit for bit what the other draws alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    LayerSkipConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_layer_skip,
)
from torch import nn

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE

from ..families.cases import ROUNDING
from ..models import FAMILIES, inputs, output, patched, relative_change
from ..pipelines import generate, wan_pipeline
from ..refusals import refused
from .shared import EVERYTHING, SPARSE, assert_equal_up_to_order, mixings

STEPS = 4
CPU = torch.device("cpu")
ALL_PAIRS = NOTHING_DENSE | {"density": 1.0}
MHLA = {"blocks": (3, 2, 1)}


def draw(pipe: Any) -> torch.Tensor:
    """Latents from the same noise."""
    return generate("wan", pipe, num_inference_steps=STEPS, output_type="latent")


def linears(pipe: Any) -> dict[str, nn.Linear]:
    """Linear layers of all blocks, by name."""
    modules = pipe.transformer.named_modules()
    return {name: module for name, module in modules if "block" in name and isinstance(module, nn.Linear)}


def load_lora(pipe: Any) -> None:
    """On every linear layer of the blocks, as few-step LoRAs are."""
    generator, weights = torch.Generator().manual_seed(2), {}
    for name, module in linears(pipe).items():
        for part, size in {"lora_A": (4, module.in_features), "lora_B": (module.out_features, 4)}.items():
            weights[f"transformer.{name}.{part}.weight"] = 0.3 * torch.randn(size, generator=generator)
    pipe.load_lora_weights(weights, adapter_name="few")


def fuse_lora(pipe: Any) -> None:
    load_lora(pipe)
    pipe.fuse_lora(components=["transformer"])


def quantise(pipe: Any, kind: str = "Int8WeightOnlyConfig") -> None:
    from torchao import quantization

    quantization.quantize_(pipe.transformer, getattr(quantization, kind)())


def to_bitsandbytes(pipe: Any, bits: int) -> None:
    """By hand, since diffusers' ``BitsAndBytesConfig`` asks for a GPU."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in linears(pipe).items():
        sizes = module.in_features, module.out_features, module.bias is not None
        made = Linear4bit(*sizes, compute_dtype=torch.float32) if bits == 4 else Linear8bitLt(*sizes, False)
        made.load_state_dict(module.state_dict())
        pipe.transformer.set_submodule(name, made.to("cpu"))


def cached(config: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda pipe: pipe.transformer.enable_cache(config(pipe))


MAG = MagCacheConfig(1.0, 2, retention_ratio=0.25, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS)
TAYLOR = TaylorSeerCacheConfig(2, 1, taylor_factors_dtype=torch.float32, cache_identifiers=[r"blocks\.\d+\.attn1"])
CACHES: dict[str, Callable[[Any], None]] = {
    "First Block Cache": cached(lambda pipe: FirstBlockCacheConfig(threshold=100.0)),
    "TaylorSeer": cached(lambda pipe: TAYLOR),
    "MagCache": cached(lambda pipe: MAG),
    "Pyramid Attention Broadcast": cached(
        lambda pipe: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 1000),
            current_timestep_callback=lambda: pipe.current_timestep,
        )
    ),
    "FasterCache": cached(
        lambda pipe: FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1000),
            current_timestep_callback=lambda: pipe.current_timestep,
            is_guidance_distilled=True,
        )
    ),
}


PACKAGES = {"int8": "torchao", "float8": "torchao", "bitsandbytes": "bitsandbytes"}
"""Words in the names of ways → packages that must be installed."""
EXACT = ("group offload", "sequential offload")
"""Ways in which a pipeline draws what it draws without them."""
WAYS: dict[str, Callable[[Any], object]] = {
    "LoRA": load_lora,
    "fused LoRA": fuse_lora,
    "int8": quantise,
    "float8": lambda pipe: quantise(pipe, "Float8WeightOnlyConfig"),
    "bitsandbytes 8": lambda pipe: to_bitsandbytes(pipe, 8),
    "bitsandbytes 4": lambda pipe: to_bitsandbytes(pipe, 4),
    **CACHES,
    "layerwise casting": lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
    "group offload": lambda pipe: pipe.transformer.enable_group_offload(
        CPU, CPU, offload_type="block_level", num_blocks_per_group=1
    ),
    "sequential offload": lambda pipe: cpu_offload(pipe.transformer, CPU),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_patch_and_another_way(name: str) -> None:
    """Enabled before the patch and after it; MHLA is refused on offloaded weights."""
    for word, package in PACKAGES.items():
        if word in name:
            pytest.importorskip(package)
    plain, pipe = draw(wan_pipeline()), wan_pipeline()
    WAYS[name](pipe)
    alone = draw(pipe)
    assert name in EXACT or not torch.equal(alone, plain)
    for settings in (ALL_PAIRS, SPARSE, MHLA):
        if "blocks" in settings and "offload" in name:
            with refused("offloaded"):
                mhla.apply_mhla(pipe, **settings)
            continue
        after = mhla.apply_mhla(wan_pipeline(), **settings)
        WAYS[name](after)
        mhla.apply_mhla(pipe, **settings)
        found = draw(pipe)
        assert relative_change(draw(after), found) < ROUNDING
        if settings is ALL_PAIRS:
            assert relative_change(found, alone) < ROUNDING
        else:
            assert not torch.equal(found, alone)
        mhla.remove_mhla(pipe)
        mhla.remove_mhla(after)
        assert torch.equal(draw(pipe), alone) and torch.equal(draw(after), alone)


@pytest.mark.parametrize("name", [*CACHES, "LoRA", "group offload"])
def test_dense_steps_and_residuals_together_with_another_way(name: str) -> None:
    """Every call is the same, and corrected where attention runs."""
    pipe, found = wan_pipeline(), []
    WAYS[name](pipe)
    alone = draw(pipe)
    for correct in (True, False):
        mhla.apply_mhla(pipe, **SPARSE | {"dense_first": 1, "correct": correct})
        found.append(draw(pipe))
        assert torch.equal(draw(pipe), found[-1])
        mhla.remove_mhla(pipe)
    assert torch.equal(draw(pipe), alone)
    assert not torch.equal(*found)


def test_an_audit_refuses_a_step_cache():
    """A skipped block shows it nothing, and a repeated call is all skipped."""
    pipe = mhla.apply_mhla(wan_pipeline(), **MHLA)
    CACHES["MagCache"](pipe)
    with refused("step cache", "disable_cache()"):
        mhla.audit(pipe, lambda: draw(pipe))
    pipe.transformer.disable_cache()
    mhla.audit(pipe, lambda: draw(pipe))


# Offloading of MHLA's own weights


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level", "accelerate"])
@pytest.mark.parametrize("name", ["wan", "wan_vace", "sana"])
def test_offloading_brings_every_weight_of_mhla_in_time(name, offload_type, tmp_path):
    """To files or the meta device, so that the weights are gone until their group is loaded."""
    model = patched(name, **EVERYTHING)
    expected = output(model, inputs(name))
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to holds NaN
    try:
        if offload_type == "accelerate":
            cpu_offload(model, execution_device=CPU)
        else:
            blocks = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
            folder = {"offload_to_disk_path": str(tmp_path)}
            model.enable_group_offload(CPU, CPU, offload_type=offload_type, **blocks, **folder)
        assert all(matrix.is_meta or not matrix.isfinite().any() for matrix in mixings(model))
        for _ in range(2):
            assert torch.equal(output(model, inputs(name)), expected)
        mhla.remove_mhla(model)
        assert torch.equal(output(model, inputs(name)), output(FAMILIES[name].build(), inputs(name)))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{}, {"density": 0.2}], ids=["MHLA", "sparse"])
def test_on_cuda_without_a_synchronisation(settings):
    model = patched("wan", **settings)
    expected = output(model, inputs("wan"))
    model.to("cuda")
    arguments = {key: value.to("cuda") for key, value in inputs("wan").items()}
    output(model, arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = output(model, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative_change(found.cpu(), expected) < 1e-3


# Guidance that perturbs attention

SKIPPED = {
    "attention": {"skip_attention": True, "skip_ff": False},
    "block": {"skip_attention": True, "skip_ff": True},
    "scores": {"skip_attention": False, "skip_ff": False, "skip_attention_scores": True},  # perturbed attention
}


@pytest.mark.parametrize("settings", [{"density": 0.2}, {}], ids=["sparse", "MHLA"])
@pytest.mark.parametrize("what", SKIPPED)
def test_a_patched_layer_is_skipped_as_an_unpatched_one(settings, what):
    """The layer that is patched alone."""
    model, reference = patched("dit", **settings, layers=[1]), FAMILIES["dit"].build()
    for one in (model, reference):
        apply_layer_skip(one, LayerSkipConfig(indices=[1], fqn="transformer_blocks", **SKIPPED[what]))
    assert_equal_up_to_order(output(model, inputs("dit")), output(reference, inputs("dit")))
