"""What is read off a tensor's values, kept with it: reading them waits for a device."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")

_KEPT = "_mhla_kept"


def keep_with(tensor: torch.Tensor, found: Found) -> None:
    """Keep what is known of a tensor's values, for :func:`kept_with`."""
    setattr(tensor, _KEPT, (_version(tensor), found))


def kept_with(tensor: torch.Tensor, read: Callable[[Any], Found]) -> Found:
    """What ``read`` finds in a tensor: read once, and again when its values have changed in place.

    A tensor made in inference mode does not tell whether they have, so it is read every time.
    """
    version, kept = _version(tensor), getattr(tensor, _KEPT, None)
    if kept is not None and (kept[0] == version) and (version is not None or tensor.is_meta):
        found: Found = kept[1]
        return found
    found = read(tensor)
    keep_with(tensor, found)
    return found


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
