"""The ``mhla`` command."""

from pathlib import Path
from typing import Annotated

import typer

from .analysis.commands import analyze
from .benchmark.commands import bench
from .demo.commands import demo
from .evaluation.commands import app as evaluation

app = typer.Typer(
    help="Linear-cost attention for diffusers pipelines.", no_args_is_help=True, pretty_exceptions_show_locals=False
)


app.add_typer(bench, name="bench")


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
    from .patching.conversion import convert_wan

    typer.echo(f"Wrote {convert_wan(checkpoint, folder, blocks=_parse_blocks(blocks), base_model=base_model)}")


_CONFIG = Annotated[Path, typer.Option(help="YAML file, for example one of finetune/configs.")]
_SIZES = Annotated[list[str] | None, typer.Option("--size", help="HEIGHTxWIDTH; several times for aspect buckets.")]
_PRECISION = Annotated[str, typer.Option(help="bf16, or no for float32.")]


@app.command()
def finetune(
    config: _CONFIG,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example stages.0.steps=200.")] = None,
    resume: Annotated[str | None, typer.Option(help='"latest", or the path of a checkpoint.')] = None,
    dry_run: Annotated[bool, typer.Option(help="Show parameters, memory and FLOPs, and stop.")] = False,
) -> None:
    """Adapt a patched model; the same as finetune/adapt.py, which accelerate launch starts on several devices."""
    import logging

    from .training import TrainingConfig, TrainingDivergedError
    from .training.commands import dry_run as estimate
    from .training.commands import finetune as adapt

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = TrainingConfig.from_yaml(config, overrides or [])
    if dry_run:
        typer.echo(estimate(settings))
        return
    try:
        result = adapt(settings, resume=resume)
    except TrainingDivergedError as error:
        raise ValueError(error) from error
    if not result.finished:
        raise typer.Exit(143)
    typer.echo(f"Wrote {result.result}")


@app.command()
def encode(
    model: Annotated[str, typer.Option(help="Hub id or folder of the pipeline.")],
    source: Annotated[
        Path,
        typer.Option(help="Folder of videos or images with captions, or webdataset's tar shards: folder or 'a/*.tar'."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the latents.")],
    frames: Annotated[int | None, typer.Option(help="Per video; 81 for Wan if left out.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second; 16 for Wan if left out.")] = None,
    sizes: _SIZES = None,
    workers: Annotated[int, typer.Option(help="Processes that read files.")] = 4,
    device: Annotated[str, typer.Option(help='"auto" for a GPU if there is one.')] = "auto",
    precision: _PRECISION = "bf16",
) -> None:
    """Turn videos or images with captions into latents for finetune. Goes on where it stopped."""
    import logging

    from .training.commands import encode as encode_files
    from .training.commands import make_clip

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    clip = make_clip(model, frames, fps, sizes)
    index = encode_files(model, source, output, clip, device=device, precision=precision, workers=workers)
    typer.echo(f"{output} holds {len(index.samples)} samples; {len(index.skipped)} files were skipped.")


@app.command()
def synthesize(
    model: Annotated[str, typer.Option(help="Hub id or folder of the pipeline.")],
    prompts: Annotated[Path, typer.Option(help="Text file, one prompt per line.")],
    output: Annotated[Path, typer.Option(help="Folder for the latents.")],
    frames: Annotated[int | None, typer.Option(help="Per video; 81 for Wan if left out.")] = None,
    sizes: _SIZES = None,
    steps: Annotated[int, typer.Option(help="Of the sampler.")] = 50,
    guidance: Annotated[float, typer.Option(help="Scale of classifier-free guidance.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: Annotated[str, typer.Option(help='"auto" for a GPU if there is one.')] = "auto",
    precision: _PRECISION = "bf16",
) -> None:
    """Make latents for finetune from prompts alone, with the unpatched model. Goes on where it stopped."""
    from .training.commands import make_clip, synthesize_latents

    clip = make_clip(model, frames, None, sizes)
    index = synthesize_latents(
        model,
        prompts,
        output,
        clip,
        steps=steps,
        guidance=guidance,
        seed=seed,
        device=device,
        precision=precision,
    )
    typer.echo(f"{output} holds {len(index.samples)} samples.")


# what follows the family is read by the parser that the scripts in pipelines/ use
@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def generate(context: typer.Context, family: Annotated[str, typer.Argument(help="dit, sana or wan.")]) -> None:
    """Generate images or videos: mhla generate wan "a seven moving left"; mhla generate wan --help for all options."""
    from .families import families
    from .generation.generate import run_command_line

    allowed = [known.name for known in families()]
    if family not in allowed:
        raise ValueError(f"family={family!r} is unknown; write mhla generate {'|'.join(allowed)} …")
    run_command_line(family, f"Generate with {family}, patched with MHLA or not.", context.args)


app.command()(analyze)
app.command()(demo)
app.add_typer(evaluation, name="eval")


def run() -> None:
    """Entry point: user errors are printed without a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from None
