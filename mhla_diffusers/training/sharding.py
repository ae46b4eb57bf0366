"""Weights that accelerate shards over processes by torch's FSDP: its settings, and gathering and sharding tensors."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from ..devices import is_first_process
from ..errors import check
from ..families import get_family
from .config import TrainingConfig


def fsdp_plugin(transformer: nn.Module, config: TrainingConfig) -> Any:
    """Return accelerate's settings for FSDP, None unless it is configured for that; ValueError for unsupported ones.

    Attentions, which transfer runs alone, and feed-forwards are sharded one by one; all are computed in their own type.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env

    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return None
    family = get_family(transformer)
    parts = [part for block in family.blocks_of(transformer).values() for _, part in family.parts_of(block).values()]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(part).__name__ for part in parts}),
        mixed_precision_policy=MixedPrecisionPolicy(),
        cpu_ram_efficient_loading=False,
    )
    check(
        not (plugin.activation_checkpointing or isinstance(plugin.cpu_offload, CPUOffloadPolicy)),
        "FSDP works without offload, and gradient_checkpointing: true replaces its own activation checkpointing; "
        "use finetune/accelerate/fsdp.yaml.",
    )
    check(
        config.optimizer in ("adamw", "schedule-free") and not config.validation.prompts,
        f"optimizer={config.optimizer!r} and validation.prompts={config.validation.prompts}, but FSDP takes adamw or "
        "schedule-free, and no prompts; change them, or use finetune/accelerate/ddp.yaml.",
    )
    return plugin


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be sharded as a plain one; all processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(value: Any) -> Any:
    """Return a whole copy of a tensor on the CPU, empty but in the first process; all must call this."""
    if not isinstance(value, torch.Tensor):
        return value
    found = whole(value.detach())
    return found.to("cpu", copy=True).contiguous() if is_first_process() else torch.empty(0)


def shard_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a copy of a whole tensor on a parameter's device, sharded as that is; other shapes and types unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    copy = value.to(parameter.device, copy=True)
    if not isinstance(parameter, DTensor):
        return copy
    return distribute_tensor(copy, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()


def unshard(transformer: nn.Module) -> None:
    """Give a sharded transformer whole weights on the CPU in the first process, to be written and not to be run."""
    for module in transformer.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(gather(parameter), requires_grad=parameter.requires_grad))
        if isinstance(module, FSDPModule):
            module.__class__ = type(module).__mro__[2]  # its own, which files name
