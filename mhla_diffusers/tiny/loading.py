"""Load the tiny pipelines that ship with the package."""

from typing import Any

from ..devices import choose_device
from .building import check_family
from .checksums import check_asset, pipeline_folder
from .digits import FRAMES, PICTURE_SIZE
from .text import MAX_TOKENS


def load_tiny(family: str, device: str = "cpu") -> Any:
    """The tiny pipeline of a family: a ``DiTPipeline``, ``SanaPipeline`` or ``WanPipeline`` in float32.

    Args:
        family: dit, sana or wan.
        device: where it runs; "auto" for a GPU if there is one.

    Raises:
        ValueError: unknown family, or no such device here.
        DamagedAssetError: files are missing or damaged.
    """
    from diffusers import DiffusionPipeline

    check_family(family)
    place = choose_device(device)
    folder = pipeline_folder(family)
    check_asset(folder)
    pipe = DiffusionPipeline.from_pretrained(folder).to(place)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_settings(family: str) -> dict[str, Any]:
    """Arguments of the pipeline's call that the tiny pipeline of a family was trained for.

    For example ``load_tiny("wan")("a seven moving left", **call_settings("wan")).frames[0]``.
    """
    check_family(family)
    if family == "dit":
        return {"num_inference_steps": 30, "guidance_scale": 4.0}
    size = {"height": PICTURE_SIZE, "width": PICTURE_SIZE, "max_sequence_length": MAX_TOKENS}
    if family == "wan":
        # WanPipeline rounds the number of frames to a multiple of the temporal stride and adds one
        return {**size, "num_frames": FRAMES - 1, "num_inference_steps": 20, "guidance_scale": 3.0}
    return {
        **size,
        "num_inference_steps": 20,
        "guidance_scale": 3.0,
        "use_resolution_binning": False,
        "complex_human_instruction": None,
    }
