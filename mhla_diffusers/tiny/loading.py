"""Load the tiny pipelines that ship with the package."""

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ..devices import choose_device
from .digits import parse_caption
from .pipelines import TinyPipeline, tiny_pipeline

ASSET_FOLDER = Path(__file__).parent / "assets"


def pipeline_folder(family: str) -> Path:
    """Return where the pipeline of a family lies; ValueError for a family without one."""
    tiny_pipeline(family)
    return ASSET_FOLDER / f"tiny-{family}"


def control_file(family: str) -> Path:
    """Return the file of a family's control: the weights that differ from the pipeline's, in float16."""
    return ASSET_FOLDER / f"tiny-{family}-control.safetensors"


def load_tiny(family: str, device: str | torch.device = "cpu", *, control: bool = False) -> Any:
    """Load the tiny pipeline of a family: a ``DiTPipeline``, ``SanaPipeline`` or ``WanPipeline`` in float32.

    Arguments that its call is not given are those of :func:`call_settings`, and that of DiT takes a text:
    ``load_tiny("wan")("a seven moving left").frames[0]``, ``load_tiny("dit")("a seven").images[0]``. With ``control``
    the transformer, its own attention kept, was trained on for as long as the patches that ship were adapted.
    """
    from diffusers import DiffusionPipeline

    folder, place = pipeline_folder(family), choose_device(str(device))
    pipe = DiffusionPipeline.from_pretrained(folder)
    if control:
        load_control(pipe.transformer, control_file(family))
    pipe = pipe.to(place)
    pipe.set_progress_bar_config(disable=True)
    _use_call_settings(pipe, tiny_pipeline(family))
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


def load_control(transformer: nn.Module, file: Path) -> None:
    """Load the weights of a control, which are those that differ, into the transformer of a tiny pipeline."""
    transformer.load_state_dict({**transformer.state_dict(), **load_file(file)})


def call_settings(family: str) -> dict[str, Any]:
    """Return the call's arguments that the tiny pipeline of a family was trained for; ValueError if there is none.

    :func:`load_tiny` uses them by itself; a pipeline loaded from :func:`pipeline_folder` needs them:
    ``pipe("a seven moving left", **call_settings("wan")).frames[0]``.
    """
    return dict(tiny_pipeline(family).call_settings)
