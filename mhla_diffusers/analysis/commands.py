"""``mhla analyze``."""

from pathlib import Path
from typing import Annotated

import typer


def analyze(
    family: Annotated[str, typer.Argument(help="dit, sana or wan.")],
    prompt: Annotated[str, typer.Argument(help="What to generate; a class for dit.")],
    output: Annotated[Path, typer.Option(help="Folder for analysis.json and pictures.")] = Path("outputs/analysis"),
    model: Annotated[str | None, typer.Option(help="Hub id or folder; the tiny pipeline if left out.")] = None,
    patch: Annotated[str | None, typer.Option(help="Name or YAML file of a patch.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="What mhla finetune left, or folder or Hub id of a patch.")
    ] = None,
    layers: Annotated[list[int] | None, typer.Option("--layer", help="Index; several times; all if left out.")] = None,
    token: Annotated[int | None, typer.Option(help="Whose attention is drawn; the middle one if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …, auto")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the pipeline's call.")] = None,
) -> None:
    """Rank, entropy and sensitivity of every layer's attention; attention maps and mixing matrices as pictures."""
    import torch
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from ..files import folder_for_results
    from ..generation.generate import GenerationConfig
    from ..generation.names import parse_settings
    from .run import analyze as analyze_model

    chosen = parse_settings(settings or [])
    config = GenerationConfig(
        family,
        (prompt,),
        output,
        seeds=(seed,),
        model=model,
        patch=patch,
        weights=weights,
        device=device,
        dtype=dtype,
        settings={"num_inference_steps": 4, **chosen},
    )
    with folder_for_results(output):
        config.check()
        pipe = config.load(config.prompts)

        def run() -> None:
            config.generate(pipe, [prompt], [torch.Generator().manual_seed(seed)])

        result = analyze_model(pipe, run, output, layers=layers, token=token)
    table = Table("layer", "attention", "tokens", "rank", "at most", "entropy", "moves", box=SIMPLE, pad_edge=False)
    for layer in result.layers:
        change = "-" if result.sensitivity is None else f"{result.sensitivity.get(layer.name, 0.0) ** 0.5:.1%}"
        cells = (str(layer.tokens), f"{layer.rank:.1f}", str(layer.rank_bound), f"{layer.entropy:.2f}", change)
        table.add_row(layer.name, layer.attention, *cells)
    Console().print(table)
    typer.echo(
        "Rank: singular values above 1/10000 of the largest. Entropy: of a query's weights, in nats. Moves: how "
        "far the model's output moves when this layer alone is replaced, relative."
    )
    for picture in result.pictures:
        typer.echo(f"Wrote {picture}")
