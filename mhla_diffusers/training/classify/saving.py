"""What stands beside a classifier's weights, as transformers' own classes have it: names of classes, how to cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config import check
from .folders import CentreView, Normalised

PROCESSOR = "preprocessor_config.json"
"""As transformers names it: how the pictures were cut and normalised that a model was trained on."""


def name_classes(model: Any, classes: Sequence[str]) -> None:
    """Give a classifier's configuration the names of its classes."""
    model.config.id2label = dict(enumerate(classes))
    model.config.label2id = {name: label for label, name in enumerate(classes)}


def class_names(model: Any) -> list[str]:
    """The names that a classifier's configuration has, in the order of their labels."""
    return [model.config.id2label[label] for label in sorted(model.config.id2label)]


def processor_of(view: CentreView) -> dict[str, Any]:
    """Settings of transformers' ``BitImageProcessor``, which cuts a view out of a picture, but for rounding.

    It resizes the whole picture and then takes the middle; a view is resized from the middle.
    """
    from PIL import Image

    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "size": {"shortest_edge": round(view.size / view.crop)},
        "resample": int(Image.Resampling.BICUBIC),
        "crop_size": {"height": view.size, "width": view.size},
        "image_mean": list(view.pixels.mean),
        "image_std": list(view.pixels.std),
    }


@dataclass(frozen=True)
class Cutting:
    """What the image processor of a classifier tells."""

    pixels: Normalised
    size: int | None
    """Height and width in pixels (``crop_size``); None if it tells none, or sides that differ."""


def cutting_of(name: str) -> Cutting:
    """How pictures are cut for a model of the Hub, or of a folder.

    Args:
        name: Hub id or folder.

    Raises:
        OSError: it tells nothing.
        ValueError: it tells no mean and standard deviation.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    found = ImageProcessingMixin.get_image_processor_dict(name)[0]
    missing = [key for key in ("image_mean", "image_std") if key not in found]
    check(not missing, f"{PROCESSOR} of {name} lacks {', '.join(missing)}; add the values that it was trained with.")
    sides = found.get("crop_size")
    is_square = isinstance(sides, dict) and sides.get("height") == sides.get("width")
    return Cutting(
        Normalised(tuple(found["image_mean"]), tuple(found["image_std"])), sides["height"] if is_square else None
    )
