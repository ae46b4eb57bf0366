"""``mhla eval``."""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Quality of what a model generates.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Quality of what a model generates."""


_OUTPUT = Annotated[Path | None, typer.Option(help="JSON file to write as well.")]
_WEIGHTS = Annotated[Path | None, typer.Option(help="File with the weights of Inception.")]
_EXTRACTOR = Annotated[
    str, typer.Option(help="adm, clean, or package.module:callable that makes features of uint8 images (B, 3, H, W).")
]
_DEVICE = Annotated[str, typer.Option(help="cpu, cuda, …")]


@app.command()
def fid(
    samples: Annotated[Path, typer.Argument(help="Folder of images, or npz with arr_0.")],
    reference: Annotated[Path, typer.Argument(help="The same, or statistics: .safetensors or npz with mu, sigma.")],
    extractor: _EXTRACTOR = "adm",
    weights: _WEIGHTS = None,
    device: _DEVICE = "cpu",
    batch_size: Annotated[int, typer.Option(help="Images per call of the extractor.")] = 50,
    output: _OUTPUT = None,
) -> None:
    """FID and, where the extractor has features for them, sFID, Inception score, precision, recall and KID."""
    from .extractors import load_extractor
    from .fid import measure_images

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = load_extractor(extractor, weights, device)
        scores = measure_images(
            samples, reference, chosen, name=extractor, batch_size=batch_size, progress=_show_progress
        )
    for warning in said:
        typer.secho(f"Warning: {warning.message}", err=True, fg=typer.colors.YELLOW)
    _report({"extractor": extractor, **scores.measured()}, output)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done} / {total}" + ("\n" if done == total else ""))
        sys.stderr.flush()


def _report(result: dict[str, Any], output: Path | None) -> None:
    """Print a result line by line, and write it where that is asked for."""
    from .results import write_json

    for name, value in result.items():
        typer.echo(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    if output is not None:
        write_json(result, output)


@app.command()
def vbench(
    videos: Annotated[Path | None, typer.Argument(help="Folder of the suite's videos.")] = None,
    source: Annotated[list[Path] | None, typer.Option("--from", help="Results of VBench: files or folders.")] = None,
    suite: Annotated[Path | None, typer.Option(help="VBench_full_info.json, which comes with VBench.")] = None,
    vbench_python: Annotated[Path | None, typer.Option(help="Python of VBench's own environment.")] = None,
    dimensions: Annotated[list[str] | None, typer.Option("--dimension", help="Several times; all if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for results, totals and the log.")] = Path("outputs/vbench"),
    device: _DEVICE = "cuda",
) -> None:
    """Run VBench in its own environment, or read its results: Quality, Semantic, Total and the dimensions."""
    from dataclasses import asdict

    from .vbench.run import VBenchConfig, run_vbench
    from .vbench.scores import DIMENSIONS, read_results, total_scores

    if source:
        scores = read_results(source)
    elif videos is None or suite is None or vbench_python is None:
        raise ValueError("Give --from with results, or the folder of videos with --suite and --vbench-python.")
    else:
        chosen = tuple(dimensions or DIMENSIONS)
        config = VBenchConfig(vbench_python, suite, videos, output, chosen, device)
        for name, score, now in run_vbench(config):
            typer.echo(f"{name}: {score:.4f}{'' if now else ' (before)'}")
        if set(chosen) != set(DIMENSIONS):
            return
        scores = read_results([output])
    totals = asdict(total_scores(scores))
    _report({**{name: scores[name] for name in DIMENSIONS}, **totals}, output / "vbench.json")
