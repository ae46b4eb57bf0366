"""``mhla bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from ..families import Model
    from .cases import Case
    from .results import Recorder

bench = typer.Typer(help="Measure speed, side by side in one run.", no_args_is_help=True)

_DEVICE = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
_DTYPE = Annotated[str | None, typer.Option(help="bfloat16 on a GPU and float32 on a CPU, unless you choose.")]
_OUTPUT = Annotated[Path, typer.Option(help="Gets a folder for the device, with CSV and JSON.")]
_SECONDS = Annotated[float, typer.Option(help="Spent on each variant, as far as 3 to 30 repetitions allow.")]
_COMPILE = Annotated[
    bool | None, typer.Option(help="Time torch.compile too; on a GPU unless you decline, on a CPU only if you ask.")
]
_FOLDER, _PARALLEL = Path("outputs/benchmark"), Path("outputs/parallel")


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
    """One attention: MHLA and plain linear attention against softmax. Checks that MHLA is correct before timing it."""
    from .operation import benchmark_operation, choose_stages
    from .results import Recorder
    from .shapes import choose_shapes

    place, precision = _place(device, dtype)
    shapes, stages = choose_shapes(shape, place.type), choose_stages(stage)
    recorder = Recorder("op", place, precision, output, seconds)
    compiled = place.type != "cpu" if compile is None else compile
    for one in shapes:
        recorder.add(benchmark_operation(one, recorder, stages, compile=compiled))
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
    from .operation import Scaling, benchmark_scaling, check_scaling, default_scaling, print_scaling
    from .results import Recorder

    place, precision = _place(device, dtype)
    default = default_scaling(place.type)
    config = Scaling(
        tuple(sorted(tokens or default.tokens)),
        tuple(sorted(blocks or default.blocks)),
        heads,
        head_dim,
        default.softmax_tokens if softmax_tokens is None else softmax_tokens,
    )
    check_scaling(config, place, precision)
    recorder = Recorder("scaling", place, precision, output, seconds)
    for number in config.tokens:
        recorder.add(benchmark_scaling(config, number, recorder))
    print_scaling(recorder.finish())


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
    from .transformer import benchmark_transformer

    cases, recorder = _cases("transformer", model, size, frames, layers, batch, device, dtype, output, seconds)
    compiled = recorder.device.type != "cpu" if compile is None else compile
    for case in cases:
        recorder.add(benchmark_transformer(case, recorder, compile=compiled))
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
    from .transformer import benchmark_training

    cases, recorder = _cases("train", model, size, frames, layers, batch, device, dtype, output, seconds)
    for case in cases:
        recorder.add(benchmark_training(case, recorder, checkpointing=checkpointing))
    recorder.finish()


@bench.command("pipeline")
def bench_pipeline(
    model: Annotated[str, typer.Option(help="tiny-dit, tiny-sana, tiny-wan, or Hub id or folder.")] = "tiny-dit",
    steps: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of the sampler; the first is the plain pipeline's, any other gives rows."),
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Scale of classifier-free guidance.")] = None,
    size: Annotated[str | None, typer.Option(help="480x832, or 512 for a square; if the call takes one.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.")] = None,
    softmax_steps: Annotated[
        str, typer.Option(help="First steps in which patches are disabled: a number such as 3, or 20%.")
    ] = "0",
    patch: Annotated[
        list[str] | None,
        typer.Option(
            help="As rows name them, a preset, a YAML file, or a saved patch; several. All kinds if left out."
        ),
    ] = None,
    lora: Annotated[list[str] | None, typer.Option(help="Folder, file or Hub id; several.")] = None,
    quantize: Annotated[list[str] | None, typer.Option(help="Weights in int8 or float8, by torchao; several.")] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="firstblock, taylorseer or magcache; with a setting firstblock=0.1; several."),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Calls of each variant, after one to warm up.")] = 3,
    device: _DEVICE = "auto",
    dtype: _DTYPE = None,
    output: _OUTPUT = _FOLDER,
) -> None:
    """A whole call of a pipeline, and its parts: text encoding, denoising, VAE.

    LoRA, quantised weights, step caches and further numbers of steps are rows: every attention with and without each of
    them, alone and together, from the same noise.
    """
    from ..generation.names import parse_steps
    from .models import parse_size
    from .pipeline import benchmark_pipeline
    from .results import Recorder
    from .variants import Additions, choose_pipeline

    place, precision = _place(device, dtype)
    numbers = list(dict.fromkeys(steps or ()))
    additions = Additions(tuple(lora or ()), tuple(quantize or ()), tuple(cache or ()), tuple(numbers[1:]))
    height, width = (None, None) if size is None else parse_size(size)
    asked = {
        "num_inference_steps": numbers[0] if numbers else None,
        "guidance_scale": guidance,
        "height": height,
        "width": width,
        "num_frames": frames,
    }
    settings = {name: value for name, value in asked.items() if value is not None}
    case = choose_pipeline(
        model, place, precision, repetitions, settings, parse_steps(softmax_steps), patch or (), additions
    )
    recorder = Recorder("pipeline", place, precision, output)
    recorder.add(benchmark_pipeline(case, recorder))
    recorder.finish()


@bench.command("gpu-check")
def bench_gpu_check(
    output: Annotated[Path, typer.Option(help="Gets a file per step and summary.md.")] = Path("outputs/gpu-check"),
    steps: Annotated[
        list[str] | None, typer.Option(help="Names with commas between them, or several times; all if left out.")
    ] = None,
    device: _DEVICE = "auto",
) -> None:
    """Run first on a new GPU: checks correctness, limits and integration."""
    from ..devices import choose_device
    from .gpu_check import check_gpu, choose_steps

    if not check_gpu(choose_steps(steps), choose_device(device), output):
        raise typer.Exit(1)


@bench.command("report")
def bench_report(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of other bench commands; several are drawn together.")],
    output: Annotated[Path | None, typer.Option(help="Where to write; default: the first folder.")] = None,
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
    models, shapes = (["tiny-dit"], ["tiny"]) if tiny else (None, None)
    bench_operation(shapes, device=device, dtype=dtype, compile=compile, seconds=seconds, output=output)
    if tiny:
        bench_scaling([16, 64], [4, 16], 1, 8, None, device, dtype, seconds, output)
    else:
        bench_scaling(device=device, dtype=dtype, seconds=seconds, output=output)
    bench_transformer(model=models, device=device, dtype=dtype, compile=compile, seconds=seconds, output=output)
    bench_training(model=models, device=device, dtype=dtype, seconds=seconds, output=output)
    steps, repetitions = ([2], 1) if tiny else (None, 3)
    bench_pipeline(steps=steps, repetitions=repetitions, device=device, dtype=dtype, output=output)
    bench_report([output])


@bench.command("ceilings")
def bench_ceilings(
    model: Annotated[list[str] | None, typer.Option(help="Several times; all real ones if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Gets ceilings.md and ceilings.csv.")] = Path("outputs/models"),
) -> None:
    """Counted, not timed: what every model spends on attention by resolution, and how much a patch can save at most."""
    from ..reporting import write_table
    from .forecast import CEILINGS, ceiling_cells, ceilings
    from .models import find_models, models

    chosen = find_models(model, "cpu") if model else [one for one in models().values() if not one.is_tiny]
    typer.echo(write_table(CEILINGS, [ceiling_cells(found) for found in ceilings(chosen)], output, "ceilings"))


_SPLIT = Annotated[
    list[str] | None, typer.Option(help="wan2.1-1.3b, wan2.1-14b, …; several times; those two if left out.")
]
_SIDES = Annotated[str, typer.Option(help="480x832, or 512 for a square.")]


@bench.command("parallel")
def bench_parallel(
    model: _SPLIT = None,
    size: _SIDES = "480x832",
    frames: Annotated[list[int] | None, typer.Option(help="Of videos; several times.")] = None,
    processes: Annotated[list[int] | None, typer.Option(help="Several times; 2, 4 and 8 if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Gets tables as Markdown and CSV.")] = _PARALLEL,
) -> None:
    """Counted: bytes that one process sends for one self-attention, MHLA beside diffusers' softmax."""
    from .models import choose_sizes
    from .parallel import count, crossings, shape_of, write_crossings, write_sent

    models, many = _that_can_be_split(model), processes or [2, 4, 8]
    if min(many) < 2:
        raise ValueError(f"--processes {min(many)} share nothing out; give 2 or more.")
    # at 480x832 7 to 672 frames of Wan's token grid, up to a million tokens; with fewer there are fewer blocks
    lengths = frames or (25, 53, 81, 165, 333, 669, 1341, 2685)
    cases = {one.name: choose_sizes(one, [size], lengths, "cpu") for one in models}
    asked = [(one, number, chosen) for one in models for number in many for chosen in cases[one.name]]
    found = []
    for done, (one, number, chosen) in enumerate(asked, 1):
        typer.echo(f"counting {done} of {len(asked)}: {one.name} at {chosen}, {number} processes", err=True)
        shape = shape_of(one, chosen)
        found.append((one, shape, number, count(shape, number)))
    typer.echo(write_sent(found, output))
    crossed = []
    for one in models:
        for number in many if one.is_video else ():
            typer.echo(f"looking for where {one.name} sends less, {number} processes", err=True)
            crossed += crossings(one, cases[one.name][0], number)
    typer.echo(write_crossings(crossed, output))


