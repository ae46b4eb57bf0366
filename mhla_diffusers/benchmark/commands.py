"""``mhla bench``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..generation.names import call_options, device_options, expand_options, patch_options, read_prompts

bench = typer.Typer(help="Measure time and memory, side by side in one run.", no_args_is_help=True)

_OUTPUT = Annotated[Path, typer.Option(help="Folder for results; each device gets its own in it.")]
_DEFAULT = Path("outputs/benchmark")


def case_options(
    model: Annotated[str | None, typer.Option(help="wan2.1-1.3b, sana-0.6b, …; mhla info lists all.")] = None,
    size: Annotated[str | None, typer.Option(help="480x832, or 512 for a square; default: the model's sizes.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    seconds: Annotated[float, typer.Option(min=1e-9, help="Time per variant, within 3 to 30 repetitions.")] = 1.0,
) -> dict[str, Any]:
    """Return which model at which size, and how long to measure."""
    return {"model": model, "size": size, "frames": frames, "seconds": seconds}


def _measure(command: str, options: dict[str, Any], output: Path, benchmark: Callable[..., None]) -> None:
    from ..devices import device_and_type
    from .cases import choose_cases
    from .correctness import operator_errors, too_large
    from .measure import Results

    device, dtype = device_and_type(options["device"], options["dtype"])
    on_cpu = device.type == "cpu"
    model = options["model"] or ("dit-s-2" if on_cpu else "wan2.1-1.3b")
    cases = choose_cases(model, options["size"], options["frames"])
    results = Results(command, device, dtype, output)
    for case in cases[: 1 if on_cpu else None]:
        if wrong := too_large(operator_errors(case.shape, device, dtype), dtype):
            raise ValueError(f"Attention on {device} in {dtype} is wrong: {', '.join(wrong)}. Nothing was timed.")
        benchmark(case, results, options["seconds"])
    results.finish()


@bench.command("op")
@expand_options(case_options, device_options)
def bench_operator(options: dict[str, Any], output: _OUTPUT = _DEFAULT) -> None:
    """Time one attention: MHLA, sparse and plain linear against softmax, after a check against float64."""
    from .operator import benchmark_operator

    _measure("op", options, output, benchmark_operator)


@bench.command("transformer")
@expand_options(case_options, device_options)
def bench_transformer(
    options: dict[str, Any],
    compile: Annotated[bool | None, typer.Option(help="Also time compiled blocks; default: only on a GPU.")] = None,
    output: _OUTPUT = _DEFAULT,
) -> None:
    """Time whole transformers with random weights: every softmax backend against MHLA and sparse attention."""
    from .forward import benchmark_forward

    _measure("transformer", options, output, partial(benchmark_forward, compile=compile))


@bench.command("pipeline")
@expand_options(device_options, call_options, patch_options)
def bench_pipeline(
    options: dict[str, Any],
    model: Annotated[str, typer.Option(help="tiny-dit, tiny-sana, tiny-wan, a Hub id or a folder.")] = "tiny-dit",
    patch: Annotated[
        list[str] | None,
        typer.Option(help="Profile, preset, YAML file or saved patch; repeatable; default: all profiles."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(exists=True, help="One per line; default: a built-in one.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed calls of each, after a warm-up call.")] = 3,
    output: _OUTPUT = _DEFAULT,
) -> None:
    """Time a whole call of a pipeline, unpatched and patched, with PSNR and SSIM of the samples."""
    from ..config import PROFILES
    from ..devices import device_and_type
    from ..generation.pipelines import PipelineChoice, family_of
    from .measure import Results
    from .pipeline import benchmark_pipeline

    changes = options.pop("patch_settings")
    choice = PipelineChoice(family_of(model).name, model=model, **options)
    results = Results("pipeline", *device_and_type(choice.device, choice.dtype), output)
    texts = [] if prompts is None else [prompt for prompt, _ in read_prompts(prompts)]
    benchmark_pipeline(choice, patch or tuple(PROFILES), results, texts, changes, repetitions)
    results.finish()
