"""``mhla analyze`` and ``mhla audit``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..generation.names import expand_options, pipeline_options

_FAMILY = Annotated[str, typer.Argument(help="wan, flux, mochi, …; mhla info lists all.")]
_PROMPT = Annotated[str, typer.Argument(help="What to generate; a class for dit.")]
_SEED = Annotated[int, typer.Option(help="Of the noise.")]


@expand_options(pipeline_options)
def analyze(
    family: _FAMILY,
    prompt: _PROMPT,
    options: dict[str, Any],
    output: Annotated[Path, typer.Option(help="Folder for analysis.json and pictures.")] = Path("outputs/analysis"),
    layers: Annotated[list[int] | None, typer.Option("--layer", help="Index; repeatable; default: all.")] = None,
    token: Annotated[int | None, typer.Option(help="Token whose attention is drawn; default: the middle one.")] = None,
    seed: _SEED = 0,
) -> None:
    """Rank, entropy and sensitivity of every layer's attention; attention maps and mixing matrices as pictures."""
    from ..reporting import text_table, wrap
    from .analyze import analyze as analyze_model

    with _short_run(family, prompt, seed, output, options) as (pipe, run):
        found, pictures = analyze_model(pipe, run, output, layers=layers, token=token)
    rows = []
    for layer in found:
        moves = "-" if layer.moves is None else f"{layer.moves**0.5:.1%}"
        cells = (str(layer.tokens), f"{layer.rank:.1f}", str(layer.rank_bound), f"{layer.entropy:.2f}", moves)
        rows.append((layer.name, layer.attention, *cells))
    header = ("layer", "attention", "tokens", "rank", "at most", "entropy", "moves")
    words = (
        "Rank: singular values above 1/10000 of the largest. Entropy: of a query's weights, in nats. Moves: how "
        "far the model's output moves when this layer alone is replaced, relative."
    )
    typer.echo("\n".join([text_table(header, rows, right=True), "", *wrap(words)]))
    for picture in pictures:
        typer.echo(f"Wrote {picture}")


@expand_options(pipeline_options)
def audit(
    family: _FAMILY,
    prompt: _PROMPT,
    options: dict[str, Any],
    output: Annotated[Path, typer.Option(help="Folder for audit.json and audit.png.")] = Path("outputs/audit"),
    seed: _SEED = 0,
) -> None:
    """What a patch costs: error of every layer, head and step, and how much weight the block lists hold."""
    if options["patch"] is None and options["weights"] is None:
        raise ValueError(
            "There is nothing to audit without a patch; give --patch, such as --patch default, or --weights."
        )
    from .audit import audit as audit_model
    from .audit import write_audit

    with _short_run(family, prompt, seed, output, options) as (pipe, run):
        found = audit_model(pipe, run)
        typer.echo(str(found))
        for file in write_audit(found, output):
            typer.echo(f"Wrote {file}")


@contextmanager
def _short_run(
    family: str, prompt: str, seed: int, output: Path, options: dict[str, Any]
) -> Iterator[tuple[Any, Callable[[], object]]]:
    """Load a pipeline for the context, in which ``output`` can be written, and yield it with a short run of it."""
    import torch

    from ..files import folder_for_results
    from ..generation.generate import MAX_SEED
    from ..generation.pipelines import PipelineChoice
    from ..settings import check_value

    check_value("seed", seed, int, at_least=0, at_most=MAX_SEED)
    choice = PipelineChoice(family, **{**options, "settings": {"num_inference_steps": 4, **options["settings"]}})
    with folder_for_results(output):
        choice.check()
        pipe = choice.load([prompt])
        yield pipe, lambda: choice.call(pipe, [prompt], [torch.Generator().manual_seed(seed)])
