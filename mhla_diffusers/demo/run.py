"""Run the demo: generate with each attention that ships adapted, measure, adapt two live: one page."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from pydantic import Field

from ..auditing import TransformerCall
from ..benchmark import measure
from ..families import arguments_of, predict
from ..files import check_writable, write_json, write_text
from ..reporting import html_media, html_page, html_table, require_matplotlib, show_loading, text_table
from ..settings import Count, Integer, Seed, Settings, settings
from ..tiny import tiny_pipeline
from .adaptation import Adaptation, held_out_curve, load_variant, runs_of, variants
from .judging import Yardstick
from .matrices import each_attention_matrix, entropy, rank
from .page import draw_losses, draw_samples

_LIVE = ("linear", "mhla")
"""Which variants are adapted live, by ``Variant.short``; SANA has the second alone."""
_TRANSFER = 0.4
"""Updates of attention transfer before them, as a part of the updates, where the recipe has any."""
_HEADER = (
    "attention",
    "held-out loss ↓",
    "digit accuracy ↑",
    "Fréchet distance ↓",
    "rank of attention ↑",
    "entropy (nats)",
    "ms per transformer step ↓",
)


@settings()
class DemoConfig(Settings):
    """What the demo does; ValueError for a value that is not allowed."""

    output: Path = Path("outputs/demo")
    family: str = "wan"
    device: str = "cpu"
    seed: Seed = 0
    updates: Count = 60
    """Updates end to end, after attention transfer, of each attention that is adapted live; 0 for none."""
    scenes: Annotated[Integer, Field(ge=2)] = 12
    """Scenes that every variant generates."""
    samples: Annotated[Integer, Field(ge=16)] = 256
    """Scenes to adapt on."""
    held_out: Annotated[Integer, Field(ge=2)] = 16
    """Scenes of held-out digits for the loss."""

    def __post_init__(self) -> None:
        tiny_pipeline(self.family)


@dataclass(frozen=True)
class Row:
    """What was measured of one variant."""

    name: str
    held_out_loss: float
    digit_accuracy: float
    frechet_distance: float
    rank: float
    entropy: float
    seconds_per_step: float | None
    """Median seconds of the transformer with two samples."""


def run_demo(config: DemoConfig) -> list[Row]:
    """Compare the attentions that ship adapted, adapt two live, and write all of it into ``config.output``.

    Returns the rows of the table: with the same seed the same on the same CPU, but for the seconds. OSError if the
    folder cannot be written, ImportError without matplotlib, both before any work.
    """
    check_writable(config.output)
    require_matplotlib()
    started, tiny = time.perf_counter(), tiny_pipeline(config.family)
    show_loading(False)
    try:
        every = max(1, config.updates // 5)
        adaptation = Adaptation(tiny, config.samples, config.held_out, config.seed, every, config.device)
        yardstick = Yardstick(tiny, tiny.random_scenes(config.scenes, config.seed), config.seed)
        pipes = {one.name: load_variant(tiny, one, config.device) for one in variants(tiny)}
        typer.echo(f"tiny-{config.family}: {len(pipes)} attentions, {config.scenes} scenes")
        pictures = {name: yardstick.generate(pipe) for name, pipe in pipes.items()}
        rows = _measure(pipes, pictures, adaptation, yardstick)
        table = _HEADER, [_cells(row) for row in rows]
        typer.echo(f"\n{text_table(*table, right=True)}\n")
        curves = _adapt_live(config, adaptation) if config.updates else {}
    finally:
        show_loading(True)
    samples = draw_samples(pictures, yardstick.scenes, config.output / "samples")
    remark = f"Every row but the first is a patch that ships adapted; {rows[0].name} was trained on for as long."
    body = f"<h2>Is it good?</h2><p>{escape(remark)}</p>{html_table(*table)}"
    body += html_media(samples, "What each attention generates, by the same noise")
    if curves:
        draw_losses(curves, rows[0].held_out_loss, config.output / "loss.png")
        heading = "Held-out loss while two of them adapt"
        body += f"<h2>{heading}</h2>{html_media(config.output / 'loss.png', heading)}"
    conditions = measure.gather_conditions(torch.device(config.device))
    circumstances = {name: conditions[name] for name in ("device", "torch", "date")}
    circumstances["minutes"] = f"{(time.perf_counter() - started) / 60:.1f}"
    settings = {**asdict(config), "output": str(config.output)}
    results = {"config": settings, "rows": [asdict(row) for row in rows], "live": curves}
    write_json({**results, "circumstances": circumstances}, config.output / "results.json")
    facts = escape(", ".join(f"{name}: {value}" for name, value in circumstances.items()))
    page = config.output / "index.html"
    said = f"<p>Everything on this page was computed in one run ({facts}).</p>"
    write_text(html_page(f"MHLA on tiny-{config.family}", said + body), page)
    typer.echo(f"{page} shows all of it.")
    return rows


def _measure(
    pipes: Mapping[str, Any],
    pictures: Mapping[str, Sequence[torch.Tensor]],
    adaptation: Adaptation,
    yardstick: Yardstick,
) -> list[Row]:
    """Measure every variant; timed forwards take turns and have two samples, as guidance has them."""

    def last_samples(pipe: Any, count: int) -> Any:
        total = len(adaptation.data)  # half noised
        return adaptation.batch(pipe.transformer, range(total - count, total), torch.full((count,), 0.5))

    runs: measure.Runs = {
        measure.Row(name): partial(predict, pipe.transformer, last_samples(pipe, 2)) for name, pipe in pipes.items()
    }
    with torch.no_grad():
        found = measure.time_interleaved(runs, torch.device(adaptation.device), seconds=2.0, least=7)
    seconds = {row.variant: row.median for row in found}
    rows = []
    for name, pipe in pipes.items():
        call = TransformerCall((), arguments_of(pipe.transformer, last_samples(pipe, 1)))
        matrices = dict(each_attention_matrix(pipe.transformer, call)).values()
        rows.append(
            Row(
                name=name,
                held_out_loss=fmean(adaptation.held_out_losses(pipe)),
                digit_accuracy=yardstick.accuracy(pictures[name]),
                frechet_distance=yardstick.distance(pictures[name]),
                rank=fmean(map(rank, matrices)),
                entropy=fmean(map(entropy, matrices)),
                seconds_per_step=seconds[name],
            )
        )
    return rows


def _cells(row: Row) -> list[str]:
    cells = [row.name, f"{row.held_out_loss:.4f}", f"{row.digit_accuracy:.1%}", f"{row.frechet_distance:.2f}"]
    return [*cells, f"{row.rank:.1f}", f"{row.entropy:.2f}", f"{1000 * (row.seconds_per_step or math.nan):.1f}"]


def _adapt_live(config: DemoConfig, adaptation: Adaptation) -> dict[str, list[tuple[int, float]]]:
    """Adapt two by a shortened recipe, from the weights that ship, and return their held-out losses."""
    tiny, folder = adaptation.tiny, config.output / "live"
    shutil.rmtree(folder, ignore_errors=True)  # from an earlier demo, perhaps with another length
    curves = {}
    for variant in [variant for variant in variants(tiny) if variant.short in _LIVE]:
        typer.echo(f"Live: {variant.name}, {config.updates} updates")
        *transfer, end_to_end = runs_of(variant, tiny)
        first = [{**settings, "steps": max(1, round(_TRANSFER * config.updates))} for settings in transfer]
        runs = *first, {**end_to_end, "steps": config.updates}
        adaptation.adapt(adaptation.patched(variant.patch), runs, folder / variant.short)
        curves[variant.name] = held_out_curve(folder / variant.short)
    return curves
