"""Options of the commands that generate, written once for all of them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .names import parse_settings


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Which pipeline, patched how, called with what: :class:`PipelineChoice` as it is written on the command line."""

    model: Annotated[str | None, typer.Option(help="Hub id or folder; the tiny pipeline if left out.")] = None
    patch: Annotated[str | None, typer.Option(help="Name or YAML file of a patch, as it is before training.")] = None
    weights: Annotated[str | None, typer.Option(help="What mhla finetune left, or folder or Hub id of a patch.")] = None
    frames_per_second: Annotated[int | None, typer.Option(help="Of videos.")] = None
    device: Annotated[str, typer.Option(help="cpu, cuda, …, auto")] = "cpu"
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32"
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Argument of the pipeline's call; several times."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The options as arguments of :class:`PipelineChoice`.

        Raises:
            ValueError: a setting that is not ``KEY=VALUE``.
        """
        return {**vars(self), "settings": parse_settings(self.settings or [])}


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take a dataclass as its parameter ``options``, each of whose fields is an option of the command.

    typer knows functions alone; the fields of the dataclass are annotated as the parameters of a command are.
    """
    own = inspect.signature(command)
    kind = own.parameters["options"].annotation
    shared = inspect.signature(kind).parameters

    def flat(**given: Any) -> None:
        options = kind(**{name: given.pop(name) for name in shared})
        command(**given, options=options)

    parameters = [*(own.parameters[name] for name in own.parameters if name != "options"), *shared.values()]
    expanded: Any = functools.wraps(command)(flat)
    expanded.__signature__ = own.replace(
        # a keyword each, since required ones may follow those with a default
        parameters=[parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    result: Callable[..., None] = expanded
    return result
