"""Run the demo: generate with each attention that ships adapted, measure, adapt two live: one page."""

import shutil
import time
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
from .matrices import attention_matrices, mean_entropy, mean_rank
from .page import draw_losses, draw_samples

_LIVE = ("linear", "mhla")
"""Which variants are adapted live, by ``Variant.short``; SANA has the second alone."""
_TRANSFER = 0.4
"""Updates of attention transfer before them, as a part of the updates, where the recipe has any."""
_STEADY = 0.25
"""Spread of repeated times, (80th − 20th percentile) / median, beyond which the machine was busy."""
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
    seconds_per_step: float | None = None
    """Seconds of the transformer with two samples; None in all rows where the machine was too busy to measure."""


def run_demo(config: DemoConfig) -> list[Row]:
    """Compare the attentions that ship adapted, adapt two live, and write all of it into ``config.output``.

    Returns the rows of the table: with the same seed the same on the same CPU, but for the seconds. OSError if the
    folder cannot be written, ImportError without matplotlib, both before any work.
    """
    check_writable(config.output)
    require_matplotlib()
    started = time.perf_counter()
    show_loading(False)
    try:
        demo = Demo(config)
        rows = demo.compare()
        if config.updates:
            demo.adapt_live(goal=rows[0].held_out_loss)
    finally:
        show_loading(True)
    demo.write(minutes=(time.perf_counter() - started) / 60)
    return rows


class Demo:
    """The parts of the demo; each adds a section to the page."""

    def __init__(self, config: DemoConfig) -> None:
        self.config, self.tiny, self.output = config, tiny_pipeline(config.family), config.output
        self.adaptation = Adaptation(
            self.tiny, config.samples, config.held_out, config.seed, max(1, config.updates // 5), config.device
        )
        self.yardstick = Yardstick(self.tiny, self.tiny.random_scenes(config.scenes, config.seed), config.seed)
        self.variants = variants(self.tiny)
        self.pipes = {variant.name: load_variant(self.tiny, variant, config.device) for variant in self.variants}
        self.sections: dict[str, str] = {}
        """Heading → HTML."""
        self.results: dict[str, Any] = {"config": {**asdict(config), "output": str(config.output)}}
        typer.echo(f"tiny-{config.family}: {len(self.pipes)} attentions, {config.scenes} scenes")

    def compare(self) -> list[Row]:
        """Generate and measure with every variant: the table, and the same noise side by side.

        Forwards have two samples, as guidance has them, and all take turns. On a busy machine there are no times.
        """
        runs: measure.Runs = {
            measure.Row(name): partial(predict, pipe.transformer, self._last_samples(pipe, 2))
            for name, pipe in self.pipes.items()
        }
        with torch.no_grad():
            found = measure.time_interleaved(runs, torch.device(self.config.device), seconds=2.0, least=7)
        timed = {row.variant: row for row in found}
        is_steady = all(row.median is not None and row.spread <= _STEADY for row in found)
        pictures, rows, cells = {}, [], []
        for name, pipe in self.pipes.items():
            pictures[name] = self.yardstick.generate(pipe)
            call = TransformerCall((), arguments_of(pipe.transformer, self._last_samples(pipe, 1)))
            matrices = attention_matrices(pipe.transformer, call)
            row = Row(
                name=name,
                held_out_loss=fmean(self.adaptation.held_out_losses(pipe)),
                digit_accuracy=self.yardstick.accuracy(pictures[name]),
                frechet_distance=self.yardstick.distance(pictures[name]),
                rank=mean_rank(matrices),
                entropy=mean_entropy(matrices),
                seconds_per_step=timed[name].median if is_steady else None,
            )
            rows.append(row)
            milliseconds = [] if row.seconds_per_step is None else [f"{1000 * row.seconds_per_step:.1f}"]
            cells.append([name, f"{row.held_out_loss:.4f}", f"{row.digit_accuracy:.1%}"])
            cells[-1] += [f"{row.frechet_distance:.2f}", f"{row.rank:.1f}", f"{row.entropy:.2f}", *milliseconds]
            typer.echo(f"  {name}: {row.digit_accuracy:.0%} of the digits recognised")
        self.results["rows"] = [asdict(row) for row in rows]
        header = _HEADER[: len(cells[0])]
        typer.echo(f"\n{text_table(header, cells, right=True)}\n")
        remark = f"Every row but the first is a patch that ships adapted; {rows[0].name} was trained on for as long."
        if not is_steady:
            remark += " There are no times, since the machine was busy: they spread too much to be reliable."
        samples = draw_samples(pictures, self.yardstick.scenes, self.output / "samples")
        media = html_media(samples, "What each attention generates, by the same noise")
        self.sections["Is it good?"] = f"<p>{escape(remark)}</p>{html_table(header, cells)}{media}"
        return rows

    def _last_samples(self, pipe: Any, count: int) -> Any:
        """Return the last samples of the data, half noised."""
        total = len(self.adaptation.data)
        return self.adaptation.batch(pipe.transformer, range(total - count, total), torch.full((count,), 0.5))

    def adapt_live(self, goal: float) -> None:
        """Adapt two by a shortened recipe, from the weights that ship; ``loss.png`` is redrawn as they go on."""
        live = [variant for variant in self.variants if variant.short in _LIVE]
        updates, file = self.config.updates, self.output / "loss.png"
        names = " and ".join(variant.name for variant in live)
        typer.echo(f"Live: {names}, {updates} updates each; {file} is drawn again as they go on")
        shutil.rmtree(self.output / "live", ignore_errors=True)  # from an earlier demo, perhaps with another length
        curves: dict[str, list[tuple[int, float]]] = {}
        for variant in live[::-1]:
            run = self.output / "live" / variant.short

            def redraw(_: torch.nn.Module, __: Path, name: str = variant.name, run: Path = run) -> None:
                curves[name] = held_out_curve(run)
                draw_losses(curves, goal, file)

            *transfer, end_to_end = runs_of(variant, self.tiny)
            first = [{**settings, "steps": max(1, round(_TRANSFER * updates))} for settings in transfer]
            runs = *first, {**end_to_end, "steps": updates}
            self.adaptation.adapt(self.adaptation.patched(variant.patch), runs, run, redraw)
            curves[variant.name] = held_out_curve(run)
        self.results["live"] = curves
        heading = "Held-out loss while two of them adapt"
        self.sections[heading] = html_media(file, heading)

    def write(self, minutes: float) -> None:
        """Write the record and last the page, whose images are inside it, so that the file can be sent alone."""
        conditions = measure.gather_conditions(torch.device(self.config.device))
        circumstances = {name: conditions[name] for name in ("device", "torch", "date")} | {"minutes": f"{minutes:.1f}"}
        write_json({**self.results, "circumstances": circumstances}, self.output / "results.json")
        facts = escape(", ".join(f"{name}: {value}" for name, value in circumstances.items()))
        said = "Everything on this page was computed in one run"
        sections = "".join(f"<h2>{escape(heading)}</h2>{part}" for heading, part in self.sections.items())
        page = html_page(f"MHLA on tiny-{self.tiny.family}", f"<p>{said} ({facts}).</p>{sections}")
        write_text(page, self.output / "index.html")
        typer.echo(f"{self.output / 'index.html'} shows all of it.")
