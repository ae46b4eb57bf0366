"""Custom operators: their namespace, and the derivatives that they lack.

PyTorch gives custom operators no rule for forward mode and the transforms of ``torch.func``, and drops tangents there
without a word. So while one is active, operators in PyTorch take the place of custom ones, and the kernels are not
used.
"""

import torch
from torch.autograd import forward_ad

NAMESPACE = __name__.partition(".")[0]
"""Namespace of the operators: the package, so that a copy of it under another name registers its own."""


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives are taken, by ``torch.func.jvp`` or ``torch.autograd.forward_ad``."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether they are, or a transform such as ``torch.func.grad`` or ``vmap`` is active."""
    if is_forward_mode():
        return True
    # torch.compile sees through transforms itself
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_free_to_read(x: torch.Tensor) -> bool:
    """Whether reading values costs nothing: a device would have to be waited for, and a compiled graph would break.

    Under a transform of ``torch.func`` a tensor may stand for many, and has no values to read.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()
