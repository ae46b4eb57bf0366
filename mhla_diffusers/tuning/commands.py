"""``mhla tune``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..generation.names import call_options, device_options, expand_options, read_prompts


@expand_options(device_options, call_options)
def tune_command(
    model: Annotated[str, typer.Argument(help="tiny-wan (or wan), or the Hub id or folder of a pipeline.")],
    prompts: Annotated[
        Path, typer.Option(exists=True, help="File with two to ten prompts, one per line, most typical first.")
    ],
    options: dict[str, Any],
    seed: Annotated[int, typer.Option(min=0, help="Noise seed of every call.")] = 0,
    psnr: Annotated[
        float | None, typer.Option(help="Target PSNR against the unpatched clips, in dB; default: 30.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Target speedup over the unpatched model, instead of --psnr.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Start no call after this many minutes.")] = 30,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; default: outputs/tune/<model>.")] = None,
) -> None:
    """Find settings for a model, on your GPU with your prompts. Resumes where it stopped.

    Exits with 3 if no candidate reaches the target.
    """
    import torch

    from ..config import USUAL_STEPS
    from ..generation.pipelines import PipelineChoice, family_of
    from ..tiny import TINY
    from .candidates import Target
    from .run import tune

    Target(psnr, speedup)  # raises before a pipeline is loaded
    texts, name = [text for text, _ in read_prompts(prompts)], f"tiny-{model}" if model in TINY else model
    choice = PipelineChoice(family_of(name).name, model=name, **options)
    pipe = choice.load(texts)
    typer.echo(f"{choice.summary}; after Ctrl-C the same command goes on", err=True)
    call = dict(choice.known_arguments)
    steps = call.pop("num_inference_steps", USUAL_STEPS)
    tuned = tune(
        pipe,
        lambda prompt: choice.call(pipe, [prompt], [torch.Generator().manual_seed(seed)])[0],
        texts,
        output or Path("outputs/tune", Path(name).name),
        psnr=psnr,
        speedup=speedup,
        minutes=minutes,
        steps=steps,
        settings={"model": name, **call, "dtype": choice.dtype, "seed": seed},
    )
    typer.echo(f"Wrote {tuned.file.with_name('tune.html')}")
    if tuned.best.speedup < 1:
        typer.echo("Slower than unpatched: leave the patch off at this size.")
    typer.echo(str(tuned))
    if not tuned.is_met:
        raise typer.Exit(3)
