"""The weights of a model in training: which ones are trained, LoRA, frozen ones in 8 bits, and the original ones."""

import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ..config import LinearConfig
from ..families import get_family, trained_family
from ..generation.pipelines import pipeline_source
from ..patching import (
    PATCH_FILE,
    MHLALayer,
    find_patched,
    load_mhla,
    mhla_disabled,
    mhla_layers,
    read_record,
    register_mixing_clip,
    save_mhla,
)
from ..patching.weights import LORA
from .config import BaseType, LoraLayers, TrainingConfig
from .sharding import shard_like

_MIXING = (".mhla.mixing", ".mhla.linear_log_weight")
"""Ends of the names of mixing matrices and λ, which may have a learning rate of their own."""


def lora_of(name: str) -> str | None:
    """Return the name of the LoRA that a parameter belongs to; None for a parameter of the model or of MHLA."""
    found = re.search(r"\.lora_[AB]\.(\w+)\.", name)
    return found and found[1]


def plain_name(name: str) -> str:
    """Return the name that a parameter has in a model without adapters, and one of a LoRA as files name it."""
    lora = lora_of(name)
    return name.replace(".base_layer.", ".") if lora is None else name.replace(f".{lora}.", ".")


def patched_attentions(transformer: nn.Module) -> dict[str, Any]:
    """Name and module of every patched self-attention; all of them in an unpatched model."""
    attentions = get_family(transformer).self_attentions(transformer)
    chosen = [name for patched in find_patched(transformer).values() for name in patched.chosen]
    return {name: attentions[name] for name in chosen} or attentions


