"""The tiny pipelines and how they are called; ``tools/make_tiny.py`` makes them.

Pictures are 64 pixels high and wide; autoencoders make 4 channels of latents at a quarter of the resolution, frame by
frame. The transformers of DiT and SANA see 64 tokens of an image, that of Wan 9x8x8 = 576 of a clip.
"""

from dataclasses import dataclass
from typing import Any

FRAMES_PER_SECOND = 6
"""At which clips are meant to be played."""
_SIZE = 64
_TEXT_CALL = {
    "num_inference_steps": 20,
    "guidance_scale": 3.0,
    "height": _SIZE,
    "width": _SIZE,
    "max_sequence_length": 10,  # the longest caption has eight tokens
}


@dataclass(frozen=True)
class TinyPipeline:
    """One tiny pipeline of real diffusers classes."""

    name: str
    """The pipeline is tiny-<name>; that of its family has the family's name."""
    family: str
    call_settings: dict[str, Any]
    """Arguments of the pipeline's call that it was trained for."""
    picture_size: int = _SIZE
    """Height and width in pixels of a picture."""
    frames: int = 1
    """Frames of a sample; the tiny video autoencoder makes a latent frame of each."""

    @property
    def is_video(self) -> bool:
        """Whether samples are clips."""
        return self.frames > 1


TINY: dict[str, TinyPipeline] = {
    "dit": TinyPipeline("dit", "dit", {"num_inference_steps": 30, "guidance_scale": 4.0}),
    "sana": TinyPipeline(
        "sana", "sana", {**_TEXT_CALL, "use_resolution_binning": False, "complex_human_instruction": None}
    ),
    # WanPipeline rounds the number of frames to a multiple of the temporal stride and adds one
    "wan": TinyPipeline("wan", "wan", {**_TEXT_CALL, "num_frames": 8}, frames=9),
}
"""Name → tiny pipeline."""


def tiny_pipeline(name: str) -> TinyPipeline:
    """Return the description of the tiny pipeline of a name, such as that of a family; ValueError without one."""
    if name not in TINY:
        raise ValueError(f"family={name!r} has no tiny pipeline; give model, or one of: {', '.join(TINY)}.")
    return TINY[name]
