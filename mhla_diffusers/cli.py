"""The ``mhla`` command: one line per subcommand; each is defined in its own folder.

Commands import their dependencies when called, so that ``--help`` does not wait for torch.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .analysis.commands import analyze, audit
from .benchmark.commands import bench
from .demo.commands import demo
from .evaluation.commands import app as evaluation
from .generation.commands import generate_command
from .training.commands import encode_command, finetune_command, synthesize_command

app = typer.Typer(
    help="Linear-cost attention for diffusers pipelines.", no_args_is_help=True, pretty_exceptions_show_locals=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mhla_diffusers {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Linear-cost attention for diffusers pipelines."""


@app.command()
def info(
    patch: Annotated[
        str | None, typer.Option(help="Show one patch: name, YAML path, or folder of a saved patch.")
    ] = None,
    as_report: Annotated[
        bool, typer.Option("--report", help="Plain text to paste into an issue; with --patch, that patch's settings.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Forecast the effect of a patch on wan2.1-1.3b, dit-xl-2, …")
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Of the forecast, in pixels; default: the model's first size.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="In pixels.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.")] = None,
    density: Annotated[float | None, typer.Option(help="Of the sparse branch, default 0.05; or give --patch.")] = None,
    steps: Annotated[int | None, typer.Option(help="Sampler steps, default 50.")] = None,
    passes: Annotated[int | None, typer.Option(help="Forwards per step: 2, or 1 without guidance.")] = None,
    softmax_steps: Annotated[
        str | None, typer.Option(help="First steps in which the patch is disabled: 3, or 20%.")
    ] = None,
    device: Annotated[
        Path | None, typer.Option(help="Known card such as h100, or a JSON of mhla bench transformer.")
    ] = None,
    matmul_rate: Annotated[float | None, typer.Option(help="FLOP/s, for a bound; with --copy-rate.")] = None,
    copy_rate: Annotated[float | None, typer.Option(help="Bytes/s, for a bound.")] = None,
) -> None:
    """Versions, devices, backends, supported models and patches; with --model, a forecast for a patch."""
    from .info import configs_of, print_any_patch, print_info, report

    of_forecast: dict[str, Any] = {
        "height": height,
        "width": width,
        "frames": frames,
        "density": density,
        "steps": steps,
        "passes": passes,
        "softmax_steps": softmax_steps,
        "device": device,
        "matmul_rate": matmul_rate,
        "copy_rate": copy_rate,
    }
    given = [f"--{name.replace('_', '-')}" for name, value in of_forecast.items() if value is not None]
    if model is None and given:
        raise ValueError(f"{', '.join(given)} belongs to a forecast: give --model as well, such as wan2.1-1.3b.")
    if model is not None and as_report:
        raise ValueError("--report and --model ask for different things; give one of them.")
    if model is not None:
        from .benchmark.forecast import Options, forecast_text

        config = None if patch is None else configs_of(patch)[0]
        typer.echo(forecast_text(model, config, Options(**of_forecast)))
    elif as_report:
        typer.echo(report(patch))
    elif patch is None:
        print_info()
    else:
        print_any_patch(patch)


app.command("generate")(generate_command)
app.command("finetune")(finetune_command)
app.command("encode")(encode_command)
app.command("synthesize")(synthesize_command)
app.command("analyze")(analyze)
app.command("audit")(audit)
app.command("demo")(demo)
app.add_typer(evaluation, name="eval")
app.add_typer(bench, name="bench")


_NOT_FOR_USERS = {
    "diffusers.models.modeling_utils": "should be kept in float32",
    "diffusers.pipelines.pipeline_utils": "Expected types for id2label",
    "diffusers.pipelines.wan.pipeline_wan": "has to be divisible by 1.",
}
"""Logger of diffusers → part of a warning that is irrelevant for users of a command: about its own casts, including to
float32, about a DiT's labels, and about numbers of frames where the VAE keeps all frames.
"""


def _hide(part: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: part not in record.getMessage()


def run() -> None:
    """Entry point: user errors are printed without a traceback."""
    for name, part in _NOT_FOR_USERS.items():
        logging.getLogger(name).addFilter(_hide(part))
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from None
