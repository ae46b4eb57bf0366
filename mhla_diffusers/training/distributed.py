"""Several processes: sharded weights (FSDP2), and groups that split the tokens of a batch (context parallelism).

accelerate starts the processes. ``fully_shard`` of PyTorch is called here, because accelerate wraps a model once with
one optimizer, but every stage has a new one. Hooks of diffusers split the tokens before the first block and gather them
after the last one.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import check
from ..families import get_family, trained_family
from .config import TrainingConfig


def uses_fsdp2(config: TrainingConfig) -> bool:
    """Whether ``accelerate launch`` uses FSDP2; raises ValueError for setups that training does not support."""
    from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
    from torch.distributed.fsdp import CPUOffloadPolicy

    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "accelerate is configured for DeepSpeed, which training does not support; use "
            "finetune/accelerate/fsdp2.yaml, which shards weights, gradients and optimizer state over the processes."
        )
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
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
    check_sharded(config)
    return True


def check_sharded(config: TrainingConfig) -> None:
    """Raise ValueError for settings that do not work on sharded weights."""
    for name, value, allowed in (("optimizer", config.optimizer, "adamw"), ("base_dtype", config.base_dtype, None)):
        check(
            value == allowed,
            f"{name}={value} does not work on sharded weights (FSDP2); set {name}: {allowed or 'null'}.",
        )


def shard(transformer: Any, device: torch.device, processes: int) -> None:
    """Shard every weight over the processes, in place.

    Trained parameters must be of one dtype, and which ones are trained cannot change later.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # over all processes, also those that share a batch's tokens: one reduce-scatter sums the gradients of a group and
    # averages over the groups, and nothing is held twice
    mesh = init_device_mesh(device.type, (processes,))
    for part in gathered_parts(transformer):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def gathered_parts(transformer: Any) -> list[Any]:
    """List the modules that are gathered separately, each without those before it; the transformer is the last.

    Every block is gathered while it runs, and a self-attention apart from it, so that attention transfer can run it
    alone.
    """
    family = trained_family(transformer)
    attentions = family.self_attentions(transformer)
    patched = [attn for attn in attentions.values() if hasattr(attn, "mhla")] or attentions.values()
    return [
        *patched,
        *family.training.parts_to_gather(transformer),
        *family.blocks_of(transformer).values(),
        transformer,
    ]


def meta_copy(transformer: nn.Module) -> nn.Module:
    """Copy a transformer with patch and LoRA but without values, to fill with weights for saving."""
    emptied: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in transformer.parameters()
    }
    return copy.deepcopy(transformer, emptied)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, on the CPU of the first process; the others get an empty one.

    All processes must call it if the tensor is sharded.
    """
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return torch.empty(0)
    return whole.detach().cpu().contiguous()


def placed_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Place a whole tensor like a parameter: on its device, sharded if the parameter is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def check_groups(size: int, processes: int) -> None:
    """Raise ValueError unless processes make whole groups of a size, whose members follow each other."""
    if processes % size:
        raise ValueError(
            f"context_parallel={size} splits a batch over groups of {size} processes, but {processes} processes were "
            f"launched; launch a multiple of {size}, for example accelerate launch --config_file "
            f"finetune/accelerate/fsdp2.yaml --num_processes {size} …, or choose another size."
        )


def split_tokens(transformer: Any, size: int, device: torch.device, groups: int) -> None:
    """Make a transformer split the tokens of every forward over the processes of its group, in place.

    Args:
        transformer: with diffusers' ``_cp_plan``.
        size: processes of a group.
        device: of this process.
        groups: number of groups.
    """
    from diffusers import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    # Under autocast a GPU norms query and key in float32. PyTorch's attention casts them down again; diffusers' split
    # softmax attention passes query, key and value to kernels as they are, in two types.
    for attn in get_family(transformer).self_attentions(transformer).values():
        for norm in (getattr(attn, "norm_q", None), getattr(attn, "norm_k", None)):
            if norm is not None:
                norm.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
    # ranks of a group are neighbours
    mesh = init_device_mesh(device.type, (groups, 1, size), mesh_dim_names=("group", "ring", "ulysses"))
    settings = ContextParallelConfig(ulysses_degree=size, mesh=mesh)
    count = torch.accelerator.device_count
    if device.type == "cpu":  # diffusers divides the rank by the number of accelerators, and a CPU has none
        torch.accelerator.device_count = lambda: 1
    try:
        transformer.enable_parallelism(config=settings)
    finally:
        torch.accelerator.device_count = count
