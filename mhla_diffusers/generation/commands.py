"""``mhla generate``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import check
from .names import CHOICE, expand_options, read_prompts


@expand_options(*CHOICE)
def generate_command(
    family: Annotated[str, typer.Argument(help="wan, flux, mochi, …; mhla info lists all.")],
    options: dict[str, Any],
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One or more prompts; for dit, class names or numbers.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompts", exists=True, help="One per line, or a .csv or .jsonl with columns text and image."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(exists=True, help="Image for image-to-video, for prompts without one in the file.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; default: outputs/<family>.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", min=0, help="Noise seed, default 0; repeat for more samples.")
    ] = None,
) -> None:
    """Generate images or videos, one per prompt and seed. Resumes where it stopped; accelerate launch shares the work.

    mhla generate wan "a seven moving left" "a three" --patch faithful --seed 0 --seed 1
    """
    from .generate import SampleSet, generate_share, plan_samples
    from .pipelines import family_named

    rows = [(prompt, image) for prompt in prompts or ()]
    rows += [(prompt, own or image) for prompt, own in (read_prompts(prompt_file) if prompt_file else ())]
    check(bool(rows), f"No prompt: type mhla generate {family} PROMPT, or give --prompts FILE.")
    samples = plan_samples(rows, family_named(family).calling.suffix, seeds or (0,))
    folder = output or Path("outputs", family)
    chosen = SampleSet(family, samples, folder, **options)
    typer.echo(chosen.summary, err=True)
    generate_share(chosen, lambda one, is_new: typer.echo(f"{'wrote' if is_new else 'kept '} {folder / one.file}"))
