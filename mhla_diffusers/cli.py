"""The ``mhla`` command: one line per subcommand; each is defined in its own folder.

Commands import their dependencies when called, so that ``--help`` does not wait for torch.
"""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .benchmark.commands import bench
from .evaluation.commands import app as evaluation
from .generation.commands import generate_command
from .generation.names import CHOICE, device_options, expand_options, patch_options
from .moved import where_it_went
from .training.commands import (
    data_command,
    encode_command,
    export_command,
    finetune_command,
    synthesize_command,
)
from .tuning.commands import tune_command


class _Commands(TyperGroup):
    """The commands; a removed one, or a removed option, raises an error that names its replacement."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command as typer does."""
        for words in range(1, 4):
            name = " ".join(args[:words])
            if gone := where_it_went(name):
                raise ValueError(f"`mhla {name}`: {gone}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command as typer does."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            unknown: Any = error
            if type(error).__name__ == "NoSuchOption":  # its class is private to typer
                command = unknown.ctx.command_path.removeprefix(ctx.command_path).strip()
                if gone := where_it_went(f"{command} {unknown.option_name}"):
                    raise ValueError(f"`mhla {command} {unknown.option_name}`: {gone}") from None
            raise


app = typer.Typer(
    cls=_Commands,
    help="Cheap attention at long sequences for diffusers pipelines.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # its commands inherit them
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mhla_diffusers {__version__}")
        raise typer.Exit


_shown = {"traceback": False}
"""What an error shows besides its text."""


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Cheap attention at long sequences for diffusers pipelines."""
    _shown["traceback"] = traceback


@app.command()
@expand_options(patch_options)
def info(
    options: dict[str, Any],
    patch: Annotated[str | None, typer.Option(help="Show one patch: a name, YAML file or saved patch.")] = None,
    as_report: Annotated[bool, typer.Option("--report", help="Print plain text to paste into an issue.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Count the most a patch can save for wan2.1-1.3b, dit-xl-2, …")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Height x width, such as 720x1280, or 512; default: the model's first.")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; default: 50.")] = None,
) -> None:
    """List versions, devices, models and patches; with --model, count FLOPs with and without a patch."""
    from .benchmark.info import print_any_patch, print_info, print_model, report

    given = {"size": size, "frames": frames, "steps": steps, "change": options["patch_settings"]}
    if model is None and any(given.values()):
        names = ", ".join(f"--{name}" for name, value in given.items() if value)
        raise ValueError(f"{names} needs --model, such as --model wan2.1-1.3b.")
    if as_report:
        typer.echo(report())
    elif model is not None:
        print_model(model, size, frames, patch, options["patch_settings"], steps or 50)
    elif patch is None:
        print_info()
    else:
        print_any_patch(patch)


@app.command()
@expand_options(device_options)
def check(
    options: dict[str, Any],
    model: Annotated[
        str, typer.Option(help="Model whose attention is checked: wan2.1-1.3b, flux-dev, …")
    ] = "wan2.1-1.3b",
    size: Annotated[
        str | None, typer.Option(help="480x832, or 512 for a square; the default is smaller on a CPU.")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for check.md.")] = Path("outputs/check"),
) -> None:
    """Check the kernels against float64, time them against softmax, and say whether a patch pays off."""
    from .checking import check as run
    from .files import write_text

    found, is_correct = run(model, size, frames, **options)
    typer.echo(found)
    write_text(found, output / "check.md")
    typer.echo(f"Wrote {output / 'check.md'}, to paste into an issue")
    if not is_correct:
        raise typer.Exit(1)


@app.command()
@expand_options(*CHOICE)
def audit(
    family: Annotated[str, typer.Argument(help="wan, flux, mochi, …; mhla info lists all.")],
    prompt: Annotated[str, typer.Argument(help="Prompt; a class for dit.")],
    options: dict[str, Any],
    output: Annotated[Path, typer.Option(help="Folder for audit.json and audit.png.")] = Path("outputs/audit"),
    seed: Annotated[int, typer.Option(min=0, help="Noise seed.")] = 0,
) -> None:
    """Measure the error of a patch by layer, head and step, and the softmax mass of the listed blocks."""
    if options["patch"] is None:
        raise ValueError("audit needs a patch: give --patch, such as --patch faithful.")
    import torch

    from .auditing import audit as audit_model
    from .auditing import write_audit
    from .files import folder_for_results
    from .generation.pipelines import PipelineChoice

    choice = PipelineChoice(family, **{**options, "settings": {"num_inference_steps": 4, **options["settings"]}})
    with folder_for_results(output):
        pipe = choice.load([prompt])
        found = audit_model(pipe, lambda: choice.call(pipe, [prompt], [torch.Generator().manual_seed(seed)]))
        typer.echo(str(found))
        write_audit(found, output)
        typer.echo(f"Wrote {output / 'audit.json'} and {output / 'audit.png'}")


app.command("generate")(generate_command)
app.command("finetune")(finetune_command)
app.command("export")(export_command)
app.command("data")(data_command)
app.command("encode")(encode_command)
app.command("synthesize")(synthesize_command)
app.command("tune")(tune_command)
app.add_typer(evaluation, name="eval")
app.add_typer(bench, name="bench")


_NOT_FOR_USERS = ("should be kept in float32", "Expected types for id2label", "has to be divisible by 1.")
"""Parts of warnings of diffusers: about its own casts, a DiT's labels, and frame counts where the VAE keeps all."""


def _is_for_users(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _NOT_FOR_USERS)


def run() -> None:
    """Entry point: user errors are printed with their causes, and without a traceback unless it is asked for."""
    for name in ("models.modeling_utils", "pipelines.pipeline_utils", "pipelines.wan.pipeline_wan"):
        logging.getLogger(f"diffusers.{name}").addFilter(_is_for_users)
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        if _shown["traceback"]:
            raise
        typer.secho(f"Error: {_with_causes(error)}", fg=typer.colors.RED, err=True)
        typer.echo("mhla --traceback COMMAND … shows where it comes from.", err=True)
        raise SystemExit(1) from None


def _with_causes(error: BaseException) -> str:
    """Return the text of an error, and of those that caused it unless it contains them."""
    texts, cause = [str(error)], error.__cause__
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        texts = [f"{error.filename} does not exist; check the path."]
    while cause is not None:
        if str(cause) not in texts[-1]:
            texts.append(f"Caused by {type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n".join(texts)
