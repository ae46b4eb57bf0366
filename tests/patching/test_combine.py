"""A patch together with what else makes a pipeline fast, through the real pipelines of tiny models.

Each pair and each triple is held to three things. With a patch that lists every pair of tokens, and so computes
softmax attention, the pipeline draws what it draws without the patch. With a patch of MHLA it draws something else.
And once the patch is removed, it draws bit for bit what the others draw alone.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    TorchAoConfig,
)
from diffusers.hooks import apply_mag_cache
from torch import nn

import mhla_diffusers as mhla
from mhla_diffusers.patching import calibrate_output_norm, layer_sensitivity
from mhla_diffusers.patching.hooks import step_cache

from ..families.cases import ROUNDING, case_of
from ..models import assert_changed, relative_change
from ..pipelines import PIPELINES, wan_pipeline

FAMILIES = ("wan", "flux", "hunyuan_video")
STEPS = 4
CPU = torch.device("cpu")


Settings = dict[str, Any]


def of_family(family: str) -> tuple[Callable[[], Any], Settings, Settings]:
    """How its pipeline is made, a patch that computes softmax attention, and one of MHLA alone."""
    make = wan_pipeline if family == "wan" else case_of(family).pipeline
    blocks = (4, 2) if family == "flux" else (3, 2, 1)
    exact = {"blocks": (1,) * len(blocks), "sparse": "content", "density": 1.0}
    return make, exact, {"blocks": blocks, "sparse": "none"}


def draw(pipe: Any) -> torch.Tensor:
    """Latents from the same noise."""
    calls = {"WanPipeline": PIPELINES["wan"].call}
    calls |= {"FluxPipeline": case_of("flux").call, "HunyuanVideoPipeline": case_of("hunyuan_video").call}
    call = {**calls[type(pipe).__name__], "num_inference_steps": STEPS, "output_type": "latent"}
    result = pipe(**call, generator=torch.Generator().manual_seed(3))
    return result.frames if hasattr(result, "frames") else result.images


# Ways to make a pipeline fast


def linears(pipe: Any) -> dict[str, nn.Linear]:
    """Of all blocks, by name."""
    modules = pipe.transformer.named_modules()
    return {name: module for name, module in modules if "block" in name and isinstance(module, nn.Linear)}


def load_lora(pipe: Any) -> None:
    """On every linear layer of the blocks, as few-step LoRAs are."""
    generator, weights = torch.Generator().manual_seed(2), {}
    for name, module in linears(pipe).items():
        sizes = {"lora_A": (4, module.in_features), "lora_B": (module.out_features, 4)}
        for part, size in sizes.items():
            weights[f"transformer.{name}.{part}.weight"] = 0.3 * torch.randn(size, generator=generator)
    pipe.load_lora_weights(weights, adapter_name="few")


def fuse_lora(pipe: Any) -> None:
    load_lora(pipe)
    pipe.fuse_lora(components=["transformer"])


def quantise(pipe: Any, kind: str = "Int8WeightOnlyConfig") -> None:
    from torchao import quantization

    quantization.quantize_(pipe.transformer, getattr(quantization, kind)())


def fuse_and_quantise(pipe: Any) -> None:
    """Query, key and value by one quantised layer."""
    pipe.transformer.fuse_qkv_projections()
    quantise(pipe)


def to_bitsandbytes(pipe: Any, bits: int) -> None:
    """By hand, since diffusers' ``BitsAndBytesConfig`` asks for a GPU."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in linears(pipe).items():
        sizes = module.in_features, module.out_features, module.bias is not None
        made = Linear4bit(*sizes, compute_dtype=torch.float32) if bits == 4 else Linear8bitLt(*sizes, False)
        made.load_state_dict(module.state_dict())
        pipe.transformer.set_submodule(name, made.to("cpu"))


def first_block_cache(pipe: Any) -> None:
    """Skips all blocks but the first in all steps but the first."""
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=100.0))


def taylor_seer(pipe: Any, **options: Any) -> None:
    """Predicts every other step; attentions of Wan must be named, for diffusers' own patterns match none of them."""
    if not options and type(pipe.transformer).__name__.startswith("Wan"):
        options = {"cache_identifiers": [r"blocks\.\d+\.attn1"]}
    settings = {"cache_interval": 2, "disable_cache_before_step": 1, "taylor_factors_dtype": torch.float32}
    pipe.transformer.enable_cache(TaylorSeerCacheConfig(**settings, **options))


MAG = {"threshold": 1.0, "max_skip_steps": 2, "retention_ratio": 0.25, "num_inference_steps": STEPS}


def mag_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(MagCacheConfig(**MAG, mag_ratios=[1.0] * STEPS))


def cache_dit(pipe: Any) -> None:
    import cache_dit as package

    settings = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 1}
    package.enable_cache(pipe, cache_config=package.DBCacheConfig(**settings, residual_diff_threshold=100.0))


def disable_cache_dit(pipe: Any) -> None:
    """It changes the class of the pipeline, so a test must take it away."""
    import cache_dit as package

    package.disable_cache(pipe)


