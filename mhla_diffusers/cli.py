"""The ``mhla`` command."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Linear-cost attention for diffusers pipelines.", no_args_is_help=True, pretty_exceptions_show_locals=False
)


def _parse_blocks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of block counts; write for example 7,3,5.") from None


@app.callback()
def main() -> None:
    """Linear-cost attention for diffusers pipelines."""


@app.command()
def info(patch: Annotated[str | None, typer.Option(help="Show one patch: name or YAML path.")] = None) -> None:
    """Versions, devices, backends, supported models and ready patches."""
    from .info import print_info, print_patch

    if patch is None:
        print_info()
    else:
        print_patch(patch)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="Safetensors file trained with the paper's Wan code.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the patch.")],
    blocks: Annotated[str | None, typer.Option(help="Block counts, for example 3,5,10.")] = None,
    base_model: Annotated[str, typer.Option(help="Hub id to record.")] = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
) -> None:
    """Convert a Wan checkpoint of the paper's code into a patch for load_mhla."""
    from .convert import convert_wan

    typer.echo(f"Wrote {convert_wan(checkpoint, folder, blocks=_parse_blocks(blocks), base_model=base_model)}")


def run() -> None:
    """Entry point: user errors are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from None