@bench.command("plan")
def bench_plan(
    model: _SPLIT = None,
    size: _SIDES = "480x832",
    frames: Annotated[list[int] | None, typer.Option(help="Several times; 81, 401 and 4001 if left out.")] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="Several times; 1 to 64 if left out.")] = None,
    patch: Annotated[str | None, typer.Option(help="Name or file of a patch; MHLA in all layers if left out.")] = None,
    tflops: Annotated[float, typer.Option(help="Of a GPU; H100 SXM, dense bfloat16, data sheet.")] = 989.0,
    utilisation: Annotated[float, typer.Option(help="Part of --tflops that is reached; an assumption.")] = 0.4,
    nvlink: Annotated[float, typer.Option(help="GB/s that a GPU sends within a machine; H100, data sheet.")] = 450.0,
    infiniband: Annotated[float, typer.Option(help="GB/s that a GPU sends to other machines; NDR, 400 Gbit/s.")] = 50.0,
    gpus_per_machine: Annotated[int, typer.Option(help="Joined by NVLink.")] = 8,
    output: Annotated[Path, typer.Option(help="Gets plan.md and plan.csv.")] = _PARALLEL,
) -> None:
    """Calculated, not measured: counted FLOPs and bytes over given rates, for one forward on many GPUs."""
    from ..config import load_patch
    from .models import choose_sizes
    from .parallel import Machines, plan, write_plan

    machines = Machines(tflops, utilisation, nvlink, infiniband, gpus_per_machine)
    config = None if patch is None else load_patch(patch).config
    found = [
        planned
        for one in _that_can_be_split(model)
        for chosen in choose_sizes(one, [size], frames or (81, 401, 4001), "cpu")
        for planned in plan(one, chosen, gpus or (1, 2, 4, 8, 16, 32, 64), machines, config)
    ]
    typer.echo(f"{machines}\n")
    typer.echo(write_plan(found, output))


