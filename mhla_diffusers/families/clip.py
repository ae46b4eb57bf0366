"""What a model is asked for, or what is cut out of a file: frames, rate and size."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Clip:
    """Frames and size of a video, or of an image, which has one frame."""

    frames: int
    """1 for images."""
    fps: float
    """Frames per second that a video is sampled at."""
    sizes: tuple[tuple[int, int], ...]
    """(height, width) in pixels; a file gets the one that is nearest to its aspect ratio."""

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """The size nearest in aspect ratio."""
        return min(self.sizes, key=lambda size: abs(math.log(size[0] / size[1]) - math.log(height / width)))
