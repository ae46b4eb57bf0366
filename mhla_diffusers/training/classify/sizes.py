"""Pictures of another size than a classifier's own: which that is, and what the model must be told."""

import inspect
from collections.abc import Sequence
from typing import Any

from ...config import check
from ...families import find_family


def own_size(model: Any) -> int | None:
    """Height and width in pixels that a classifier's configuration tells; None if it tells none, as VLT's.

    Raises:
        ValueError: its pictures are not square.
    """
    family = find_family(model)
    config = model.config if family is None else family.trunk(model).config  # of SigLIP the vision model's
    size = getattr(config, "image_size", None)
    if not isinstance(size, Sequence):
        return size
    check(
        len(set(size)) == 1,
        f"{type(model).__name__} takes pictures of {' x '.join(map(str, size))} pixels; only squares can be cut here.",
    )
    return int(size[0])


def call_settings(model: Any, size: int) -> dict[str, Any]:
    """What a forward needs beside pictures of a size: whether positions are interpolated, where the model asks.

    Models of the families that do not ask interpolate by themselves, as DINOv2.

    Raises:
        ValueError: the model takes pictures of its own size alone.
    """
    own = own_size(model)
    if own in (size, None):
        return {}
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        return {"interpolate_pos_encoding": True}
    check(
        find_family(model) is not None,
        f"{type(model).__name__} takes pictures of {own} pixels, and size={size}; give that size.",
    )
    return {}
