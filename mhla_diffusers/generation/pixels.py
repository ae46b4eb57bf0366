"""Pictures and frames as they are meant to be seen: upright, and 8 bits per channel."""

from typing import Any

import numpy
from PIL import Image, ImageOps

_BITS_16 = 257
"""65535 / 255: value of a 16-bit channel over that of an 8-bit one."""


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return a picture as RGB of 8 bits, turned as its EXIF data says.

    PIL's own conversion cuts 16-bit grey off at 255, so that nearly all of it becomes white.
    """
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        scaled = numpy.asarray(turned).astype(numpy.float64) / _BITS_16
        turned = Image.fromarray(scaled.round().clip(0, 255).astype(numpy.uint8))
    return turned.convert("RGB")


def quarter_turns(frame: Any) -> int:
    """Return by how many quarter turns, counter-clockwise, a frame of PyAV is shown: phones film on their side."""
    return round(frame.rotation / 90) % 4
