"""Keep mixing matrices in (0, 1) during training."""

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .finding import require_layers


def register_mixing_clip(optimizer: torch.optim.Optimizer, model: Any) -> RemovableHandle:
    """Clip every mixing matrix into (0, 1) after each step of ``optimizer``, as the paper does (Sec. 4.2).

    Layers whose configuration has ``mixing_clip=False`` are left alone.

    Raises:
        ValueError: if the model has no MHLA layers, or ``optimizer`` was made before them and lacks a matrix that
            takes gradients.
    """
    layers = list(require_layers(model).values())
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(layer.mixing.requires_grad and id(layer.mixing) not in optimized for layer in layers):
        raise ValueError(
            "The optimizer lacks a mixing matrix that takes gradients. Make the optimizer after apply_mhla(), or "
            "freeze the matrices with mixing_learnable=False."
        )

    def clip(*_: Any) -> None:
        for layer in layers:
            layer.clip_mixing_()

    return optimizer.register_step_post_hook(clip)
