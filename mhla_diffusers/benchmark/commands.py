"""``mhla bench``."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..generation.names import call_options, expand_options, patch_options, read_prompts

bench = typer.Typer(help="Measure time and memory, side by side in one run.", no_args_is_help=True)


def run_options(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for results; each device gets its own in it.")] = Path(
        "outputs/benchmark"
    ),
) -> dict[str, Any]:
    """Return where to run and to write."""
    from ..devices import device_and_type

    place, kind = device_and_type(device, dtype)
    return {"device": place, "dtype": kind, "output": output}


def case_options(
    model: Annotated[list[str] | None, typer.Option(help="wan2.1-1.3b, sana-0.6b, …; repeatable.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="480x832, or 512 for a square; repeatable.")] = None,
    frames: Annotated[list[int] | None, typer.Option(help="Frames of a video; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(min=1e-9, help="Time per variant, within 3 to 30 repetitions.")] = 1.0,
) -> dict[str, Any]:
    """Return which models at which sizes, and how long to measure."""
    return {"names": model, "sizes": size, "frames": frames, "seconds": seconds}


def _measure(command: str, options: dict[str, Any], benchmark: Callable[..., None], **settings: Any) -> None:
    from .cases import choose_cases
    from .measure import Results

    device, on_cpu = options["device"], options["device"].type == "cpu"
    names = options["names"] or ["dit-s-2" if on_cpu else "wan2.1-1.3b"]
    cases = choose_cases(names, options["sizes"], options["frames"], smallest=on_cpu)
    results = Results(command, device, options["dtype"], options["output"], options["seconds"])
    for case in cases:
        benchmark(case, results, **settings)
    results.finish()


@bench.command("op")
@expand_options(case_options, run_options)
def bench_operator(options: dict[str, Any]) -> None:
    """Time one attention: MHLA, sparse and plain linear against softmax, after a check against float64."""
    from .operator import benchmark_operator

    _measure("op", options, benchmark_operator)


@bench.command("transformer")
@expand_options(case_options, run_options)
def bench_transformer(
    options: dict[str, Any],
    compile: Annotated[bool | None, typer.Option(help="Also time compiled blocks; default: only on a GPU.")] = None,
) -> None:
    """Time whole transformers with random weights: every softmax backend against MHLA and sparse attention."""
    from .forward import benchmark_forward

    compiles = options["device"].type != "cpu" if compile is None else compile
    _measure("transformer", options, benchmark_forward, compile=compiles)


@bench.command("pipeline")
@expand_options(patch_options, call_options, run_options)
def bench_pipeline(
    options: dict[str, Any],
    model: Annotated[str, typer.Option(help="tiny-dit, tiny-sana, tiny-wan, a Hub id or a folder.")] = "tiny-dit",
    patch: Annotated[
        list[str] | None,
        typer.Option(help="Profile, preset, YAML file or saved patch; repeatable; default: all profiles."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Prompts, one per line; default: a built-in one.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed calls of each, after a warm-up call.")] = 3,
) -> None:
    """Time a whole call of a pipeline, unpatched and patched, with PSNR and SSIM of the samples."""
    from ..generation.pipelines import PipelineChoice, family_of
    from .measure import Results
    from .pipeline import benchmark_pipeline

    device, dtype = options["device"], options["dtype"]
    kind = str(dtype).removeprefix("torch.")
    choice = PipelineChoice(
        family_of(model).name, model=model, device=str(device), dtype=kind, settings=options["settings"]
    )
    choice.check()
    results = Results("pipeline", device, dtype, options["output"])
    prompts = [] if prompt_file is None else [prompt for prompt, _ in read_prompts(prompt_file)]
    benchmark_pipeline(choice, patch or (), results, prompts, options["patch_settings"], repetitions)
    results.finish()
