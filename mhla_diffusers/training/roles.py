"""The roles of one transformer in training.

The student is what a stage trains. The teacher is the same module with its original weights, without patch and LoRA,
also where the run begins with a patch that brought weights.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import LinearConfig
from ..errors import installing
from ..families import DiffusionProcess, NoisedBatch, Sample, get_family, predict, trained_family
from ..patching import find_patched, is_patched, mhla_disabled, mhla_layers
from ..patching.weights import LORA
from .config import BaseType, LoraLayers, Trainable, TrainingConfig
from .distributed import placed_like
from .latents.data import drop_prompts

STUDENT = LORA
"""Name of the student's LoRA, as PEFT has it in the names of its weights; that of a loaded patch is the same."""
Losses = Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Losses of a batch, one graph at a time: the loss () to run backward before the next is asked for, and its parts for
the metrics, each (), which add up over the batch.
"""


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


# Student


def trainable_names(transformer: nn.Module, *kinds: Trainable) -> list[str]:
    """Return the names of the parameters that stages of these kinds train, including LoRA's once added."""
    layers = mhla_layers(transformer)
    mhla = tuple(f"{name}." for name in layers)
    attentions = tuple(f"{name}." for name in patched_attentions(transformer))
    prefixes = {"mhla": mhla, "lora": mhla, "attention": (*mhla, *attentions), "all": ("",)}
    fixed = tuple(
        f"{name}.mixing"
        for name, layer in layers.items()
        if isinstance(layer.config, LinearConfig) and not layer.config.mixing_learnable
    )
    chosen = tuple(prefix for kind in kinds for prefix in prefixes[kind])
    names = []
    for name, _ in transformer.named_parameters():
        lora = lora_of(name)
        is_chosen = name.startswith(chosen) if lora is None else "lora" in kinds
        if is_chosen and name not in fixed:
            names.append(name)
    return names


def make_trainable(transformer: nn.Module, names: Collection[str]) -> dict[str, nn.Parameter]:
    """Enable gradients for exactly these parameter names, in float32, and return them by name."""
    from diffusers.training_utils import cast_training_params

    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(name in names)
    cast_training_params(transformer)
    return {name: parameter for name, parameter in transformer.named_parameters() if name in names}


def prepare_for_training(transformer: Any, config: TrainingConfig) -> list[str]:
    """Add the LoRA of a run, and set training mode and gradient checkpointing; return what any stage trains."""
    for stage in config.stages:
        if stage.lora_rank is not None:
            add_lora(transformer, stage.lora_rank, config.seed, stage.lora_layers)
    transformer.train()
    trained_family(transformer).training.prepare_for_training(transformer)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    return trainable_names(transformer, *(stage.trainable for stage in config.stages))


