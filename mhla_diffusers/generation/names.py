"""Parse user input: prompt files, pipeline arguments, and the options that choose a pipeline."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import check
from ..files import read_csv, read_json_lines, read_lines
from ..settings import parse_assignment


def read_prompts(path: Path) -> tuple[tuple[str, Path | None], ...]:
    """Read prompts and pictures: the columns ``text`` and ``image`` of a .csv or .jsonl; other files hold one a line.

    Paths of pictures are relative to the file's folder; the column may be absent. A row without a text is a ValueError.
    """
    reader = {".csv": read_csv, ".jsonl": read_json_lines}.get(path.suffix.lower())
    prompts: list[tuple[str, Path | None]] = []
    for number, row in enumerate(reader(path) if reader else [{"text": line} for line in read_lines(path)], start=1):
        columns = row if isinstance(row, dict) else {}
        text, image = columns.get("text"), str(columns.get("image") or "").strip()
        text = text.strip() if isinstance(text, str) else ""
        check(bool(text), f"Row {number} of {path} has no prompt, a text in a column 'text', but {str(row):.80}.")
        prompts.append((text, path.parent / image if image else None))
    check(bool(prompts), f"{path} holds no prompts; write one per line, or per row of .csv or .jsonl.")
    return tuple(prompts)


def pipeline_options(
    model: Annotated[
        str, typer.Option(help="Hub id, folder, or tiny-wan, tiny-sana, tiny-dit; default: the family's tiny one.")
    ] = "",
    patch: Annotated[
        str | None,
        typer.Option(help="Profile (faithful, balanced, fast), preset, YAML file, or saved patch (folder or Hub id)."),
    ] = None,
) -> dict[str, Any]:
    """Return the options as arguments of :class:`PipelineChoice`, as all groups below."""
    return {"model": model, "patch": patch}


def device_options(
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: bfloat16 on a GPU, else float32."),
    ] = None,
) -> dict[str, Any]:
    """Return names of device and type, for :func:`device_and_type`."""
    return {"device": device, "dtype": dtype}


def call_options(
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Argument of the pipeline's call, such as num_frames=81; repeatable."
        ),
    ] = None,
) -> dict[str, Any]:
    """Return arguments of a pipeline's call, as ``settings``."""
    return {"settings": dict(map(parse_assignment, settings or ()))}


def patch_options(
    change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Setting of the patch (without --patch, the family's), such as density=0.05; repeatable.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Return settings that change those of a patch, as ``patch_settings``."""
    return {"patch_settings": dict(map(parse_assignment, change or ()))}


CHOICE = (pipeline_options, device_options, call_options, patch_options)
"""Groups that choose a pipeline, its patch and its call."""


def expand_options(*groups: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the options of functions such as :func:`pipeline_options` as its dictionary ``options``.

    Each group is called with its own parameters, and the dictionaries are merged.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        shared = {group: inspect.signature(group).parameters for group in groups}

        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            options: dict[str, Any] = {}
            for group, parameters in shared.items():
                options |= group(**{name: given.pop(name) for name in parameters})
            command(**given, options=options)

        every = (one for parameters in (own.parameters, *shared.values()) for one in parameters.values())
        # keyword-only, because required options may follow those with a default
        keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in every if one.name != "options"]
        vars(expanded)["__signature__"] = own.replace(parameters=keywords)
        return expanded

    return decorate
