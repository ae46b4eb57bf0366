"""``mhla generate``."""

from pathlib import Path
from typing import Annotated

import typer

from .names import PipelineOptions, expand_options, read_prompt_table


@expand_options
def generate_command(
    family: Annotated[str, typer.Argument(help="wan, flux, mochi, …; mhla info lists all.")],
    options: PipelineOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts; classes by number or name for dit.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Further prompts, one per line; or a .csv or .jsonl with columns text and image."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="Picture for image-to-video, of all prompts without one in the file.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default outputs/<family>.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Of the noise, default 0; repeat for more samples.")
    ] = None,
) -> None:
    """Generate images or videos, one per prompt and seed. Resumes where it stopped.

    mhla generate wan "a seven moving left" "a three" --seed 0 --seed 1 --set num_inference_steps=20
    """
    from .generate import GenerationConfig, generate

    rows: list[tuple[str, Path | None]] = [(prompt, None) for prompt in prompts or ()]
    rows += read_prompt_table(prompt_file) if prompt_file is not None else ()
    config = GenerationConfig(
        family,
        tuple(prompt for prompt, _ in rows),
        output or Path("outputs", family),
        tuple(seeds or (0,)),
        tuple(own or image for _, own in rows),
        **options.arguments(),
    )
    for task, made in generate(config):
        typer.echo(f"{'wrote' if made else 'kept '} {task.file}")
