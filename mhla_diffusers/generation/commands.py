"""``mhla generate``."""

from pathlib import Path
from typing import Annotated

import typer

from .names import PipelineOptions, expand_options, read_prompts


@expand_options
def generate_command(
    family: Annotated[str, typer.Argument(help="dit, sana or wan.")],
    options: PipelineOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts; classes by number or name for dit.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Further prompts, one per line.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default outputs/<family>.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Of the noise, default 0; repeat for more samples.")
    ] = None,
) -> None:
    """Generate images or videos, one per prompt and seed. Resumes where it stopped.

    mhla generate wan "a seven moving left" "a three" --seed 0 --seed 1 --set num_inference_steps=20
    """
    from .generate import GenerationConfig, generate

    config = GenerationConfig(
        family,
        (*(prompts or ()), *(read_prompts(prompt_file) if prompt_file is not None else ())),
        output or Path("outputs", family),
        tuple(seeds or (0,)),
        **options.arguments(),
    )
    for task, made in generate(config):
        typer.echo(f"{'wrote' if made else 'kept '} {task.file}")
