"""Reading the values of tensors: once, because it waits for the device, and not at all on the meta device."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Found = TypeVar("Found")

_DEVICE_OF: Any = vars(torch._C.TensorBase)["device"].__get__
_KEPT = "_mhla_kept"
"""Attribute of a tensor."""


def read_once(read: Callable[..., Found]) -> Callable[..., Found]:
    """Decorator of a function that reads values of tensors: cached on the first one until its values change.

    A compiled graph takes the result as a constant. A tensor made in inference mode has no version counter, so it is
    read every time.
    """

    @wraps(read)
    def reading(tensor: Any, *others: Any) -> Found:
        version, kept = _version(tensor), getattr(tensor, _KEPT, None)
        if kept is not None and kept[0] == version and (version is not None or tensor.is_meta):
            found: Found = kept[1]
            return found
        found = read(tensor, *others)
        keep_with(tensor, found)
        return found

    # the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
    vars(reading)["_dynamo_marked_constant"] = True
    return reading


def keep_with(tensor: Tensor, found: Any) -> None:
    """Store on a tensor what a :func:`read_once` function would read from it, for tensors without values."""
    setattr(tensor, _KEPT, (_version(tensor), found))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def compiled_for(grid: tuple[int, ...], lie_on_it: Callable[[], Tensor]) -> tuple[int, ...]:
    """Return the grid; a compiled graph checks in every call that the tokens still lie on it: bool ()."""
    if torch.compiler.is_compiling():
        torch._assert_async(lie_on_it(), "compiled for another token grid")
    return grid


class WithoutValues(TorchFunctionMode):
    """Mode of a forward on the meta device that reads values: conditions hold, and masks keep everything.

    So a mask that was inverted keeps nothing, and shapes are those of the longest text.

    Args:
        seems_on_cpu: of a meta tensor, whether it reports the CPU as its device, for code that asks for its autocast,
            which the meta device lacks.
    """

    def __init__(self, seems_on_cpu: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        super().__init__()
        self.seems_on_cpu = seems_on_cpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not args or not getattr(args[0], "is_meta", False):
            return func(*args, **(kwargs or {}))
        if func == _DEVICE_OF and self.seems_on_cpu(args[0]):
            return torch.device("cpu")
        if func is Tensor.__bool__:
            return True
        if func is torch.nonzero:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        if func is Tensor.tolist:
            return [args[0].kept_tokens] * len(args[0])
        if func is Tensor.__getitem__ and getattr(args[1], "is_meta", False) and args[1].dtype == torch.bool:
            return args[0][:0] if hasattr(args[1], "keeps_nothing") else args[0]
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):  # a length that is read
            whole = (isinstance(one, slice) and isinstance(one.stop, Tensor) for one in args[1])
            places = tuple(slice(None) if all_of else one for all_of, one in zip(whole, args[1], strict=True))
            args = args[0], places
        result: Any = func(*args, **(kwargs or {}))
        if func is Tensor.sum and args[0].ndim == 2:
            result.kept_tokens = args[0].shape[1]
        if func is Tensor.__invert__:
            result.keeps_nothing = True
        return result
