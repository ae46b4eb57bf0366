"""What differentiates a call besides a backward pass: forward mode, and the transforms of ``torch.func``.

PyTorch gives custom operators no rule for them, and drops tangents there without a word. So while one is active,
operators in PyTorch take the place of custom ones, and the kernels are not used.
"""

import torch
from torch.autograd import forward_ad


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives are taken, by ``torch.func.jvp`` or ``torch.autograd.forward_ad``."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether they are, or a transform such as ``torch.func.grad`` or ``vmap`` is active."""
    if is_forward_mode():
        return True
    # torch.compile sees through transforms itself
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
