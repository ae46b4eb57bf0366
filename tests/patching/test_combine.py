"""A patch together with what else makes a pipeline fast, through the real pipelines of tiny models.

Each pair and each triple is held to three things. With a patch that lists every pair of tokens, and so computes
softmax attention, the pipeline draws what it draws without the patch. With a patch of MHLA it draws something else.
And once the patch is removed, it draws bit for bit what the others draw alone.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    TorchAoConfig,
    WanTransformer3DModel,
)
from diffusers.hooks import apply_mag_cache
from torch import nn

import mhla_diffusers as mhla
from mhla_diffusers.patching import calibrate_output_norm, layer_sensitivity
from mhla_diffusers.patching.steps import step_cache

from ..families.cases import ROUNDING, case_of, output
from ..models import assert_changed, relative_change, wan
from ..pipelines import PIPELINES, wan_pipeline
from ..refusals import refused
from .shared import EVERYTHING

STEPS = 4
CPU = torch.device("cpu")


Settings = dict[str, Any]


def of_family(family: str) -> tuple[Callable[[], Any], Settings, Settings]:
    """How its pipeline is made, a patch that lists all pairs, and one of MHLA."""
    make = wan_pipeline if family == "wan" else case_of(family).pipeline
    blocks = (4, 2) if family == "flux" else (3, 2, 1)
    return make, {"density": 1.0}, {"blocks": blocks}


def draw(pipe: Any) -> torch.Tensor:
    """Latents from the same noise."""
    calls = {"WanPipeline": PIPELINES["wan"].call}
    calls |= {"FluxPipeline": case_of("flux").call, "HunyuanVideoPipeline": case_of("hunyuan_video").call}
    call = {**calls[type(pipe).__name__], "num_inference_steps": STEPS, "output_type": "latent"}
    result = pipe(**call, generator=torch.Generator().manual_seed(3))
    return result.frames if hasattr(result, "frames") else result.images


# Ways to make a pipeline fast


def linears(pipe: Any) -> dict[str, nn.Linear]:
    """Linear layers of all blocks, by name."""
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


def to_bitsandbytes(pipe: Any, bits: int, dtype: torch.dtype = torch.float32) -> None:
    """By hand, since diffusers' ``BitsAndBytesConfig`` asks for a GPU."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in linears(pipe).items():
        sizes = module.in_features, module.out_features, module.bias is not None
        made = Linear4bit(*sizes, compute_dtype=dtype) if bits == 4 else Linear8bitLt(*sizes, False)
        made.load_state_dict(module.state_dict())
        pipe.transformer.set_submodule(name, made.to("cpu"))


def first_block_cache(pipe: Any) -> None:
    """Skips all blocks but the first in all steps but the first."""
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=100.0))


def taylor_seer(pipe: Any) -> None:
    """Predicts every other step; attentions of Wan must be named, for diffusers' own patterns match none of them."""
    names = [r"blocks\.\d+\.attn1"] if type(pipe).__name__ == "WanPipeline" else None
    config = TaylorSeerCacheConfig(2, 1, taylor_factors_dtype=torch.float32, cache_identifiers=names)
    pipe.transformer.enable_cache(config)


def mag_config() -> MagCacheConfig:
    """Skips the second and the third of four steps."""
    return MagCacheConfig(1.0, 2, retention_ratio=0.25, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS)


def mag_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(mag_config())


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
    "MagCache": Way(mag_cache),
    "cache-dit": Way(cache_dit, "cache_dit", disable=disable_cache_dit),
    "layerwise casting": Way(layerwise_casting),
    "offload": Way(group_offload, is_exact=True, after_patch=True),
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


@cache
def without_anything(family: str) -> torch.Tensor:
    """What the pipeline of a family draws by itself."""
    return drawings(of_family(family)[0], [])[0]


