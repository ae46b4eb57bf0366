"""``mhla bench``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .parallel.commands import bench_parallel, bench_plan

if TYPE_CHECKING:
    import torch

    from .cases import Case

bench = typer.Typer(help="Measure speed, side by side in one run.", no_args_is_help=True)

_DEVICE = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
_DTYPE = Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU, unless you choose.")]
_OUTPUT = Annotated[Path, typer.Option(help="Gets a folder for the device, with CSV and JSON.")]
_SECONDS = Annotated[float, typer.Option(help="Spent on each variant, as far as 3 to 30 repetitions allow.")]
_COMPILE = Annotated[
    bool | None, typer.Option(help="Time torch.compile too; on a GPU unless you decline, on a CPU only if you ask.")
]
_FOLDER = Path("outputs/benchmark")


@bench.callback()
def main() -> None:
    """Measure speed, side by side in one run."""


@bench.command("op")
def bench_operation(
    shape: Annotated[list[str] | None, typer.Option(help="Several times; all on a GPU, one on a CPU.")] = None,
    device: _DEVICE = "auto",
    stage: Annotated[list[str] | None, typer.Option(help="forward or forward+backward; both if left out.")] = None,
    dtype: _DTYPE = None,
    compile: _COMPILE = None,
    seconds: _SECONDS = 1.0,
    output: _OUTPUT = _FOLDER,
) -> None:
    """One attention: MHLA and plain linear attention against softmax. Checks that MHLA is right before it times it."""
    from .operation import benchmark_operation, choose_stages
    from .recorder import Recorder
    from .shapes import choose_shapes
    from .timing import Budget

    place, precision = _place(device, dtype)
    shapes, stages, budget = choose_shapes(shape, place.type), choose_stages(stage), Budget(seconds)
    recorder = Recorder("op", place, precision, output)
    compiled = _whether_to_compile(compile, place)
    for one in shapes:
        recorder.add(benchmark_operation(one, place, precision, recorder.rates, budget, stages, compile=compiled))
    recorder.finish()


@bench.command("scaling")
def bench_scaling(
    tokens: Annotated[list[int] | None, typer.Option(help="N, a square number; several times.")] = None,
    blocks: Annotated[list[int] | None, typer.Option(help="M, a square number; several times.")] = None,
    heads: Annotated[int, typer.Option(help="H.")] = 6,
    head_dim: Annotated[int, typer.Option(help="D.")] = 64,
    softmax_tokens: Annotated[int | None, typer.Option(help="Softmax is measured up to this N.")] = None,
    device: _DEVICE = "auto",
    dtype: _DTYPE = None,
    seconds: _SECONDS = 1.0,
    output: _OUTPUT = _FOLDER,
) -> None:
    """Time and memory over tokens N and token blocks M; how time grows with N and what mixing adds."""
    from .recorder import Recorder
    from .scaling import ScalingConfig, benchmark_scaling, check_scaling, default_config, print_summary
    from .timing import Budget

    place, precision = _place(device, dtype)
    default, budget = default_config(place.type), Budget(seconds)
    config = ScalingConfig(
        tuple(sorted(tokens or default.tokens)),
        tuple(sorted(blocks or default.blocks)),
        heads,
        head_dim,
        default.softmax_tokens if softmax_tokens is None else softmax_tokens,
    )
    check_scaling(config, place, precision)
    recorder = Recorder("scaling", place, precision, output)
    for number in config.tokens:
        recorder.add(benchmark_scaling(config, number, place, precision, recorder.rates, budget))
    print_summary(recorder.finish())


_MODEL = Annotated[list[str] | None, typer.Option(help="wan2.1-1.3b, sana-0.6b, deit-s-16, vlt-t, …; several times.")]
_SIZE = Annotated[list[str] | None, typer.Option(help="480x832, or 512 for a square; several times.")]
_FRAMES = Annotated[list[int] | None, typer.Option(help="Of videos; several times.")]
_LAYERS = Annotated[int | None, typer.Option(help="Build only so many; times of all are extrapolated.")]
_BATCH = Annotated[int, typer.Option(help="Samples per forward.")]


@bench.command("transformer")
def bench_transformer(
    model: _MODEL = None,
    size: _SIZE = None,
    frames: _FRAMES = None,
    layers: _LAYERS = None,
    batch: _BATCH = 1,
    device: _DEVICE = "auto",
    dtype: _DTYPE = None,
    compile: _COMPILE = None,
    seconds: _SECONDS = 1.0,
    output: _OUTPUT = _FOLDER,
) -> None:
    """Whole transformers with random weights: softmax through each backend against linear attentions."""
    from .recorder import Recorder
    from .timing import Budget
    from .transformer import benchmark_transformer

    place, precision = _place(device, dtype)
    cases, budget = _cases(model, size, frames, layers, batch, place, precision), Budget(seconds)
    recorder = Recorder("transformer", place, precision, output)
    compiled = _whether_to_compile(compile, place)
    for case in cases:
        recorder.add(benchmark_transformer(case, recorder.rates, budget, compile=compiled))
    recorder.finish()


@bench.command("train")
def bench_training(
    model: _MODEL = None,
    size: _SIZE = None,
    frames: _FRAMES = None,
    layers: _LAYERS = None,
    batch: _BATCH = 1,
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again in the backward pass.")] = False,
    device: _DEVICE = "auto",
    dtype: _DTYPE = None,
    seconds: _SECONDS = 1.0,
    output: _OUTPUT = _FOLDER,
) -> None:
    """Forward, backward and optimizer step of whole transformers; all weights train."""
    from .recorder import Recorder
    from .timing import Budget
    from .transformer import benchmark_training

    place, precision = _place(device, dtype)
    cases, budget = _cases(model, size, frames, layers, batch, place, precision), Budget(seconds)
    recorder = Recorder("train", place, precision, output)
    for case in cases:
        recorder.add(benchmark_training(case, recorder.rates, budget, checkpointing=checkpointing))
    recorder.finish()


@bench.command("pipeline")
def bench_pipeline(
    model: Annotated[str, typer.Option(help="tiny-dit, tiny-sana, tiny-wan, or Hub id or folder.")] = "tiny-dit",
    steps: Annotated[int | None, typer.Option(help="Of the sampler.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Scale of classifier-free guidance.")] = None,
    size: Annotated[str | None, typer.Option(help="480x832, or 512 for a square; if the call takes one.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.")] = None,
    softmax_steps: Annotated[
        str, typer.Option(help="First steps in which patches are disabled: a number such as 3, or 20%.")
    ] = "0",
    repetitions: Annotated[int, typer.Option(help="Calls of each variant, after one to warm up.")] = 3,
    device: _DEVICE = "auto",
    dtype: _DTYPE = None,
    output: _OUTPUT = _FOLDER,
) -> None:
    """A whole call of a pipeline, and its parts: text encoding, denoising, VAE."""
    from ..generation.names import parse_steps
    from .models import parse_size
    from .pipeline import benchmark_pipeline, choose_pipeline
    from .recorder import Recorder

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
    case = choose_pipeline(model, place, precision, repetitions, settings, parse_steps(softmax_steps))
    recorder = Recorder("pipeline", place, precision, output)
    recorder.add(benchmark_pipeline(case, recorder.rates))
    recorder.finish()


@bench.command("gpu-check")
def bench_gpu_check(
    output: Annotated[Path, typer.Option(help="Gets a file per step and summary.md.")] = Path("outputs/gpu-check"),
    steps: Annotated[
        list[str] | None, typer.Option(help="Names with commas between them, or several times; all if left out.")
    ] = None,
    device: _DEVICE = "auto",
) -> None:
    """What to run first on a new GPU: right, within limits, how fast each kernel? Run again, it goes on."""
    from ..devices import choose_device
    from .gpu_check.run import check_gpu, choose_steps

    if not check_gpu(choose_steps(steps), choose_device(device), output):
        raise typer.Exit(1)


@bench.command("report")
def bench_report(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of other bench commands; several are drawn together.")],
    output: Annotated[Path | None, typer.Option(help="Where to write; the first folder if left out.")] = None,
) -> None:
    """Plots, and one HTML page with everything that was measured."""
    from .report import write_report

    typer.echo(f"Wrote {write_report(folders, output or folders[0])}")


@bench.command("all")
def bench_all(
    output: _OUTPUT = _FOLDER,
    tiny: Annotated[bool, typer.Option(help="The smallest sizes there are, to try the commands out.")] = False,
    device: _DEVICE = "auto",
    dtype: _DTYPE = None,
    compile: _COMPILE = None,
    seconds: _SECONDS = 1.0,
) -> None:
    """Op, scaling, transformer, train and pipeline with their defaults, and the report."""
    from ..reporting import require_matplotlib

    require_matplotlib()
    models = ["tiny-dit"] if tiny else None
    shapes = ["tiny"] if tiny else None
    bench_operation(shapes, device=device, dtype=dtype, compile=compile, seconds=seconds, output=output)
    if tiny:
        bench_scaling([16, 64], [4, 16], 1, 8, None, device, dtype, seconds, output)
    else:
        bench_scaling(device=device, dtype=dtype, seconds=seconds, output=output)
    bench_transformer(model=models, device=device, dtype=dtype, compile=compile, seconds=seconds, output=output)
    bench_training(model=models, device=device, dtype=dtype, seconds=seconds, output=output)
    steps, repetitions = (2, 1) if tiny else (None, 3)
    bench_pipeline(steps=steps, repetitions=repetitions, device=device, dtype=dtype, output=output)
    bench_report([output])


@bench.command("ceilings")
def bench_ceilings(
    model: Annotated[list[str] | None, typer.Option(help="Several times; all real ones if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Gets ceilings.md and ceilings.csv.")] = Path("outputs/models"),
) -> None:
    """Counted, not timed: what every model spends on attention by resolution, and how much a patch can save at most."""
    from ..reporting import write_table
    from .ceilings import HEADER, ceilings
    from .models import find_models, models

    chosen = find_models(model, "cpu") if model else [one for one in models().values() if not one.is_tiny]
    typer.echo(write_table(HEADER, [found.cells() for found in ceilings(chosen)], output, "ceilings"))


bench.command("parallel")(bench_parallel)
bench.command("plan")(bench_plan)


def _cases(
    model: list[str] | None,
    size: list[str] | None,
    frames: list[int] | None,
    layers: int | None,
    batch: int,
    device: "torch.device",
    dtype: "torch.dtype",
) -> "list[Case]":
    """Every model at every size that was asked for; classifiers with MHLA built in behind those that are patched.

    Raises:
        ValueError: a model is unknown or a size does not fit it.
    """
    from .cases import TransformerCase
    from .classifiers import CLASSIFIERS, ClassifierCase
    from .models import choose_sizes, find_models

    patched = [
        TransformerCase(one, chosen, layers, device, dtype)
        for one in find_models(model, device.type, CLASSIFIERS)
        for chosen in choose_sizes(one, size, frames, device.type, batch)
    ]
    built_in = [
        ClassifierCase(CLASSIFIERS[name], chosen, layers, device, dtype)
        for name in model or ()
        if name in CLASSIFIERS
        for chosen in CLASSIFIERS[name].choose_sizes(size, device.type, batch)
    ]
    return [*patched, *built_in]


def _place(device: str, dtype: str | None) -> "tuple[torch.device, torch.dtype]":
    """Device and type from their names.

    Raises:
        ValueError: unknown.
    """
    from ..devices import FLOAT_TYPES, choose_device, dtype_name

    place = choose_device(device)
    return place, FLOAT_TYPES[dtype_name(dtype or ("float32" if place.type == "cpu" else "bfloat16"))]


def _whether_to_compile(wish: bool | None, device: "torch.device") -> bool:
    return device.type != "cpu" if wish is None else wish
