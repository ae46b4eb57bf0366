"""What is cut out of videos and pictures: clips of some lengths, at one rate, in buckets of sizes."""

import math
import sys
from typing import Annotated

from pydantic import Field

from ...families import Clip
from ...families.models import Sizes
from ...reporting import parse_size
from ...settings import Flag, Positive, PositiveInteger, Settings, settings

_ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 21 / 9)
"""Width over height of the buckets that ``sizes: auto`` makes, besides their inverses."""
_SAME_ASPECT = 0.06
"""Difference of logarithms up to which two aspect ratios are one."""


@settings()
class Clips(Settings):
    """Which clips every video gives, and which size."""

    frames: PositiveInteger | Annotated[tuple[PositiveInteger, ...], Field(min_length=1)]
    """Length of a clip, or several; 1 for pictures, which are also the frames of videos then."""
    fps: Positive
    """Frames per second that a video is sampled at."""
    sizes: Sizes | Annotated[str, Field(pattern=r"^auto( \d+(x\d+)?)?$")]
    """(height, width) in pixels; a file gets the one nearest in aspect ratio. "auto": usual ratios in the area of
    the model's own size; "auto 240x416": in that area."""
    stride: PositiveInteger | None = None
    """Frames, at ``fps``, from the start of one clip (of each length) to that of the next; None for one start alone."""
    upscale: Flag = False
    """Whether to enlarge files that are smaller than their size; else they are left out."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Frames of the clips, the shortest first."""
        return (self.frames,) if isinstance(self.frames, int) else tuple(sorted(set(self.frames)))

    @property
    def starts(self) -> range:
        """Frames at which clips begin, without regard to the end of the video."""
        return range(0, sys.maxsize, self.stride or sys.maxsize)

    def longest(self, usual: Clip) -> Clip:
        """Return a clip of most frames and the first size, or for "auto" the size whose area it keeps."""
        sizes = self.sizes if isinstance(self.sizes, tuple) else (self.auto_size(usual),)
        return Clip(self.lengths[-1], self.fps, sizes[:1])

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """Return the size nearest in aspect ratio; ValueError for "auto", which needs a model."""
        if isinstance(self.sizes, str):
            raise ValueError(f"sizes={self.sizes!r} depend on the model; give the model too, or the sizes.")
        return min(self.sizes, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(height / width)))

    def auto_size(self, usual: Clip) -> tuple[int, int]:
        """Return the size whose area "auto" keeps."""
        _, _, size = str(self.sizes).partition(" ")
        return parse_size(size) if size else usual.sizes[0]


def auto_sizes(first: tuple[int, int], step: int) -> tuple[tuple[int, int], ...]:
    """Return sizes of about the area of a first one, with sides that are multiples of a step.

    They do not depend on the data, so a file keeps its size however many others are encoded later.
    """
    sizes, area, own = [first, first[::-1]], first[0] * first[1], first[1] / first[0]
    for aspect in (*_ASPECTS, *(1 / aspect for aspect in _ASPECTS[1:])):
        if all(abs(math.log(aspect / known)) > _SAME_ASPECT for known in (own, 1 / own)):
            exact = math.sqrt(area / aspect) / step, math.sqrt(area * aspect) / step
            heights, widths = ({max(1, math.floor(side)), math.ceil(side)} for side in exact)
            near = [(height * step, width * step) for height in sorted(heights) for width in sorted(widths)]
            sizes.append(min(near, key=lambda size: _distance(size, aspect, area)))
    return tuple(dict.fromkeys(sizes))


def _distance(size: tuple[int, int], aspect: float, area: int) -> float:
    height, width = size
    return abs(math.log(width / height / aspect)) + abs(math.log(height * width / area))