PAIRS = [("wan", name) for name in WAYS] + [
    *(("flux", name) for name in ("LoRA", "fused int8", "First Block Cache", "layerwise casting")),
    *(("hunyuan_video", name) for name in ("fused LoRA", "TaylorSeer", "cache-dit", "offload")),
]
"""Every way on one family, and the ways that meet joint attention and fused projections on others."""


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_pairs(family: str, name: str) -> None:
    """Patched before and after."""
    ways, make, listed, real = chosen([name]), *of_family(family)
    (alone,) = drawings(make, ways)
    if not ways[0].is_exact:
        assert_changed(alone, without_anything(family))
    if ways[0].after_patch:
        with refused("offloaded"):
            drawings(make, ways, 1, [listed])
        (second, *removed), (first, *others) = (drawings(make, ways, 0, [patch]) for patch in (listed, real))
        removed += others
    else:
        second, *removed = drawings(make, ways, 0, [listed])
        first, again, *others = drawings(make, ways, 1, [real, listed])
        assert relative_change(again, alone) < ROUNDING
        removed += others
    assert relative_change(second, alone) < ROUNDING
    assert_changed(first, alone)
    assert all(torch.equal(found, alone) for found in removed)


TRIPLES = [
    ("wan", ("LoRA", "First Block Cache")),
    ("hunyuan_video", ("LoRA", "offload")),
    ("flux", ("int8", "LoRA")),
    ("wan", ("int8", "offload")),
    ("hunyuan_video", ("int8", "MagCache")),
    ("flux", ("LoRA", "int8", "First Block Cache")),
]


@pytest.mark.parametrize(("family", "names"), TRIPLES, ids=str)
def test_triples(family: str, names: tuple[str, ...]) -> None:
    """Patched between the two."""
    ways, make, listed, real = chosen(names), *of_family(family)
    (alone,) = drawings(make, ways)
    patches = [listed] if any(way.after_patch for way in ways) else [listed, real]
    found, *others, removed = drawings(make, ways, 1, patches)
    assert relative_change(found, alone) < ROUNDING
    assert torch.equal(removed, alone)
    for other in others:
        assert_changed(other, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA", "int8", "First Block Cache", "TaylorSeer"])
def test_triples_with_compilation(name: str) -> None:
    """The compiled block draws what it draws uncompiled, which is what no unpatched pipeline draws."""
    ways, (_, _, real) = chosen([name]), of_family("wan")

    def make() -> Any:
        return wan_pipeline(wan(num_layers=1 if name in ("LoRA", "int8") else 2))

    pipes = [mhla.apply_mhla(make(), **real) for _ in range(2)]
    for pipe in pipes:
        ways[0].enable(pipe)
    torch._dynamo.reset()
    pipes[1].transformer.compile_repeated_blocks(backend="eager")
    expected, found = map(draw, pipes)
    torch._dynamo.reset()
    assert relative_change(found, expected) < ROUNDING
    assert_changed(found, drawings(make, ways)[0])


# What is refused

STEP_CACHES = {
    "First Block Cache": first_block_cache,
    "MagCache": lambda pipe: apply_mag_cache(pipe.transformer, mag_config()),  # which tells the model nothing
    "TaylorSeer": taylor_seer,
    "Pyramid Attention Broadcast": lambda pipe: pipe.transformer.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: pipe.current_timestep
        )
    ),
    "FasterCache": lambda pipe: pipe.transformer.enable_cache(
        FasterCacheConfig(current_timestep_callback=lambda: pipe.current_timestep, spatial_attention_block_skip_range=2)
    ),
}


@pytest.mark.parametrize("name", [*STEP_CACHES, "cache-dit"])
def test_every_step_cache_is_known(name: str) -> None:
    pipe = wan_pipeline()
    assert step_cache(pipe.transformer) is None
    way = chosen([name])[0] if name == "cache-dit" else Way(STEP_CACHES[name])
    way.enable(pipe)
    found = step_cache(pipe.transformer)
    way.disable(pipe)
    assert found is not None and found[0] == name


