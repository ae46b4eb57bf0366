"""Tensors of parameters that FSDP may have spread over processes."""

import torch
from torch import nn


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, gathered from all processes, which must all call this."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = tensor.detach() if gather is None else gather()
    return whole.cpu().contiguous()


def like_parameter(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A whole tensor on the parameter's device, spread over processes as the parameter is."""
    value = value.to(parameter.device)
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
