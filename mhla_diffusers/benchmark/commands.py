"""``mhla bench``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..generation.names import call_options, expand_options, patch_options, read_prompts

if TYPE_CHECKING:
    import torch

bench = typer.Typer(help="Measure time and memory, side by side in one run.", no_args_is_help=True)

_Models = Annotated[list[str] | None, typer.Option("--model", help="wan2.1-1.3b, sana-0.6b, …; several times.")]
_Sizes = Annotated[list[str] | None, typer.Option("--size", help="480x832, or 512 for a square; several times.")]
_Frames = Annotated[list[int] | None, typer.Option(help="Of videos; several times.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
_DType = Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU.")]
_Output = Annotated[Path, typer.Option(help="Gets a folder for the device, with CSV and Markdown.")]
_Seconds = Annotated[float, typer.Option(min=1e-9, help="Spent on each variant, as far as 3 to 30 repetitions allow.")]
_FOLDER = Path("outputs/benchmark")


@bench.callback()
def main() -> None:
    """Measure time and memory, side by side in one run."""


@bench.command("op")
def bench_operator(
    model: _Models = None,
    size: _Sizes = None,
    frames: _Frames = None,
    device: _Device = "auto",
    dtype: _DType = None,
    seconds: _Seconds = 1.0,
    output: _Output = _FOLDER,
) -> None:
    """One attention: MHLA, sparse and plain linear attention against softmax, checked against float64 first."""
    from .cases import choose_cases
    from .measure import Results
    from .operator import benchmark_operator

    place, precision, on_cpu = place_of(device, dtype)
    cases = choose_cases(model or ["dit-xl-2" if on_cpu else "wan2.1-1.3b"], size, frames, smallest=on_cpu)
    results = Results("op", place, precision, output, seconds)
    for case in cases:
        benchmark_operator(case.shape, results)
    results.finish()


@bench.command("transformer")
def bench_transformer(
    model: _Models = None,
    size: _Sizes = None,
    frames: _Frames = None,
    device: _Device = "auto",
    dtype: _DType = None,
    compile: Annotated[bool | None, typer.Option(help="Time compiled blocks too; default: on a GPU.")] = None,
    seconds: _Seconds = 1.0,
    output: _Output = _FOLDER,
) -> None:
    """Whole transformers with random weights: softmax through each backend against linear attentions."""
    from .cases import choose_cases
    from .forward import benchmark_forward
    from .measure import Results

    place, precision, on_cpu = place_of(device, dtype)
    cases = choose_cases(model or ["dit-s-2" if on_cpu else "wan2.1-1.3b"], size, frames, smallest=on_cpu)
    results = Results("transformer", place, precision, output, seconds)
    for case in cases:
        benchmark_forward(case, results, compile=not on_cpu if compile is None else compile)
    results.finish()


@bench.command("pipeline")
@expand_options(patch_options, call_options)
def bench_pipeline(
    options: dict[str, Any],
    model: Annotated[str, typer.Option(help="tiny-dit, tiny-sana, tiny-wan, or Hub id or folder.")] = "tiny-dit",
    patch: Annotated[
        list[str] | None,
        typer.Option(help="A profile, a preset, a YAML file or a saved patch; several. Default: all profiles."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Prompts, one per line; default: one of its own.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Calls of each, after one to warm up.")] = 3,
    device: _Device = "auto",
    dtype: _DType = None,
    output: _Output = _FOLDER,
) -> None:
    """A whole call of a pipeline and its parts, unpatched and with patches, with PSNR and SSIM of the samples."""
    from .measure import Results
    from .pipeline import benchmark_pipeline, choose_pipeline

    place, precision, _ = place_of(device, dtype)
    kind = str(precision).removeprefix("torch.")
    choice = choose_pipeline(model, device=str(place), dtype=kind, settings=options["settings"])
    results = Results("pipeline", place, precision, output)
    prompts = () if prompt_file is None else read_prompts(prompt_file)
    benchmark_pipeline(choice, patch or (), results, prompts, options["patch_settings"], repetitions)
    results.finish()


def place_of(device: str, dtype: str | None) -> "tuple[torch.device, torch.dtype, bool]":
    """Return device and type by their names, and whether it is a CPU; ValueError for unknown ones."""
    from ..devices import FLOAT_TYPES, choose_device
    from ..errors import check_choice

    place = choose_device(device)
    on_cpu = place.type == "cpu"
    dtype = dtype or ("float32" if on_cpu else "bfloat16")
    check_choice("dtype", dtype, tuple(FLOAT_TYPES))
    return place, FLOAT_TYPES[dtype], on_cpu
