"""FSDP2: weights, gradients and optimizer state in parts over the processes.

accelerate starts the processes; PyTorch's ``fully_shard`` is called here, since accelerate wraps a model once together
with one optimizer, while a run has a new optimizer in every stage.
"""

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..families import get_family
from .config import TrainingConfig
from .trainable import patched_attentions


def sharding_is_asked_for(config: TrainingConfig) -> bool:
    """Whether ``accelerate launch`` was told to use FSDP2.

    Raises:
        ValueError: if it was told to use DeepSpeed, or FSDP with settings that training does not support.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "accelerate was told to use DeepSpeed, which training does not support; use "
            "finetune/accelerate/fsdp2.yaml, which spreads weights, gradients and optimizer state over the processes."
        )
    if not _is_set("ACCELERATE_USE_FSDP"):
        return False
    plugin = FullyShardedDataParallelPlugin()
    refused = {
        "fsdp_version: 1": plugin.fsdp_version != 2,
        "fsdp_offload_params: true": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_activation_checkpointing: true": bool(plugin.activation_checkpointing),
        "fsdp_cpu_ram_efficient_loading: true": bool(plugin.cpu_ram_efficient_loading),
        "fsdp_reshard_after_forward: false": plugin.reshard_after_forward is not True,
    }
    for setting, found in refused.items():
        if found:
            raise ValueError(
                f"{setting} of accelerate's configuration is not supported in training; use "
                "finetune/accelerate/fsdp2.yaml. Gradient checkpointing is a setting of the training configuration."
            )
    if config.optimizer == "adamw8bit":
        raise ValueError("optimizer=adamw8bit does not work on weights in parts; set optimizer: adamw with FSDP2.")
    return True


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def is_sharded(module: nn.Module) -> bool:
    """Whether a transformer went through :func:`shard`."""
    return isinstance(module, FSDPModule)


def shard(transformer: Any, device: torch.device, processes: int) -> None:
    """Leave a part of every weight on each process, in place.

    Every block is gathered while it runs. A patched self-attention is gathered by itself, so that attention transfer
    can run it alone.

    Args:
        transformer: whole, the same on all processes, on any device; what takes gradients is of one dtype and stays
            the same afterwards.
        device: where the parts go.
        processes: how many there are.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # over all processes, those that share a batch's tokens as well: one reduce-scatter then adds up the gradients of a
    # group and averages them over the groups, and nothing is held twice
    mesh = init_device_mesh(device.type, (processes,))
    for part in parts_gathered(transformer):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def parts_gathered(transformer: Any) -> list[Any]:
    """Modules that are gathered by themselves, each without those that stand before it; the transformer is the last."""
    family = get_family(transformer)
    attentions, blocks = patched_attentions(transformer).values(), family.blocks_of(transformer).values()
    return [*attentions, *family.parts_to_gather(transformer), *blocks, transformer]


def meta_copy(transformer: nn.Module) -> nn.Module:
    """A copy with patch and LoRA, but without values; weights are put into it to be saved."""
    emptied: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in transformer.parameters()
    }
    return copy.deepcopy(transformer, emptied)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on the CPU of the first process; the others get an empty one.

    All processes must call it if the tensor is in parts.
    """
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return torch.empty(0)
    return whole.detach().cpu().contiguous()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; all of one that is not in parts."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor where a parameter is: on its device, in parts if it is in parts."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
