"""What transformers' own classes find beside a classifier's weights: names of classes, and how pictures are cut."""

from collections.abc import Sequence
from typing import Any

from .folders import CentreView


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