def _that_can_be_split(names: Sequence[str] | None) -> "list[Model]":
    """Models by name, the two of Wan for None.

    Raises:
        ValueError: unknown names, or models for which diffusers does not define how to split tokens.
    """
    from ..families import classes_that_are_split
    from .models import find_models

    models = find_models(names or ("wan2.1-1.3b", "wan2.1-14b"), "cpu")
    allowed = classes_that_are_split()
    refused = [one.name for one in models if one.transformer not in allowed]
    if refused:
        raise ValueError(
            f"diffusers does not define how to split the tokens of {', '.join(refused)} over processes (_cp_plan); it "
            f"does for models of {', '.join(allowed)}."
        )
    return models


def _cases(
    command: str,
    model: list[str] | None,
    size: list[str] | None,
    frames: list[int] | None,
    layers: int | None,
    batch: int,
    device: str,
    dtype: str | None,
    output: Path,
    seconds: float,
) -> "tuple[list[Case], Recorder]":
    """Every model at every size that was asked for, classifiers with MHLA built in behind those that are patched.

    Raises:
        ValueError: a model is unknown or a size does not fit it.
    """
    from .cases import CLASSIFIERS, Case, ClassifierCase
    from .models import choose_sizes, find_models
    from .results import Recorder

    place, precision = _place(device, dtype)
    cases = [
        Case(one, chosen, layers, place, precision)
        for one in find_models(model, place.type, CLASSIFIERS)
        for chosen in choose_sizes(one, size, frames, place.type, batch)
    ]
    cases += [
        ClassifierCase(CLASSIFIERS[name], chosen, layers, place, precision)
        for name in model or ()
        if name in CLASSIFIERS
        for chosen in CLASSIFIERS[name].choose_sizes(size, place.type, batch)
    ]
    return cases, Recorder(command, place, precision, output, seconds)


def _place(device: str, dtype: str | None) -> "tuple[torch.device, torch.dtype]":
    """Device and type from their names.

    Raises:
        ValueError: unknown.
    """
    from ..devices import FLOAT_TYPES, choose_device, dtype_name

    place = choose_device(device)
    return place, FLOAT_TYPES[dtype_name(dtype or ("float32" if place.type == "cpu" else "bfloat16"))]
