"""Parse user input: prompt files, pipeline arguments, and the options that choose a pipeline."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files import check_unique, read_csv, read_json_lines, read_lines
from ..reporting import parse_size
from ..settings import parse_assignment, parse_yaml


def read_prompts(path: Path) -> tuple[tuple[str, Path | None], ...]:
    """Read prompts and pictures: the columns ``text`` and ``image`` of a .csv or .jsonl; other files hold one a line.

    Paths of pictures are relative to the file's folder; the column may be absent. A row without a text is a ValueError.
    """
    reader = {".csv": read_csv, ".jsonl": read_json_lines}.get(path.suffix.lower())
    rows: list[tuple[str, Path | None]] = [] if reader else [(prompt, None) for prompt in read_lines(path)]
    for number, row in enumerate(reader(path) if reader else (), start=1):
        columns = row if isinstance(row, dict) else {}
        text, image = columns.get("text"), str(columns.get("image") or "").strip()
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"Row {number} of {path} has no prompt in a column 'text'; its columns are: {', '.join(columns)}."
            )
        rows.append((text.strip(), path.parent / image if image else None))
    if not rows:
        raise ValueError(f"Prompt file {path} holds no prompts; write one per line, or per row of .csv or .jsonl.")
    return tuple(rows)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments, such as those of the pipeline's call, each given once; values are YAML."""
    settings = dict(map(parse_assignment, texts))
    check_unique([text.partition("=")[0] for text in texts], "The setting")
    return settings


def pipeline_options(
    model: Annotated[
        str, typer.Option(help="Hub id, folder, or tiny-wan, tiny-sana, tiny-dit; default: the family's tiny one.")
    ] = "",
    patch: Annotated[
        str | None,
        typer.Option(help="Profile (faithful, balanced, fast), preset, YAML file, or saved patch (folder or Hub id)."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: bfloat16 on a GPU, else float32."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Argument of the pipeline's call, such as num_frames=81; repeatable."
        ),
    ] = None,
) -> dict[str, Any]:
    """Return the options as arguments of :class:`PipelineChoice`, with ``settings`` parsed."""
    from ..devices import device_and_type

    kind = str(device_and_type(device, dtype)[1]).removeprefix("torch.")
    named = {"model": model, "patch": patch, "device": device, "dtype": kind}
    return {**named, "settings": parse_settings(settings or ())}


def call_options(
    size: Annotated[str | None, typer.Option(help="480x832, or 512 for a square.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
) -> dict[str, Any]:
    """Return arguments of a pipeline's call, as ``settings``."""
    height, width = (None, None) if size is None else parse_size(size)
    given = {"num_inference_steps": steps, "guidance_scale": guidance, "height": height, "width": width}
    return {"settings": {name: x for name, x in (given | {"num_frames": frames}).items() if x is not None}}


def patch_options(
    density: Annotated[
        float | None, typer.Option(help="Share of block pairs with exact softmax; faithful has .1.")
    ] = None,
    dense_first: Annotated[str | None, typer.Option(help="Dense steps at the start: 3, or 0.2 for a share.")] = None,
    dense_last: Annotated[str | None, typer.Option(help="Dense steps at the end, likewise.")] = None,
    dense_every: Annotated[int | None, typer.Option(help="One dense step every this many steps; 0: never.")] = None,
    dense_layers: Annotated[int | None, typer.Option(help="Number of first layers that stay dense.")] = None,
) -> dict[str, Any]:
    """Return settings that change those of a patch, as ``patch_settings``."""
    shares = {"dense_first": dense_first, "dense_last": dense_last}
    given: dict[str, Any] = {name: parse_yaml(x, f"--{name}") for name, x in shares.items() if x is not None}
    given |= {"density": density, "dense_every": dense_every, "dense_layers": dense_layers}
    return {"patch_settings": {name: value for name, value in given.items() if value is not None}}


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