def layerwise_casting(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def group_offload(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=1)


def group_offload_leaves(pipe: Any) -> None:
    pipe.transformer.enable_group_offload(CPU, CPU, offload_type="leaf_level")


def compile_blocks(pipe: Any) -> None:
    torch._dynamo.reset()
    pipe.transformer.compile_repeated_blocks(backend="eager")


@dataclass(frozen=True)
class Way:
    """One way to make a pipeline fast."""

    enable: Callable[[Any], None]
    package: str | None = None
    """That must be installed."""
    is_exact: bool = False
    """Whether the pipeline draws what it draws without it."""
    after_patch: bool = False
    """Whether patching what it is enabled on is refused."""
    disable: Callable[[Any], None] = lambda pipe: None
    """Gives back what is not the pipeline's own."""


WAYS = {
    "LoRA": Way(load_lora),
    "fused LoRA": Way(fuse_lora),
    "int8": Way(quantise, "torchao"),
    "float8": Way(lambda pipe: quantise(pipe, "Float8WeightOnlyConfig"), "torchao"),
    "fused int8": Way(fuse_and_quantise, "torchao"),
    "bitsandbytes 8": Way(lambda pipe: to_bitsandbytes(pipe, 8), "bitsandbytes"),
    "bitsandbytes 4": Way(lambda pipe: to_bitsandbytes(pipe, 4), "bitsandbytes"),
    "First Block Cache": Way(first_block_cache),
    "TaylorSeer": Way(taylor_seer),
    "TaylorSeer lite": Way(lambda pipe: taylor_seer(pipe, use_lite_mode=True)),
    "MagCache": Way(mag_cache),
    "cache-dit": Way(cache_dit, "cache_dit", disable=disable_cache_dit),
    "layerwise casting": Way(layerwise_casting),
    "offload": Way(group_offload, is_exact=True, after_patch=True),
    "offload of leaves": Way(group_offload_leaves, is_exact=True, after_patch=True),
    "compile": Way(compile_blocks, is_exact=True),
}


def drawings(make: Callable[[], Any], ways: list[Way], before: int = 0, patches: Sequence[Settings] = ()) -> list[Any]:
    """What a pipeline draws with one patch after another, and at last without any.

    Args:
        make: a fresh pipeline.
        ways: all are enabled.
        before: how many of them before the first patch.
        patches: the settings of each.
    """
    pipe, found = make(), []
    with ExitStack() as stack:

        def enable(some: list[Way]) -> None:
            for way in some:
                way.enable(pipe)
                stack.callback(way.disable, pipe)

        enable(ways[:before])
        for index, patch in enumerate(patches):
            mhla.apply_mhla(pipe, **patch)
            if index == 0:
                enable(ways[before:])
            found.append(draw(pipe))
            mhla.remove_mhla(pipe)
        if not patches:
            enable(ways[before:])
        return [*found, draw(pipe)]


def chosen(names: Sequence[str]) -> list[Way]:
    """Skips where a package is missing."""
    ways = [WAYS[name] for name in names]
    for package in (way.package for way in ways if way.package is not None):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return ways


every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
@pytest.mark.parametrize("name", [name for name in WAYS if name != "compile"])
def test_pairs(family: str, name: str) -> None:
    """Patched before and after."""
    ways, make, exact, real = chosen([name]), *of_family(family)
    (alone,) = drawings(make, ways)
    if not ways[0].is_exact:
        assert_changed(alone, drawings(make, [])[0])
    if ways[0].after_patch:
        with pytest.raises(ValueError, match="offloaded; patch it before"):
            drawings(make, ways, 1, [exact])
        (second, *removed), (first, *others) = (drawings(make, ways, 0, [patch]) for patch in (exact, real))
        removed += others
    else:
        second, *removed = drawings(make, ways, 0, [exact])
        first, again, *others = drawings(make, ways, 1, [real, exact])
        assert relative_change(again, alone) < ROUNDING
        removed += others
    assert relative_change(second, alone) < ROUNDING
    assert_changed(first, alone)
    assert all(torch.equal(found, alone) for found in removed)


TRIPLES = [
    ("LoRA", "int8"),
    ("int8", "LoRA"),
    ("LoRA", "First Block Cache"),
    ("LoRA", "layerwise casting"),
    ("LoRA", "offload"),
    ("int8", "First Block Cache"),
    ("int8", "MagCache"),
    ("int8", "cache-dit"),
    ("int8", "offload"),
    ("float8", "TaylorSeer"),
    ("MagCache", "offload"),
    ("LoRA", "int8", "First Block Cache"),
]


@every_family
@pytest.mark.parametrize("names", TRIPLES, ids=" + ".join)
def test_triples(family: str, names: tuple[str, ...]) -> None:
    """Patched between the two."""
    ways, make, exact, real = chosen(names), *of_family(family)
    (alone,) = drawings(make, ways)
    patches = [exact] if any(way.after_patch for way in ways) else [exact, real]
    found, *others, removed = drawings(make, ways, 1, patches)
    assert relative_change(found, alone) < ROUNDING
    assert torch.equal(removed, alone)
    for other in others:
        assert_changed(other, alone)
