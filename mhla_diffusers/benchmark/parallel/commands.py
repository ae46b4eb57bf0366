"""``mhla bench parallel`` and ``mhla bench plan``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...families import Model

_FOLDER = Path("outputs/parallel")
_FRAMES = (25, 53, 81, 165, 333, 669, 1341, 2685)
"""At 480x832 7 to 672 frames of Wan's token grid, 10 920 to 1 048 320 tokens; with fewer there are fewer blocks."""
_PLANNED_FRAMES, _GPUS = (81, 401, 4001), (1, 2, 4, 8, 16, 32, 64)
_MODELS = ("wan2.1-1.3b", "wan2.1-14b")


def bench_parallel(
    model: Annotated[
        list[str] | None, typer.Option(help="wan2.1-1.3b, wan2.1-14b, …; several times; those two if left out.")
    ] = None,
    size: Annotated[str, typer.Option(help="480x832, or 512 for a square.")] = "480x832",
    frames: Annotated[list[int] | None, typer.Option(help="Of videos; several times.")] = None,
    processes: Annotated[list[int] | None, typer.Option(help="Several times; 2, 4 and 8 if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Gets tables as Markdown and CSV.")] = _FOLDER,
) -> None:
    """Counted: bytes that one process sends for one self-attention, MHLA beside diffusers' softmax."""
    from ..models import choose_sizes
    from .counting import count, crossings, shape_of, write_crossings, write_sent

    models = _that_can_be_split(model or _MODELS)
    many = processes or [2, 4, 8]
    if min(many) < 2:
        raise ValueError(f"--processes {min(many)} share nothing out; give 2 or more.")
    cases = {one.name: choose_sizes(one, [size], frames or _FRAMES, "cpu") for one in models}
    asked = [(one, number, chosen) for one in models for number in many for chosen in cases[one.name]]
    found = []
    for done, (one, number, chosen) in enumerate(asked, 1):
        typer.echo(f"counting {done} of {len(asked)}: {one.name} at {chosen}, {number} processes", err=True)
        found.append(count(one, shape_of(one, chosen), number))
    typer.echo(write_sent(found, output))
    crossed = []
    for one in models:
        for number in many if one.is_video else ():
            typer.echo(f"looking for where {one.name} sends less, {number} processes", err=True)
            crossed += crossings(one, cases[one.name][0], number)
    typer.echo(write_crossings(crossed, output))


def bench_plan(
    model: Annotated[
        list[str] | None, typer.Option(help="wan2.1-1.3b, wan2.1-14b, …; several times; those two if left out.")
    ] = None,
    size: Annotated[str, typer.Option(help="480x832, or 512 for a square.")] = "480x832",
    frames: Annotated[list[int] | None, typer.Option(help="Several times; 81, 401 and 4001 if left out.")] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="Several times; 1 to 64 if left out.")] = None,
    patch: Annotated[str | None, typer.Option(help="Name or file of a patch; MHLA in all layers if left out.")] = None,
    tflops: Annotated[float, typer.Option(help="Of a GPU; H100 SXM, dense bfloat16, data sheet.")] = 989.0,
    utilisation: Annotated[float, typer.Option(help="Part of --tflops that is reached; an assumption.")] = 0.4,
    nvlink: Annotated[float, typer.Option(help="GB/s that a GPU sends within a machine; H100, data sheet.")] = 450.0,
    infiniband: Annotated[float, typer.Option(help="GB/s that a GPU sends to other machines; NDR, 400 Gbit/s.")] = 50.0,
    gpus_per_machine: Annotated[int, typer.Option(help="Joined by NVLink.")] = 8,
    output: Annotated[Path, typer.Option(help="Gets plan.md and plan.csv.")] = _FOLDER,
) -> None:
    """Arithmetic, no measurement: counted FLOPs and bytes over stated rates, of one forward on many GPUs."""
    from ...config import load_patch
    from ..models import choose_sizes
    from .plan import Machines, plan, write_plan

    machines = Machines(tflops, utilisation, nvlink, infiniband, gpus_per_machine)
    models = _that_can_be_split(model or _MODELS)
    config = None if patch is None else load_patch(patch).config
    found = [
        planned
        for one in models
        for planned in plan(
            [one], choose_sizes(one, [size], frames or _PLANNED_FRAMES, "cpu"), gpus or _GPUS, machines, config
        )
    ]
    typer.echo(f"{machines}\n")
    typer.echo(write_plan(found, output))


def _that_can_be_split(names: Sequence[str]) -> "list[Model]":
    """Models by name.

    Raises:
        ValueError: unknown names, or models of which diffusers does not tell how their tokens are split.
    """
    from ...families import classes_that_are_split
    from ..models import find_models

    models, allowed = find_models(names, "cpu"), classes_that_are_split()
    refused = [one.name for one in models if one.transformer not in allowed]
    if refused:
        raise ValueError(
            f"diffusers does not tell how the tokens of {', '.join(refused)} are split over processes (_cp_plan); it "
            f"does for models of {', '.join(allowed)}."
        )
    return models
