"""Load the tiny pipelines that ship with the package."""

import functools
import inspect
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device
from .digits import parse_caption
from .pipelines import TinyPipeline, tiny_pipeline

ASSET_FOLDER = Path(__file__).parent / "assets"


def pipeline_folder(name: str) -> Path:
    """Return where tiny-<name> lies; ValueError if there is none."""
    return ASSET_FOLDER / f"tiny-{tiny_pipeline(name).name}"


def load_tiny(name: str, device: str | torch.device = "cpu") -> Any:
    """Load tiny-<name>, with the name of a family: a ``DiTPipeline``, ``SanaPipeline`` or ``WanPipeline`` in float32.

    Arguments that its call is not given are those of :func:`call_settings`, and that of DiT takes a text:
    ``load_tiny("wan")("a seven moving left").frames[0]``, ``load_tiny("dit")("a seven").images[0]``.
    """
    from diffusers import DiffusionPipeline

    folder, place = pipeline_folder(name), choose_device(str(device))
    pipe = DiffusionPipeline.from_pretrained(folder).to(place)
    pipe.set_progress_bar_config(disable=True)
    _use_call_settings(pipe, tiny_pipeline(name))
    return pipe


def _use_call_settings(pipe: Any, tiny: TinyPipeline) -> None:
    """Switch a pipeline to a subclass of its class, with its name, whose call has the tiny pipeline's defaults."""
    kind: Any = type(pipe)
    signature = inspect.signature(pipe.__call__)

    @functools.wraps(kind.__call__)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        given = signature.bind_partial(*arguments, **keywords).arguments
        if tiny.prompts_are_classes and isinstance(text := given.get("class_labels"), str):
            given["class_labels"] = [parse_caption(text).labels[0]]
        return kind.__call__(self, **tiny.call_settings | given)

    pipe.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": call})


def call_settings(name: str) -> dict[str, Any]:
    """Return the call's arguments that tiny-<name> was trained for; ValueError if there is none.

    :func:`load_tiny` uses them by itself; a pipeline loaded from :func:`pipeline_folder` needs them:
    ``pipe("a seven moving left", **call_settings("wan")).frames[0]``.
    """
    return dict(tiny_pipeline(name).call_settings)