MEASUREMENTS: dict[str, tuple[Settings, Callable[..., Any]]] = {
    "calibrate_output_norm": ({"output_norm": True}, calibrate_output_norm),
    "layer_sensitivity": ({"blocks": (3, 2, 1)}, layer_sensitivity),
    "audit": ({"density": 0.2, "block_size": 4}, mhla.audit),
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_what_looks_at_every_forward_refuses_a_step_cache(name: str) -> None:
    """A skipped block shows them nothing, and a repeated call is all skipped."""
    settings, measure = MEASUREMENTS[name]
    pipe = mhla.apply_mhla(wan_pipeline(), **settings)
    before = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    mag_cache(pipe)
    with refused("MagCache", "disable_cache()"):
        measure(pipe, lambda: draw(pipe))
    assert all(torch.equal(value, before[key]) for key, value in pipe.transformer.state_dict().items())
    pipe.transformer.disable_cache()
    measure(pipe, lambda: draw(pipe))


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_model_that_is_loaded_quantised(kind: str, tmp_path: Path) -> None:
    """By diffusers' ``TorchAoConfig``: a patch is saved and loaded; one with weights of the model is refused."""
    (_,), (_, _, real) = chosen(["int8"]), of_family("wan")
    from torchao import quantization

    adapted = mhla.apply_mhla(wan(), **real)
    with torch.no_grad():
        adapted.blocks[0].attn1.to_q.weight.mul_(1.5)
    mhla.save_mhla(adapted, tmp_path / "adapted", weights="changed", base=wan())
    wan().save_pretrained(tmp_path / "model")
    config = TorchAoConfig(getattr(quantization, kind)())
    loaded = WanTransformer3DModel.from_pretrained(
        tmp_path / "model", quantization_config=config, torch_dtype=torch.float32
    )
    pipe = wan_pipeline(loaded)
    alone = draw(pipe)
    mhla.apply_mhla(pipe, **real, output_gate=True)
    with torch.no_grad():
        for layer in mhla.mhla_layers(pipe).values():
            layer.mixing.uniform_(0.1, 0.9)
    patched = draw(pipe)
    mhla.save_mhla(pipe, tmp_path / "patch")
    mhla.remove_mhla(pipe)
    assert torch.equal(draw(pipe), alone)
    assert torch.equal(draw(mhla.load_mhla(pipe, tmp_path / "patch")), patched)
    mhla.remove_mhla(pipe)
    with refused("quantised"):
        mhla.load_mhla(pipe, tmp_path / "adapted")
    assert torch.equal(draw(pipe), alone)


def test_quantisation_passes_over_what_mhla_adds(tmp_path: Path) -> None:
    """Its weights are saved as they are; those of the model, which files cannot hold, are refused."""
    chosen(["int8"])
    pipe = mhla.apply_mhla(wan_pipeline(), blocks=(3, 2, 1), **EVERYTHING)
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items() if ".mhla." in name}
    quantise(pipe)
    found = mhla.load_mhla(wan(), mhla.save_mhla(pipe, tmp_path)).state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.items())
    for weights, base in (("changed", wan()), ("all", None)):
        with refused(".weight", "weights='mhla'"):
            mhla.save_mhla(pipe, tmp_path, weights=weights, base=base)


def test_an_attention_of_which_every_weight_is_quantised() -> None:
    """AuraFlow's have neither biases nor weights of norms, which would tell the type that they compute in."""
    chosen(["bitsandbytes 4"])
    case = case_of("auraflow")
    pipe, arguments = case.pipeline().to(torch.bfloat16), case.inputs()
    to_bitsandbytes(pipe, 4, torch.bfloat16)
    arguments = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in arguments.items()}
    mhla.apply_mhla(pipe, blocks=case.blocks, output_gate=True)
    assert output(pipe.transformer, arguments).isfinite().all()