def prepare_for_training(transformer: Any, config: TrainingConfig) -> dict[str, nn.Parameter]:
    """Add the LoRA of a run and set what takes gradients, in float32; return these parameters by name."""
    from diffusers.training_utils import cast_training_params

    if config.lora_rank is not None:
        add_lora(transformer, config.lora_rank, config.seed, config.lora_layers)
    transformer.train()
    trained_family(transformer).training.prepare_for_training(transformer)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()

    layers, kind = mhla_layers(transformer), config.trainable
    prefixes = tuple(
        f"{name}." for name in (*layers, *(patched_attentions(transformer) if kind == "attention" else ()))
    )
    fixed = {
        f"{name}.mixing"
        for name, layer in layers.items()
        if isinstance(layer.config, LinearConfig) and not layer.config.mixing_learnable
    }
    for name, parameter in transformer.named_parameters():
        is_chosen = kind == "all" or name.startswith(prefixes) if lora_of(name) is None else kind == "lora"
        parameter.requires_grad_(is_chosen and name not in fixed)
    cast_training_params(transformer)
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def make_optimizer(model: nn.Module, trained: dict[str, nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a run, whose steps clip mixing matrices to (0, 1); their group, if any, is the second."""
    make: Any = torch.optim.Adafactor if config.optimizer == "adafactor" else torch.optim.AdamW
    if config.optimizer == "adamw8bit":
        from torchao import optim

        make = optim.AdamW8bit
    elif config.optimizer == "schedule-free":
        from schedulefree import AdamWScheduleFree

        make = AdamWScheduleFree
    mixing = [parameter for name, parameter in trained.items() if name.endswith(_MIXING)]
    others = [parameter for name, parameter in trained.items() if not name.endswith(_MIXING)]
    rate = config.learning_rate
    # the first group stays even if empty, because its learning rate is recorded
    groups = [{"params": others, "lr": rate, "weight_decay": config.weight_decay}]
    if mixing:
        groups.append({"params": mixing, "lr": config.mixing_learning_rate or rate, "weight_decay": 0.0})
    optimizer: torch.optim.Optimizer = make(groups)
    if has_parameters(model):
        register_mixing_clip(optimizer, model)
    return optimizer


def quantize_base(transformer: nn.Module, kind: BaseType, device: torch.device) -> None:
    """Convert the frozen weights of all linear layers of the blocks in place, one layer at a time on the device."""
    linears = _linears_of_blocks(transformer)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(transformer, Int8WeightOnlyConfig(), lambda _, name: name in linears, device=device)
    else:
        from bitsandbytes.nn import Linear4bit

        for name, linear in linears.items():
            sizes = linear.in_features, linear.out_features, linear.bias is not None
            converted = Linear4bit(*sizes, linear.weight.dtype, quant_type="nf4")
            converted.load_state_dict(linear.state_dict())
            transformer.set_submodule(name, converted.to(device=device))  # which converts the weights


def _linears_of_blocks(transformer: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by name, without those of MHLA and of LoRA."""
    blocks = tuple(f"{block}." for block in get_family(transformer).blocks_of(transformer))
    named = ((name, module) for name, module in transformer.named_modules() if isinstance(module, nn.Linear))
    return {name: x for name, x in named if name.startswith(blocks) and not re.search(r"\.mhla\.|\.lora_[AB]\.", name)}


# LoRA


def add_lora(transformer: nn.Module, rank: int, seed: int, layers: LoraLayers = "attention") -> None:
    """Add LoRA to linear layers, never to MHLA's own, unless it is there; it is the active one."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if lora_layers(transformer):
        return
    targets = lora_targets(transformer, layers)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated", UserWarning)  # training never merges
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), transformer, LORA)
    for layer in transformer.modules():
        if isinstance(layer, BaseTunerLayer):
            layer._active_adapter = [LORA]  # PEFT activates the latest one


def lora_layers(transformer: nn.Module) -> dict[str, Any]:
    """Return name → layer with the LoRA of a patch or a run."""
    return {name: module for name, module in transformer.named_modules() if LORA in getattr(module, "lora_A", ())}


def has_parameters(transformer: nn.Module) -> bool:
    """Whether the patch has parameters of its own, as MHLA and unlike sparse attention."""
    return any(isinstance(layer, MHLALayer) for layer in mhla_layers(transformer).values())


def lora_targets(transformer: nn.Module, layers: LoraLayers) -> list[str]:
    """Return the names of the linear layers that a LoRA is for."""
    places = [place.removesuffix(".base_layer") for place in _linears_of_blocks(transformer)]
    attentions = tuple(f"{name}." for name in patched_attentions(transformer))
    return places if layers == "blocks" else [place for place in places if place.startswith(attentions)]


# The original model


class Original:
    """The original model within a context: the same modules without patch and LoRA, with the original weights.

    Of the weights named in ``trained``, and of those that a loaded patch has replaced, the original values are kept on
    the device and swapped in; all others are shared. So make it before anything is trained or resumed.
    """

    def __init__(self, transformer: nn.Module, trained: Collection[str]) -> None:
        self._transformer, self._values = transformer, dict[str, torch.Tensor]()
        patched = find_patched(transformer).values()
        replaced = {name: value for one in patched for name, value in one.replaced_weights.items()}
        for name, parameter in transformer.named_parameters():
            plain = plain_name(name)
            if plain in replaced:
                self._values[plain] = shard_like(parameter, replaced[plain])
            elif name in trained and ".mhla." not in name and lora_of(name) is None:
                self._values[plain] = parameter.detach().clone()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which the transformer is the original model, without gradients."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = [layer for layer in self._transformer.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in adapted:  # PEFT's method would also take the gradients from LoRA's weights
            layer._disable_adapters = True
        self._swap()
        try:
            with torch.no_grad(), mhla_disabled(self._transformer):
                yield
        finally:
            self._swap()
            for layer in adapted:
                layer._disable_adapters = False

    def _swap(self) -> None:
        """Swap original and current values in place, because FSDP keeps the memory; no backward may be pending."""
        for name, parameter in self._transformer.named_parameters():
            if (plain := plain_name(name)) in self._values:
                current = parameter.detach().clone()
                parameter.data.copy_(self._values[plain])
                self._values[plain] = current


# Files


def begin_with(folder: Path, model: Any) -> Any:
    """Load a saved patch to continue its training, in float32 even in a bfloat16 model, and return the model."""
    load_mhla(model, folder)
    (component,) = read_record(folder).transformers
    saved = load_file(folder / PATCH_FILE)
    for name, parameter in model.named_parameters():
        value = saved.get(f"{component}.{plain_name(name)}")
        if value is not None and not parameter.is_meta:
            parameter.data = value
    return model


def write_weights(transformer: Any, config: TrainingConfig, folder: Path) -> None:
    """Write a patch for :func:`mhla_diffusers.load_mhla`, or a transformer for from_pretrained if the run has none."""
    if config.patch is None:
        transformer.save_pretrained(folder)
        return
    (patched,) = find_patched(transformer).values()
    if not patched.is_attached:
        raise ValueError(
            "The transformer was patched with diffusers' own set_attn_processor, which does not record a LoRA; patch "
            "it with apply_mhla() to train and export it."
        )
    trained = (name for name, parameter in transformer.named_parameters() if parameter.requires_grad)
    own = [plain_name(name) for name in trained if ".mhla." not in name]
    base = None if config.model is None else pipeline_source(config.model)
    patched.lora = LORA if lora_layers(transformer) else None
    weights = "mhla" if config.trainable in ("mhla", "lora") else own
    save_mhla(transformer, folder, weights=weights, base_model=base)
