"""What is cut out of videos and pictures: clips of some lengths, at one rate, in buckets of sizes."""

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import check
from ...families import Clip, Family
from ...families.models import Sizes, strides_of
from ...reporting import parse_size, times
from ...settings import Flag, Integer, Positive, PositiveInteger, Settings, settings

_ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 21 / 9)
"""Usual shares of width to height, from which ``sizes: auto`` makes buckets, upright and lying."""
_SAME_ASPECT = 0.06
"""Difference of logarithms up to which two aspect ratios are one."""


@settings()
class Clips(Settings):
    """Which clips every video gives, and which size.

    Clips begin at frames that ``extract`` names. At each of them there is one clip of every length that the video still
    has.
    """

    frames: PositiveInteger | Annotated[tuple[PositiveInteger, ...], Field(min_length=1)]
    """Length of a clip, or several; 1 for pictures, which are also the frames of videos then."""
    fps: Positive
    """Frames per second that a video is sampled at."""
    sizes: Sizes | Annotated[str, Field(pattern=r"^auto( \d+(x\d+)?)?$")]
    """(height, width) in pixels; a file gets the size nearest to its aspect ratio. "auto" are sizes of usual aspect
    ratios and about the area of the model's own size, or with "auto 240x416" of that."""
    extract: Literal["head", "uniform", "chunk", "all"] = "head"
    """Where clips begin: at the start of the video; at ``count`` frames spread evenly; one after another, each as long
    as the longest; or every ``stride`` frames."""
    count: Annotated[Integer, Field(ge=2)] | None = None
    """Clips of a length per video; for ``extract: uniform`` alone."""
    stride: PositiveInteger | None = None
    """Frames, at ``fps``, from one clip to the next; for ``extract: all`` alone."""
    upscale: Flag = False
    """Whether to enlarge files that are smaller than their size, rather than to leave them out."""

    def __post_init__(self) -> None:
        for name, extract in (("count", "uniform"), ("stride", "all")):
            value = getattr(self, name)
            check(
                (value is not None) == (self.extract == extract),
                f"extract={self.extract!r} and {name}={value}: {name} is for extract={extract!r}, which needs it.",
            )

    @classmethod
    def of(cls, clip: Clip) -> "Clips":
        """Return what a model's own clip is, cut from the start of a video."""
        return cls(clip.frames, clip.fps, clip.sizes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Frames of the clips, the shortest first."""
        return (self.frames,) if isinstance(self.frames, int) else tuple(sorted(set(self.frames)))

    def settings(self) -> dict[str, Any]:
        """Return the fields as the index of a cache has them."""
        return {**self.to_dict(), "frames": list(self.lengths)}

    def longest(self, usual: Clip) -> Clip:
        """Return a clip of most frames and the first size, for "auto" a model's usual one or that which is named."""
        sizes = self.sizes if isinstance(self.sizes, tuple) else (self._auto_size(usual),)
        return Clip(self.lengths[-1], self.fps, sizes[:1])

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """Return the size nearest in aspect ratio; ValueError for "auto", which needs a model."""
        if isinstance(self.sizes, str):
            raise ValueError(f"sizes={self.sizes!r} depend on the model; give the model too, or the sizes.")
        return min(self.sizes, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(height / width)))

    def starts(self, length: int, total: int) -> Collection[int]:
        """Return the frames at which clips of a length begin, of a video of some frames; head, chunk and all ignore it.

        Some may be too near to the end of the video for a whole clip.
        """
        if self.extract == "uniform":
            last, steps = total - length, (self.count or 2) - 1
            return {round(place * last / steps) for place in range(steps + 1)} if last >= 0 else ()
        step = {"head": sys.maxsize, "chunk": self.lengths[-1], "all": self.stride or 1}[self.extract]
        return range(0, sys.maxsize, step)

    def fitted(
        self,
        family: Family,
        transformer: Any,
        vae: Mapping[str, Any],
        begins_with_picture: bool,
        usual: Clip | None = None,
    ) -> "Clips":
        """Return the clips with sizes for a model, after checks; errors name the nearest frames and sizes.

        Args:
            family: the model's.
            transformer: its own, without weights if need be.
            vae: configuration of its autoencoder.
            begins_with_picture: whether its pipeline gives the first frame to the transformer.
            usual: the model's own clip, whose area "auto" has; None for the family's.

        Raises:
            ValueError: frames or sizes that the model cannot take.
        """
        temporal, spatial = strides_of(vae, of_videos=family.axes == 3)
        step = spatial * family.patch_of(transformer)[-1]
        sizes = self.sizes
        if isinstance(sizes, str):
            sizes = _auto_sizes(self._auto_size(usual or family.default_clip), step, family.squares_only)
        for size in sizes:
            nearest = [max(step, round(side / step) * step) for side in size]
            divides = all(side > 0 and side % step == 0 for side in size)
            check(divides, f"Size {times(size)} must be divisible by {step}; the nearest is {times(nearest)}.")
            check(
                not family.squares_only or size[0] == size[1],
                f"Size {times(size)} is not square, but {family.name} only makes squares; try {size[0]}x{size[0]}.",
            )
        for frames in self.lengths:
            if family.makes_videos:
                near = max(0, round((frames - 1) / temporal)) * temporal + 1
                fits = frames >= 1 and (frames - 1) % temporal == 0
                check(fits, f"frames={frames} must be 1 more than a multiple of {temporal}; try {near}.")
                check(
                    frames > 1 or not begins_with_picture,
                    "frames=1 is the picture alone, which image-to-video does not predict; ask for more frames.",
                )
            else:
                check(frames == 1, f"frames={frames} is for video models; this one makes images, so frames must be 1.")
        return replace(self, sizes=sizes)

    def _auto_size(self, usual: Clip) -> tuple[int, int]:
        """Return the size whose area "auto" keeps."""
        _, _, size = str(self.sizes).partition(" ")
        return parse_size(size) if size else usual.sizes[0]


def _auto_sizes(first: tuple[int, int], step: int, squares_only: bool) -> tuple[tuple[int, int], ...]:
    """Return sizes of about one area whose sides are multiples of a step, a given one and its transpose first.

    They do not depend on the data, so that a file keeps its size however many others are encoded later.
    """
    if squares_only:
        return (first,)
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
