"""``mhla bench``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..generation.names import REFRESH, SOFTMAX_STEPS, parse_dense_steps

if TYPE_CHECKING:
    import torch

bench = typer.Typer(help="Measure time and memory, side by side in one run.", no_args_is_help=True)

_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
_DType = Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU, unless you choose.")]
_Output = Annotated[Path, typer.Option(help="Gets a folder for the device, with CSV and Markdown.")]
_Seconds = Annotated[float, typer.Option(help="Spent on each variant, as far as 3 to 30 repetitions allow.")]
_Compile = Annotated[
    bool | None, typer.Option(help="Time torch.compile too; on a GPU unless you decline, on a CPU only if you ask.")
]
_Frames = Annotated[list[int] | None, typer.Option(help="Of videos; several times.")]
_FOLDER = Path("outputs/benchmark")


@bench.callback()
def main() -> None:
    """Measure time and memory, side by side in one run."""


@bench.command("op")
def bench_operation(
    shape: Annotated[list[str] | None, typer.Option(help="tiny, wan2.1-1.3b-480p, …; several times.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="Tokens per axis in place of a shape, 64x64 or 21x30x50; several times.")
    ] = None,
    blocks: Annotated[
        list[str] | None, typer.Option(help="MHLA blocks per axis of a grid, 4x4; several times.")
    ] = None,
    heads: Annotated[int, typer.Option(help="H of a grid.")] = 12,
    head_dim: Annotated[int, typer.Option(help="D of a grid.")] = 128,
    stage: Annotated[list[str] | None, typer.Option(help="forward or forward+backward; both if left out.")] = None,
    device: _Device = "auto",
    dtype: _DType = None,
    compile: _Compile = None,
    seconds: _Seconds = 1.0,
    output: _Output = _FOLDER,
) -> None:
    """One attention: MHLA and plain linear attention against softmax. Checks that MHLA is correct before timing it."""
    from .measure import Budget, Results
    from .operation import STAGES, benchmark_operation
    from .shapes import choose_shapes, shape_on

    place, precision = _place(device, dtype)
    if grid and not blocks:
        raise ValueError(f"--grid {grid[0]} needs --blocks, such as {'x'.join(['4'] * len(grid[0].split('x')))}.")
    if shape and grid:
        raise ValueError(f"--shape {shape[0]} and --grid {grid[0]} are two ways to say what to measure; give one.")
    shapes = [
        shape_on(_counts(one, "grid"), _counts(other, "blocks"), heads, head_dim)
        for one in grid or ()
        for other in blocks or ()
    ]
    results = Results("op", place, precision, output, Budget(seconds))
    for one in shapes or choose_shapes(shape, place.type):
        compiled = place.type != "cpu" if compile is None else compile
        benchmark_operation(one, results, stage or STAGES, compile=compiled)
    results.finish()


@bench.command("transformer")
def bench_transformer(
    model: Annotated[
        list[str] | None, typer.Option(help="wan2.1-1.3b, sana-0.6b, deit-s-16, vlt-t, …; several times.")
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="480x832, or 512 for a square; several times.")] = None,
    frames: _Frames = None,
    layers: Annotated[int | None, typer.Option(help="Build only so many; times of all are extrapolated.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per forward.")] = 1,
    train: Annotated[bool, typer.Option(help="Time a training step of all weights in place of a forward.")] = False,
    checkpointing: Annotated[
        bool, typer.Option(help="In a training step compute activations again in the backward pass.")
    ] = False,
    device: _Device = "auto",
    dtype: _DType = None,
    compile: _Compile = None,
    seconds: _Seconds = 1.0,
    output: _Output = _FOLDER,
) -> None:
    """Whole transformers with random weights: softmax through each backend against linear attentions."""
    from .measure import Budget, Results
    from .models import choose_sizes, find_models
    from .transformer import CLASSIFIERS, Case, ClassifierCase, benchmark_transformer

    place, precision = _place(device, dtype)
    cases = [
        (ClassifierCase if one.name in CLASSIFIERS else Case)(one, chosen, layers, place, precision)
        for one in find_models(model or ["dit-s-2" if place.type == "cpu" else "wan2.1-1.3b"], CLASSIFIERS)
        for chosen in choose_sizes(one, size, frames, place.type, batch)
    ]
    compiled = place.type != "cpu" and not train if compile is None else compile
    results = Results("train" if train else "transformer", place, precision, output, Budget(seconds))
    for case in cases:
        benchmark_transformer(case, results, train=train, checkpointing=checkpointing, compile=compiled)
    results.finish()


@bench.command("pipeline")
def bench_pipeline(
    model: Annotated[str, typer.Option(help="tiny-dit, tiny-sana, tiny-wan, or Hub id or folder.")] = "tiny-dit",
    patch: Annotated[
        list[str] | None,
        typer.Option(
            help="As rows name them, a preset, a YAML file, or a saved patch; several. All kinds if left out."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the sampler.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Scale of classifier-free guidance.")] = None,
    size: Annotated[str | None, typer.Option(help="480x832, or 512 for a square; if the call takes one.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.")] = None,
    softmax_steps: Annotated[str | None, typer.Option(help=SOFTMAX_STEPS)] = None,
    refresh: Annotated[str | None, typer.Option(help=REFRESH)] = None,
    repetitions: Annotated[int, typer.Option(help="Calls of each, after one to warm up.")] = 3,
    device: _Device = "auto",
    dtype: _DType = None,
    output: _Output = _FOLDER,
) -> None:
    """A whole call of a pipeline and its parts, unpatched and with patches, with PSNR and SSIM of the samples."""
    from ..devices import FLOAT_TYPES
    from .measure import Results
    from .models import parse_size
    from .pipeline import benchmark_pipeline, choose_pipeline

    place, precision = _place(device, dtype)
    height, width = (None, None) if size is None else parse_size(size)
    asked = {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": height,
        "width": width,
        "num_frames": frames,
    }
    settings = {name: value for name, value in asked.items() if value is not None}
    name = next(name for name, one in FLOAT_TYPES.items() if one == precision)
    choice = choose_pipeline(model, device=str(place), dtype=name, settings=settings)
    results = Results("pipeline", place, precision, output)
    dense_steps = parse_dense_steps(softmax_steps, refresh)
    benchmark_pipeline(choice, patch or (), results, dense_steps=dense_steps, repetitions=repetitions)
    results.finish()


@bench.command("parallel")
def bench_parallel(
    model: Annotated[list[str] | None, typer.Option(help="wan2.1-1.3b, wan2.1-14b, …; several times.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="480x832, or 512 for a square; several times.")] = None,
    frames: _Frames = None,
    ring: Annotated[
        list[int] | None,
        typer.Option(help="Processes of a ring, several times; the others exchange heads. All and 1 if left out."),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Calls of each, after those to warm up.")] = 10,
    dtype: _DType = None,
    output: _Output = _FOLDER,
) -> None:
    """Bytes and time of one attention over processes: torchrun --no-python --nproc_per_node 8 mhla bench parallel."""
    import torch
    import torch.distributed as dist

    from .measure import Results
    from .models import choose_sizes, find_models, token_grid
    from .parallel import benchmark_parallel
    from .shapes import shape_of

    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "LOCAL_RANK is not set; start it as torchrun --no-python --nproc_per_node 8 mhla bench parallel."
        )
    has_gpus = torch.cuda.is_available()
    place, precision = _place(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu", dtype)
    if has_gpus:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    try:
        results = Results("parallel", place, precision, output) if dist.get_rank() == 0 else None
        for one in find_models(model or ["wan2.1-1.3b"]):
            for chosen in choose_sizes(one, size, frames, "cpu"):
                shape = shape_of(one, token_grid(one, chosen), f"{one.name} {chosen}")
                rings = ring or [dist.get_world_size(), 1]
                benchmark_parallel(shape, place, precision, rings, repetitions, results)
        if results is not None:
            results.finish()
    finally:
        dist.destroy_process_group()


@bench.command("ceilings")
def bench_ceilings(
    model: Annotated[list[str] | None, typer.Option(help="Several times; all real ones if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Gets ceilings.md and ceilings.csv.")] = Path("outputs/models"),
) -> None:
    """Counted, not timed: what every model spends on attention by resolution, and the most that a patch can bring."""
    from ..reporting import write_table
    from .counts import CEILINGS, ceilings
    from .models import find_models, models

    chosen = find_models(model) if model else [one for one in models().values() if not one.is_tiny]
    typer.echo(write_table(CEILINGS, ceilings(chosen), output, "ceilings"))


@bench.command("plot")
def bench_plot(
    files: Annotated[list[Path], typer.Argument(help="CSV files of the other commands.")],
    output: Annotated[Path, typer.Option(help="The picture; its suffix says its kind.")] = _FOLDER / "times.png",
) -> None:
    """Draw milliseconds of every variant, a panel for every case."""
    from .measure import draw, read_rows

    output.parent.mkdir(parents=True, exist_ok=True)
    draw([row for file in files for row in read_rows(file)], output)
    typer.echo(f"Wrote {output}")


def _counts(text: str, name: str) -> tuple[int, ...]:
    """Parse numbers such as 21x30x50; ValueError for anything else."""
    parts = text.split("x")
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"{name}={text!r} is no list of counts; write for example 21x30x50.")
    return tuple(map(int, parts))


def _place(device: str, dtype: str | None) -> "tuple[torch.device, torch.dtype]":
    """Return device and type by their names; ValueError for unknown ones."""
    from ..devices import FLOAT_TYPES, choose_device, dtype_name

    place = choose_device(device)
    return place, FLOAT_TYPES[dtype_name(dtype or ("float32" if place.type == "cpu" else "bfloat16"))]