def linears_of_blocks(transformer: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by name, without those of MHLA and of LoRA."""
    blocks = tuple(f"{block}." for block in get_family(transformer).blocks_of(transformer))
    return {
        place: module
        for place, module in transformer.named_modules()
        if isinstance(module, nn.Linear)
        and place.startswith(blocks)
        and ".mhla." not in place
        and lora_of(f"{place}.") is None
    }


def quantization(kind: BaseType) -> Any:
    """Return torchao's configuration of a type of frozen weights; ImportError if torchao is missing."""
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise ImportError(f"base_dtype={kind} needs torchao; {installing('quantize')}.") from error
    return Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig()


def quantize_base(transformer: nn.Module, kind: BaseType, device: torch.device) -> None:
    """Convert the weights of all linear layers of the blocks in place, one layer at a time on the device."""
    from torchao.quantization import quantize_

    for linear in linears_of_blocks(transformer).values():
        quantize_(linear, quantization(kind), device=device)


def add_lora(transformer: nn.Module, rank: int, seed: int, layers: LoraLayers = "attention") -> None:
    """Add the student's LoRA to linear layers, never to MHLA's own, unless it is there; it is the active one."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(lora_of(weight) == STUDENT for weight, _ in transformer.named_parameters()):
        return
    targets = lora_targets(transformer, layers)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated", UserWarning)  # training never merges
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), transformer, STUDENT)
    for layer in transformer.modules():
        if isinstance(layer, BaseTunerLayer):
            layer._active_adapter = [STUDENT]  # PEFT activates the latest one
            for part in (layer.lora_A, layer.lora_B):
                if STUDENT in part:  # PEFT leaves a second one on the CPU where the model is on the meta device
                    part[STUDENT].to(layer.get_base_layer().weight.device)


def lora_targets(transformer: nn.Module, layers: LoraLayers) -> list[str]:
    """Return the names of the linear layers that a LoRA is for, whether or not they have one."""
    places = [place.removesuffix(".base_layer") for place in linears_of_blocks(transformer)]
    attentions = tuple(f"{name}." for name in patched_attentions(transformer))
    return places if layers == "blocks" else [place for place in places if place.startswith(attentions)]


@contextmanager
def _original(transformer: nn.Module) -> Iterator[None]:
    """Context in which a transformer runs without its patch and without LoRA.

    PEFT's ``set_adapter`` would also take the gradients from the other LoRA's weights.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in transformer.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = []
    try:
        with mhla_disabled(transformer) if is_patched(transformer) else nullcontext():
            yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


# Teacher


class Teacher:
    """Turns a transformer into the original model within a context.

    Weights that no stage changes are shared. For weights that change, or that the patch has replaced, except MHLA's and
    LoRA's own, the original values are kept on the device of the parameters and swapped in while the teacher runs. So
    create the teacher before anything is trained or loaded from a checkpoint.

    Args:
        transformer: with the original weights, patched or not, or with those of a loaded patch.
        changing: names of the parameters that training changes.
    """

    def __init__(self, transformer: nn.Module, changing: Iterable[str]) -> None:
        self._transformer, self._originals = transformer, dict[str, torch.Tensor]()
        replaced: dict[str, torch.Tensor] = {}
        for patched in find_patched(transformer).values():
            replaced |= patched.replaced_weights or {}
        shared = {plain_name(name) for name in changing if ".mhla." not in name and lora_of(name) is None}
        for name, parameter in transformer.named_parameters():
            plain = plain_name(name)
            if plain in replaced:
                self._originals[plain] = placed_like(replaced[plain], parameter)
            elif plain in shared and lora_of(name) is None:
                self._originals[plain] = parameter.detach().clone()
        self.extra_parameters = sum(original.numel() for original in self._originals.values())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the context the transformer is the teacher; nothing takes gradients."""
        with torch.no_grad(), _original(self._transformer):
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def predict(self, batch: NoisedBatch, guidance: float = 1.0, empty: Sample | None = None) -> torch.Tensor:
        """Predict with classifier-free guidance: (B, output channels, ...).

        Args:
            batch: the input.
            guidance: scale; 1.0 for none. It applies to the channels of the noise alone.
            empty: conditioning of the empty prompt, without a batch axis; without it there is no guidance.
        """
        with self.at_work():
            conditional = predict(self._transformer, batch)
            if guidance == 1 or empty is None:
                return conditional
            everywhere = torch.ones(len(batch.noise), dtype=torch.bool, device=batch.noise.device)
            there = {name: x.to(batch.noise.device) for name, x in empty.items()}
            conditioning = drop_prompts(batch.conditioning, there, everywhere)
            free = predict(self._transformer, replace(batch, conditioning=conditioning))
        noised = min(conditional.shape[1], batch.noise.shape[1])
        guided = (free + guidance * (conditional - free))[:, :noised]
        return torch.cat([guided, conditional[:, noised:]], dim=1)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the original and the current values."""
        for name, parameter in self._transformer.named_parameters():
            plain = plain_name(name)
            if plain in self._originals:
                original = self._originals[plain].to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    self._originals[plain] = parameter.detach().clone()
                    parameter.copy_(original)
                else:  # without writing, because a student's forward may still wait for its backward pass
                    self._originals[plain], parameter.data = parameter.data, original


@dataclass(frozen=True)
class Roles:
    """The transformer in training with what it is compared with, and how they are called."""

    student: nn.Module
    """Unwrapped."""
    process: DiffusionProcess
    """How the family was trained."""
    teacher: Teacher | None = None
    empty: Sample | None = None
    """Conditioning of the empty prompt, which guidance needs."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of forwards."""
    split: int = 1
    """Processes that the tokens of a batch are split over."""

    @classmethod
    def of(
        cls,
        transformer: nn.Module,
        config: TrainingConfig,
        changing: Collection[str],
        empty: Sample | None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> "Roles":
        """Make the roles of a run, before the original weights are trained or a checkpoint replaces them.

        Args:
            transformer: as :func:`prepare_for_training` left it, sharded if it is to be.
            config: settings.
            changing: names of the parameters that training changes.
            empty: conditioning of the empty prompt.
            autocast: context of forwards.
        """
        teacher = Teacher(transformer, changing) if any(stage.needs_teacher for stage in config.stages) else None
        process = trained_family(transformer).training.process(transformer, config.flow_shift)
        return cls(transformer, process, teacher, empty, autocast, config.context_parallel)
