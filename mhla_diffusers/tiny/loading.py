"""Load the tiny pipelines that ship with the package."""

from typing import Any

import torch

from ..devices import choose_device
from .checksums import check_asset, pipeline_folder
from .pipelines import tiny_pipeline


def load_tiny(family: str, device: str | torch.device = "cpu") -> Any:
    """The tiny pipeline of a family: a ``DiTPipeline``, ``SanaPipeline`` or ``WanPipeline`` in float32.

    Args:
        family: dit, sana or wan.
        device: where it runs; "auto" for a GPU if there is one.

    Raises:
        ValueError: unknown family, or no such device here.
        DamagedAssetError: files are missing or damaged.
    """
    from diffusers import DiffusionPipeline

    tiny_pipeline(family)
    place = choose_device(str(device))
    folder = pipeline_folder(family)
    check_asset(folder)
    pipe = DiffusionPipeline.from_pretrained(folder).to(place)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_settings(family: str) -> dict[str, Any]:
    """Arguments of the pipeline's call that the tiny pipeline of a family was trained for.

    For example ``load_tiny("wan")("a seven moving left", **call_settings("wan")).frames[0]``.

    Raises:
        ValueError: unknown family.
    """
    return dict(tiny_pipeline(family).call_settings)
