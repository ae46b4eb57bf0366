"""What a stage trains."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..families import get_family
from ..patching import mhla_layers
from .config import LoraLayers, StageConfig, Trainable

STUDENT, CRITIC = "default", "critic"
"""Names of the two adapters, as PEFT has them in the names of their weights."""


def is_mixing(name: str) -> bool:
    """Whether a parameter is a mixing matrix, λ or β, which may have a learning rate of its own."""
    return name.endswith((".mhla.mixing", ".mhla.linear_log_weight"))


def patched_attentions(transformer: nn.Module) -> dict[str, Any]:
    """Name and module of every self-attention that holds an MHLA layer; all of them in an unpatched model."""
    attentions = get_family(transformer).self_attentions(transformer)
    patched = {name: attn for name, attn in attentions.items() if hasattr(attn, "mhla")}
    return patched or attentions


def trainable_names(transformer: nn.Module, trainable: Trainable) -> list[str]:
    """Names of the parameters that a stage trains, including LoRA's once added.

    Parts of an attention that its patch does not run get no gradients and are left out.
    """
    layers = mhla_layers(transformer)
    mhla = tuple(f"{name}." for name in layers)
    prefixes = {
        "mhla": mhla,
        "lora": mhla,
        "attention": tuple(f"{name}." for name in patched_attentions(transformer)),
        "all": ("",),
    }[trainable]
    fixed = {f"{name}.mixing" for name, layer in layers.items() if not layer.config.mixing_learnable}
    idle = tuple(f"{name.removesuffix('mhla')}{part}." for name, layer in layers.items() for part in layer.adapter.idle)
    return [
        name
        for name, _ in transformer.named_parameters()
        if (trainable == "lora" and is_adapter(name) if is_lora(name) else name.startswith(prefixes))
        and name not in fixed
        and not name.startswith(idle)
    ]


def changed_names(transformer: nn.Module, stages: Sequence[StageConfig]) -> list[str]:
    """Names of the parameters that any of the stages trains."""
    names = {name for stage in stages for name in trainable_names(transformer, stage.trainable)}
    return [name for name, _ in transformer.named_parameters() if name in names]


def set_trainable(transformer: nn.Module, trainable: Trainable) -> dict[str, nn.Parameter]:
    """Enable gradients for exactly these parameters, in float32, and return them by name."""
    return make_trainable(transformer, trainable_names(transformer, trainable))


def make_trainable(transformer: nn.Module, names: Collection[str]) -> dict[str, nn.Parameter]:
    """Enable gradients for exactly these parameter names, in float32, and return them by name."""
    from diffusers.training_utils import cast_training_params

    chosen = set(names)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(name in chosen)
    cast_training_params(transformer)
    return {name: parameter for name, parameter in transformer.named_parameters() if name in chosen}


def add_adapters(
    transformer: nn.Module, rank: int, seed: int, layers: LoraLayers = "attention", name: str = STUDENT
) -> None:
    """Add LoRA to linear layers, unless they have that adapter.

    The student's adapter stays the active one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if any(f".{name}." in weight and is_lora(weight) for weight, _ in transformer.named_parameters()):
        return
    settings = LoraConfig(r=rank, lora_alpha=rank, target_modules=_linear_layers(transformer, layers))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, transformer, name)
    for layer in _lora_layers(transformer):
        layer._active_adapter = [STUDENT]  # PEFT activates the latest one
        for part in (layer.lora_A, layer.lora_B):
            if name in part:  # PEFT leaves a second one on the CPU where the model is on the meta device
                part[name].to(layer.get_base_layer().weight.device)


def _linear_layers(transformer: nn.Module, layers: LoraLayers) -> list[str]:
    """Names of the linear layers that LoRA is added to; never MHLA's own, which are trained in full."""
    family = get_family(transformer)
    if layers == "blocks":
        blocks = tuple(f"{name}." for name in family.blocks_of(transformer))
        return [
            name.removesuffix(".base_layer")
            for name, module in transformer.named_modules()
            if isinstance(module, nn.Linear)
            and name.startswith(blocks)
            and ".mhla." not in name
            and not is_lora(f"{name}.")
        ]
    names = {module: name for name, module in transformer.named_modules()}
    attentions = patched_attentions(transformer).values()
    return [names[linear] for attn in attentions for linear in family.adapter_of(attn).projections(attn)]


def _lora_layers(module: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Context in which LoRA is disabled."""
    switched = [layer for layer in _lora_layers(module) if not layer.disable_adapters]
    for layer in switched:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in switched:
            layer._disable_adapters = False


@contextmanager
def adapter_active(module: nn.Module, name: str) -> Iterator[None]:
    """Context in which one adapter alone runs.

    PEFT's ``set_adapter`` would also take the gradients from the other one's weights.
    """
    layers = _lora_layers(module)
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [name]
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


def is_lora(name: str) -> bool:
    """Whether a parameter of that name belongs to LoRA, the student's or the critic's."""
    return ".lora_A." in name or ".lora_B." in name


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to the student's LoRA."""
    return is_lora(name) and f".{CRITIC}." not in name
