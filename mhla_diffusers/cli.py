"""The ``mhla`` command: one line per subcommand, each written in the room that it belongs to."""

from pathlib import Path
from typing import Annotated

import typer

from .analysis.commands import analyze
from .benchmark.commands import bench
from .demo.commands import demo
from .evaluation.commands import app as evaluation
from .generation.generate import generate_command
from .info import info_command
from .training.commands import encode_command, finetune_command, synthesize_command

app = typer.Typer(
    help="Linear-cost attention for diffusers pipelines.", no_args_is_help=True, pretty_exceptions_show_locals=False
)


@app.callback()
def main() -> None:
    """Linear-cost attention for diffusers pipelines."""


@app.command()
def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="Safetensors file trained with the paper's Wan code, or an .index.json.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write the patch.")],
    blocks: Annotated[str | None, typer.Option(help="Block counts, for example 3,5,10.")] = None,
    base_model: Annotated[str, typer.Option(help="Hub id to record.")] = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
) -> None:
    """Convert a Wan checkpoint of the paper's code into a patch for load_mhla."""
    from .patching import convert_wan

    typer.echo(f"Wrote {convert_wan(checkpoint, folder, blocks=_parse_blocks(blocks), base_model=base_model)}")


def _parse_blocks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of block counts; write for example 7,3,5.") from None


app.command("info")(info_command)
app.command("generate")(generate_command)
app.command("finetune")(finetune_command)
app.command("encode")(encode_command)
app.command("synthesize")(synthesize_command)
app.command("analyze")(analyze)
app.command("demo")(demo)
app.add_typer(evaluation, name="eval")
app.add_typer(bench, name="bench")


def run() -> None:
    """Entry point: user errors are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from None
