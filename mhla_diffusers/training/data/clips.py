"""How clips are cut from videos and images: lengths, frame rate, and buckets of sizes."""

import math
from typing import Annotated

from pydantic import Field, StrictBool

from ...families.models import Sizes
from ...generation.pixels import UnreadableMediaError
from ...reporting import times
from ...settings import Positive, PositiveInteger, Settings

_ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 21 / 9)
"""Width over height of the buckets of "auto", besides their inverses."""
_SAME_ASPECT = 0.06
"""Difference of logarithms up to which two aspect ratios are one."""


class Clips(Settings):
    """Which clips to cut from every video, and their sizes."""

    frames: Annotated[tuple[PositiveInteger, ...], Field(min_length=1)]
    """Lengths of clips, the shortest first; 1 for pictures, and for frames of videos as pictures."""
    fps: Positive
    """Frames per second that a video is sampled at."""
    sizes: Sizes
    """(height, width) in pixels; a file gets the one nearest in aspect ratio."""
    stride: PositiveInteger | None = None
    """Frames, at ``fps``, from the start of one clip (of each length) to that of the next; None for one start alone."""
    longest: StrictBool = False
    """Whether of the lengths only the longest for which the video has frames is cut from each start."""
    upscale: StrictBool = False
    """Whether to enlarge files that are smaller than their size; else they are left out."""

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """Return the size nearest in aspect ratio; UnreadableMediaError if it is larger and ``upscale`` False."""
        size = min(self.sizes, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(height / width)))
        scale = max(size[0] / height, size[1] / width)
        if scale > 1 and not self.upscale:
            raise UnreadableMediaError(f"its {height}x{width} would be upscaled {scale:.3g} times to {times(size)}")
        return size


def auto_sizes(first: tuple[int, int], step: int) -> list[tuple[int, int]]:
    """Return a size, turned too, and those of other usual aspect ratios of about its area, in multiples of ``step``.

    They do not depend on the data, so a file keeps its size however many others are encoded later.
    """
    sizes, area, own = [first, first[::-1]], first[0] * first[1], abs(math.log(first[1] / first[0]))
    for aspect in (*_ASPECTS, *(1 / aspect for aspect in _ASPECTS)):
        if abs(abs(math.log(aspect)) - own) > _SAME_ASPECT:
            sides = math.sqrt(area / aspect), math.sqrt(area * aspect)
            height, width = (max(1, round(side / step)) * step for side in sides)
            sizes.append((height, width))
    return list(dict.fromkeys(sizes))
