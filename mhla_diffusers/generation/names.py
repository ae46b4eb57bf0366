"""Parse and check user input: prompt files, arguments of a pipeline's call, and the options that choose a pipeline."""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from ..errors import check_names
from ..files import check_unique, read_csv, read_json_lines, read_lines
from ..settings import Flag, Integer, Number, PositiveInteger, check_value, parse_yaml

_WRITABLE = {bool, int, float, str, list, dict}
"""Allowed types of settings: tensors, generators and functions cannot be recorded beside the results."""

_GIVEN = {"prompt", "class_labels", "generator", "output_type", "return_dict"}
_GIVEN |= {"num_images_per_prompt", "num_videos_per_prompt"}
"""Arguments that are set elsewhere, or that would change what a call returns."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the prompts of a file as :func:`read_prompt_table` does; one with pictures is a ValueError."""
    rows = read_prompt_table(path)
    picture = next((picture for _, picture in rows if picture is not None), None)
    if picture is not None:
        raise ValueError(f"{path} gives pictures, such as {picture}, but only its prompts are used here; remove them.")
    return tuple(prompt for prompt, _ in rows)


def read_prompt_table(path: Path) -> tuple[tuple[str, Path | None], ...]:
    """Read prompts and pictures: the columns ``text`` and ``image`` of a .csv or .jsonl; other files hold one a line.

    Paths of pictures are relative to the file's folder; the column may be absent.

    Raises:
        ValueError: a file without prompts, a row without one, or with a picture that is not a path.
    """
    reader = {".csv": read_csv, ".jsonl": read_json_lines}.get(path.suffix.lower())
    rows: list[tuple[str, Path | None]] = [] if reader else [(prompt, None) for prompt in read_lines(path)]
    for number, row in enumerate(reader(path) if reader else (), start=1):
        columns = row if isinstance(row, dict) else {}
        text, image = columns.get("text"), columns.get("image") or ""
        if not isinstance(text, str) or not text.strip():
            others = "" if "text" in columns or not columns else f", but {', '.join(map(str, columns))}"
            raise ValueError(f"Row {number} of {path} has no prompt in its column 'text'{others}.")
        if not isinstance(image, str):
            raise ValueError(f"Row {number} of {path}: image={image!r} must be the path of a picture.")
        rows.append((text.strip(), path.parent / image.strip() if image.strip() else None))
    if not rows:
        raise ValueError(f"Prompt file {path} holds no prompts; write one per line, or per row of .csv or .jsonl.")
    return tuple(rows)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments of the pipeline's call, each given once; values are YAML.

    Raises:
        ValueError: anything else.
    """
    settings = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ValueError(f"Setting {text!r} must look like key=value, for example num_frames=81.")
        settings[name] = parse_yaml(value, f"Setting {text!r}")
    check_unique([text.partition("=")[0] for text in texts], "The setting")
    return settings


def check_settings(pipeline: type, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that a pipeline's ``__call__`` lacks or annotates otherwise, or not finite ones."""
    parameters = inspect.signature(pipeline.__call__, eval_str=True).parameters
    annotated = {name: _types(one.annotation) & _WRITABLE for name, one in parameters.items() if name not in _GIVEN}
    allowed = {name: types for name, types in annotated.items() if types}
    check_names(settings, sorted(allowed), f"setting of a call of {pipeline.__name__}")
    for name, value in settings.items():
        types = allowed[name]
        # annotations of diffusers often omit None; integers of these pipelines are sizes and counts
        strict = {int: PositiveInteger if types == {int} else Integer, float: Number, bool: Flag}
        kind: Any = functools.reduce(operator.or_, (strict.get(one, one) for one in types))
        check_value(name, value, kind if types <= {int, float} else kind | None)


def _types(annotation: Any) -> set[type]:
    """Return the classes that an annotation allows, without those inside containers."""
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_types, get_args(annotation)))
    found = get_origin(annotation) or annotation
    return {found} if isinstance(found, type) else set()


def pipeline_options(
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder, or tiny-wan, tiny-sana, tiny-dit; default: the tiny one.")
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(help="Profile (faithful, balanced, fast), which needs no training; or a preset or YAML file."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Result of mhla finetune, or folder or Hub id of a patch.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: float32, bfloat16 (bf16), float16; default: bf16 on a GPU, else float32."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Argument of the pipeline's call; repeatable."),
    ] = None,
) -> dict[str, Any]:
    """Return the options as arguments of :class:`PipelineChoice`, with ``settings`` parsed."""
    from ..devices import choose_device

    if dtype is None:
        dtype = "float32" if choose_device(device).type == "cpu" else "bfloat16"
    named = {"model": model, "patch": patch, "weights": weights, "device": device, "dtype": dtype}
    return {**named, "settings": parse_settings(settings or ())}


def patch_options(
    density: Annotated[
        float | None, typer.Option(help="Share of block pairs that attend exactly; .1 if faithful.")
    ] = None,
    dense_first: Annotated[
        str | None, typer.Option(help="First steps with full attention: 3, or 0.2 or 20% of them.")
    ] = None,
    dense_last: Annotated[str | None, typer.Option(help="Last steps with full attention, likewise.")] = None,
    dense_every: Annotated[
        int | None, typer.Option(help="One dense step every this many steps, to correct the others; 0: never.")
    ] = None,
    dense_layers: Annotated[int | None, typer.Option(help="First layers with full attention.")] = None,
) -> dict[str, Any]:
    """Return settings that change those of a patch, as ``patch_settings``."""
    shares = {"dense_first": dense_first, "dense_last": dense_last}
    given: dict[str, Any] = {name: _parse_steps(text) for name, text in shares.items() if text is not None}
    given |= {"density": density, "dense_every": dense_every, "dense_layers": dense_layers}
    return {"patch_settings": {name: value for name, value in given.items() if value is not None}}


def _parse_steps(text: str) -> int | float | str:
    """Parse a number of steps such as 3, or a share such as 0.2 or 20%; other text the settings refuse."""
    try:
        if text.endswith("%"):
            return float(text.removesuffix("%")) / 100
        return int(text) if text.removeprefix("-").isdigit() else float(text)
    except ValueError:
        return text


def video_options(frames_per_second: Annotated[int | None, typer.Option(help="Of videos.")] = None) -> dict[str, Any]:
    """Return the options of commands that write samples as arguments of :class:`PipelineChoice`."""
    return {"frames_per_second": frames_per_second}


def expand_options(*groups: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the options of functions such as :func:`pipeline_options` as its dictionary ``options``.

    Each group is called with its own parameters, and the dictionaries are merged; where two groups have a parameter of
    the same name the later one's default counts.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        names = [list(inspect.signature(group).parameters) for group in groups]
        shared = {name: one for group in groups for name, one in inspect.signature(group).parameters.items()}

        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            options: dict[str, Any] = {}
            for group, parameters in zip(groups, names, strict=True):
                options |= group(**{name: given[name] for name in parameters})
            command(**{name: given[name] for name in own.parameters if name != "options"}, options=options)

        parameters = [one for name, one in own.parameters.items() if name != "options"] + list(shared.values())
        # keyword-only, because required options may follow those with a default
        keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        vars(expanded)["__signature__"] = own.replace(parameters=keywords)
        return expanded

    return decorate
