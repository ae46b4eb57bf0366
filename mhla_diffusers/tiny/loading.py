"""Load the tiny pipelines that ship with the package, after checking their files."""

import functools
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ..devices import choose_device
from .digits import parse_caption
from .pipelines import TinyPipeline, tiny_pipeline

ASSET_FOLDER = Path(__file__).parent / "assets"
CHECKSUM_FILE = ASSET_FOLDER / "checksums.json"


class DamagedAssetError(OSError):
    """A file of a tiny pipeline is missing or is not the one that was shipped."""


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
    DamagedAssetError if files are missing or damaged.
    """
    from diffusers import DiffusionPipeline

    folder, place = pipeline_folder(family), choose_device(str(device))
    check_asset(folder)
    pipe = DiffusionPipeline.from_pretrained(folder)
    if control:
        check_asset(control_file(family))
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
    """Load the weights of a control, which are those that differ; DamagedAssetError for another transformer's."""
    unknown = transformer.load_state_dict(load_file(file), strict=False).unexpected_keys
    if unknown:
        raise _damaged([f"{file.name} (has {unknown[0]}, which {type(transformer).__name__} has not)"])


def call_settings(family: str) -> dict[str, Any]:
    """Return the call's arguments that the tiny pipeline of a family was trained for; ValueError if there is none.

    :func:`load_tiny` uses them by itself; a pipeline loaded from :func:`pipeline_folder` needs them:
    ``pipe("a seven moving left", **call_settings("wan")).frames[0]``.
    """
    return dict(tiny_pipeline(family).call_settings)


def check_asset(path: Path) -> None:
    """Compare a file, or every file of a folder, with its recorded checksum; DamagedAssetError names what differs."""
    try:
        recorded: dict[str, str] = json.loads(CHECKSUM_FILE.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise _damaged([CHECKSUM_FILE.name]) from error
    name = path.relative_to(ASSET_FOLDER).as_posix()
    expected = {file: value for file, value in recorded.items() if file == name or file.startswith(f"{name}/")}
    if not expected:
        raise _damaged([f"{name} (not in {CHECKSUM_FILE.name})"])
    missing = [file for file in expected if not (ASSET_FOLDER / file).is_file()]
    damaged = [file for file in expected if file not in missing and _checksum(ASSET_FOLDER / file) != expected[file]]
    if missing or damaged:
        raise _damaged([*(f"{file} (missing)" for file in missing), *(f"{file} (damaged)" for file in damaged)])


def record_checksums() -> None:
    """Write the checksums of all files in the asset folder."""
    files = sorted(path for path in ASSET_FOLDER.rglob("*") if path.is_file() and path != CHECKSUM_FILE)
    checksums = {file.relative_to(ASSET_FOLDER).as_posix(): _checksum(file) for file in files}
    CHECKSUM_FILE.write_text(json.dumps(checksums, indent=1) + "\n", encoding="utf-8")


def _checksum(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".json":
        content = content.replace(b"\r\n", b"\n")  # as git writes it on Windows
    return hashlib.sha256(content).hexdigest()


def _damaged(files: list[str]) -> DamagedAssetError:
    return DamagedAssetError(
        f"Files of the tiny pipelines in {ASSET_FOLDER} are missing or damaged: {', '.join(files)}. Restore them with "
        "`git checkout -- mhla_diffusers/tiny/assets` in a clone, or "
        "`pip install --force-reinstall --no-deps mhla_diffusers`."
    )
