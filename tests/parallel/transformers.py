"""Real transformers on several processes against the same on one."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers import ContextParallelConfig
from torch import nn

import mhla_diffusers as mhla

from ..families.cases import case_of
from ..models import FAMILIES, inputs
from .diffusers_on_cpu import diffusers_on_cpu

NAMES = ("wan", "chronoedit", "flux", "flux2", "ltx", "qwenimage")
"""Families of which diffusers tells how their tokens are split."""
FEATURES = {"output_norm": True, "output_gate": True, "convolution": 3, "mixing_per_head": True}
"""All that a layer may have besides."""


def case(name: str, ragged: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny transformer and its inputs, the same in every process."""
    if name == "wan":
        return FAMILIES["wan"].build(), inputs("wan", ragged=ragged)
    found = case_of(name)
    arguments = found.inputs(ragged=ragged)
    if name in ("flux", "flux2", "qwenimage"):  # two more of its tokens of text, as many as four processes can share
        of_text = {n for n in arguments if n.startswith("encoder_hidden_states")}
        arguments |= {n: torch.cat([arguments[n], arguments[n][:, :2]], dim=1) for n in of_text}
        ids = arguments.get("txt_ids")
        arguments |= {} if ids is None else {"txt_ids": torch.cat([ids, ids[..., :2, :]], dim=-2)}
    # diffusers' cross-attention over several processes does not follow LTX's mask of the text
    return found.transformer(), arguments | ({"encoder_attention_mask": None} if name == "ltx" else {})


def patched(model: Any, name: str, **settings: Any) -> Any:
    """With sparse attention, or with MHLA whose own weights are random, on blocks that fit."""
    blocks = (2, 2, 2) if name == "wan" else case_of(name).blocks
    mhla.apply_mhla(model, **({} if "density" in settings else {"blocks": blocks}) | settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).abs())
    return model


def run(model: nn.Module, arguments: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and gradients of the parameters and the latents."""
    model.zero_grad()
    latents = arguments["hidden_states"].clone().requires_grad_()
    output = model(**{**arguments, "hidden_states": latents}, return_dict=False)[0]
    goal = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    (output * goal).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients | {"hidden_states": latents.grad}


def output_of(model: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**arguments, return_dict=False)[0]


def spread(model: Any, ring: int, ulysses: int, **options: Any) -> None:
    """diffusers' context parallelism on a CPU."""
    with diffusers_on_cpu():
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **options)
        model.enable_parallelism(config=config)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


Change = Callable[[Any, dict[str, Any]], Any]
"""Of a transformer and its inputs."""


def errors(
    name: str,
    degrees: tuple[int, int],
    settings: dict[str, Any] | None = None,
    ragged: bool = False,
    gradients_too: bool = True,
    before: Change | None = None,
    after: Change | None = None,
    **options: Any,
) -> dict[str, float]:
    """Relative errors of the output and of the worst of the gradients, which all processes give together.

    ``before`` changes the patched transformer before it is copied, and ``after`` the one that is spread.
    """
    model, arguments = case(name, ragged)
    patched(model, name, **settings or {})
    if before is not None:
        before(model, arguments)
    alone = copy.deepcopy(model)
    spread(model, *degrees, **options)
    with diffusers_on_cpu():
        if after is not None:
            after(model, arguments)
        if not gradients_too:
            return {"output": relative(output_of(model, arguments), output_of(alone, arguments))}
        output, gradients = run(model, arguments)
    expected, expected_gradients = run(alone, arguments)
    assert set(gradients) == set(expected_gradients), set(gradients) ^ set(expected_gradients)
    scale = max(x.norm() for x in expected_gradients.values())
    worst = {}
    for key, gradient in sorted(gradients.items()):
        torch.distributed.all_reduce(gradient)
        difference = (gradient - expected_gradients[key]).norm()
        worst[key] = float(difference / expected_gradients[key].norm().clamp_min(1e-3 * scale))
    worst_name = max(worst, key=worst.__getitem__)
    return {"output": relative(output, expected), worst_name: worst[worst_name]}


def compile_one_block(model: Any, _: Any) -> None:
    """To one graph; diffusers' own hooks of the first block and of the whole, which split the tokens, make none."""
    torch._dynamo.reset()
    model.blocks[2].compile(backend="aot_eager", fullgraph=True)


def compile_forward(model: Any, _: Any) -> None:
    """As far as it goes."""
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")


def offload_blocks(model: Any, _: Any, kind: str = "block_level") -> None:
    """Groups of weights wait elsewhere."""
    from diffusers.hooks import apply_group_offloading

    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    cpu = torch.device("cpu")
    apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type=kind, **options)


def offload_leaves(model: Any, arguments: Any) -> None:
    offload_blocks(model, arguments, "leaf_level")


