"""Load the tiny pipelines that ship with the package."""

import functools
import inspect
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device
from .pipelines import tiny_pipeline

ASSET_FOLDER = Path(__file__).parent / "assets"


def pipeline_folder(name: str) -> Path:
    """Return the folder of tiny-<name>; ValueError if there is none."""
    return ASSET_FOLDER / f"tiny-{tiny_pipeline(name).name}"


def load_tiny(name: str, device: str | torch.device = "cpu") -> Any:
    """Load tiny-<name>, with the name of a family: a ``DiTPipeline``, ``SanaPipeline`` or ``WanPipeline`` in float32.

    Arguments that its call is not given are those of :func:`call_settings`:
    ``load_tiny("wan")("a seven moving left").frames[0]``, ``load_tiny("dit")([7]).images[0]``.
    """
    from diffusers import DiffusionPipeline

    folder, place = pipeline_folder(name), choose_device(str(device))
    pipe = DiffusionPipeline.from_pretrained(folder).to(place)
    pipe.set_progress_bar_config(disable=True)
    kind: Any = type(pipe)
    signature = inspect.signature(pipe.__call__)

    @functools.wraps(kind.__call__)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = signature.bind_partial(*arguments, **keywords).arguments
        return kind.__call__(self, **call_settings(name) | given)

    # a subclass with the name of its class, which save_pretrained writes
    pipe.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})
    return pipe


def call_settings(name: str) -> dict[str, Any]:
    """Return the call's arguments that tiny-<name> was trained for; ValueError if there is none.

    :func:`load_tiny` uses them by itself; a pipeline loaded from :func:`pipeline_folder` needs them:
    ``pipe("a seven moving left", **call_settings("wan")).frames[0]``.
    """
    return dict(tiny_pipeline(name).call_settings)
