"""Calls on the meta device: operators do there what they do on a GPU, but kernels are noted instead of launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface


class Operators(TorchDispatchMode):
    """Does what the package's operators do, where PyTorch would only ask for shapes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mhla_diffusers":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs or {})
        return func(*args, **kwargs or {})


@contextmanager
def nothing_launched() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Kernels and their arguments, in the order of what would be launched."""
    launches = []
    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, _: lambda **arguments: launches.append((kernel, arguments))
    try:
        yield launches
    finally:
        KernelInterface.__getitem__ = launch