def add_adapter(model: Any, _: Any) -> None:
    """LoRA, whose weights take gradients alone."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights="gaussian"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if "lora_" in n:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def error_under_cache(degrees: tuple[int, int], name: str) -> float:
    """Of the second call under a step cache that goes by the number of the step, which reuses what the first made."""
    from diffusers import MagCacheConfig, TaylorSeerCacheConfig

    found = []
    for is_spread in (False, True):
        model, arguments = case("wan")
        patched(model, "wan")
        if name == "MagCache":
            model.enable_cache(MagCacheConfig(1.0, 2, 0.0, num_inference_steps=4, mag_ratios=[1.0] * 4))
        else:
            names = [r"blocks\.\d+\.attn1"]
            config = TaylorSeerCacheConfig(3, 1, taylor_factors_dtype=torch.float32, cache_identifiers=names)
            model.enable_cache(config)
        if is_spread:  # after the cache, whose first block must see the tokens of its process alone
            spread(model, *degrees)
        later = {**arguments, "timestep": arguments["timestep"] // 2}
        with diffusers_on_cpu(), model.cache_context("cond"):
            output_of(model, arguments)
            second = output_of(model, later)
        model.disable_cache()
        with diffusers_on_cpu():
            assert relative(second, output_of(model, later)) > 1e-3  # that it skipped something
        found.append(second)
    return relative(found[1], found[0])


def run_without_gradients(model: Any, arguments: Any) -> None:
    with torch.inference_mode():
        model(**arguments, return_dict=False)


def error_when_patched_after(degrees: tuple[int, int]) -> float:
    """Of a transformer that is patched when it is spread already."""
    model, arguments = case("wan")
    expected = output_of(patched(copy.deepcopy(model), "wan"), arguments)
    spread(model, *degrees)
    return relative(output_of(patched(model, "wan"), arguments), expected)


def errors_without_patch(degrees: tuple[int, int]) -> list[float]:
    """Of a transformer whose patch, made before it was spread, is removed, switched off, or rests."""
    model, arguments = case("wan")
    expected = output_of(model, arguments)
    patched(model, "wan")
    spread(model, *degrees)
    with diffusers_on_cpu():
        with mhla.mhla_disabled(model):
            found = [relative(output_of(model, arguments), expected)]
        mhla.remove_mhla(model)
        return [*found, relative(output_of(model, arguments), expected)]


def message_of(degrees: tuple[int, int], name: str = "wan", different: str = "", **changes: Any) -> str:
    """What the first call of a transformer that cannot be spread so says."""
    model, arguments = case(name, changes.pop("ragged", False))
    rank = torch.distributed.get_rank()
    blocks = {"blocks": (1, 2, 2)} if different == "blocks" and rank == 1 else {}
    patched(model, name, **blocks, **changes)
    if different == "weights" and rank == 1:
        with torch.no_grad():
            next(iter(mhla.mhla_layers(model).values())).mixing[0, 0] += 1e-3
    spread(model, *degrees)
    try:
        output_of(model, arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def of_masked_text(degrees: tuple[int, int]) -> tuple[float, str]:
    """Of LTX with a mask of the text: error of one that hides nothing, and what a call says where it hides some."""
    model, arguments = case("ltx")
    mask = torch.ones(arguments["encoder_hidden_states"].shape[:2], dtype=torch.int64)
    expected = output_of(patched(model, "ltx"), arguments)
    spread(model, *degrees)
    with diffusers_on_cpu():
        error = relative(output_of(model, {**arguments, "encoder_attention_mask": mask}), expected)
    mask[0, 0] = 0  # in place: what was read of it before no longer holds
    try:
        output_of(model, {**arguments, "encoder_attention_mask": mask})
    except ValueError as refusal:
        return error, str(refusal)
    raise AssertionError("nothing was refused")


def error_of_another_with_the_same_processor(degrees: tuple[int, int]) -> float:
    """Of a transformer on one process whose processor serves another as well, which is spread."""
    processor = mhla.MHLAProcessor(blocks=(2, 2, 2))
    (model, arguments), (alone, _) = case("wan"), case("wan")
    for one in (model, alone):
        mhla.set_attn_processor(one, processor)
    expected = output_of(alone, arguments)
    spread(model, *degrees)
    output_of(model, arguments)
    return relative(output_of(alone, arguments), expected)


def message_of_what_is_set(degrees: tuple[int, int], what: str) -> str:
    """What the first call says with a cache that decides by content, or in diffusers' own form."""
    model, arguments = case("wan")
    if what == "cache":
        from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

        apply_first_block_cache(patched(model, "wan"), FirstBlockCacheConfig(threshold=0.1))
    else:
        model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 2)))
    spread(model, *degrees)
    try:
        output_of(model, arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")
