"""Run the demo: generate with each attention that ships adapted, measure, time, stream, adapt two live: one page."""

import logging
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..analysis import attention_matrices, mean_entropy, mean_rank
from ..analysis.pictures import draw_mixing_matrices
from ..attention import initial_mixing
from ..benchmark.timing import Budget, time_interleaved
from ..devices import free_threads, threads
from ..families import arguments_of, predict
from ..files import check_writable, write_json
from ..patching import TransformerCall, mhla_layers
from ..reporting import html_media, html_table, require_matplotlib, text_table
from ..tiny import load_tiny, tiny_pipeline
from . import speed, streaming
from .adaptation import (
    Adaptation,
    Variant,
    digit_latents,
    held_out_curve,
    load_variant,
    recipe_of,
    streamed_variant,
    variants,
)
from .few_steps import FewStepClips, judge_few_steps
from .judging import Yardstick, digit_accuracy
from .page import draw_clips, draw_loss_curves, draw_pictures, file_name, write_page

_STREAMED = 3
"""Scenes that are generated as a longer clip."""
_LIVE = ("exact", "linear")
"""Which variants are adapted live; SANA has MHLA instead."""
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

Curves = dict[str, list[tuple[int, float]]]
"""Name of the attention → (updates, held-out loss)."""


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does."""

    output: Path = Path("outputs/demo")
    family: str = "wan"
    device: str = "cpu"
    seed: int = 0
    updates: int = 60
    """Of each attention that is adapted live, end to end, after attention transfer; 0 for none."""
    scenes: int = 12
    """Scenes that every variant generates."""
    samples: int = 256
    """Scenes to adapt on."""
    held_out: int = 16
    """Scenes of held-out digits for the loss."""
    speed_seconds: float = 40.0
    """For timing attention over growing N; 0 for none."""

    def __post_init__(self) -> None:
        tiny_pipeline(self.family)
        for name, least in (("updates", 0), ("scenes", 2), ("samples", 16), ("held_out", 2), ("speed_seconds", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")


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
    """Of the transformer with two samples; None in all rows where the machine was too busy to measure."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns as text."""
        return (
            self.name,
            f"{self.held_out_loss:.4f}",
            f"{self.digit_accuracy:.1%}",
            f"{self.frechet_distance:.2f}",
            f"{self.rank:.1f}",
            f"{self.entropy:.2f}",
            *([f"{1000 * self.seconds_per_step:.1f}"] if self.seconds_per_step is not None else []),
        )


@dataclass(frozen=True)
class Outcome:
    """One variant: its row, what it generated, and what it learned to mix."""

    row: Row
    pictures: list[torch.Tensor]
    """For every scene (F, 64, 64) in [0, 1]."""
    mixing: dict[str, torch.Tensor] = field(default_factory=dict)
    """The first layer's mixing matrix before and after, by the title of its picture; empty where it is not learned."""


def run_demo(config: DemoConfig) -> list[Row]:
    """Compare the attentions that ship adapted, adapt two live, and write all of it into ``config.output``.

    Returns:
        The rows of the table. With the same seed they are the same on the same CPU, but for the seconds.

    Raises:
        OSError: the output folder cannot be written; said before any work.
        ImportError: matplotlib is missing.
        DamagedAssetError: files of the tiny pipeline are missing or damaged.
    """
    check_writable(config.output)
    require_matplotlib()
    started, tiny = time.perf_counter(), tiny_pipeline(config.family)
    shown, streams = variants(tiny), []
    with _quiet(), threads(free_threads()):
        _say(
            f"tiny-{config.family}: {len(shown)} attentions, {config.scenes} scenes, {torch.get_num_threads()} threads"
        )
        adaptation = Adaptation(
            tiny,
            digit_latents(load_tiny(config.family, config.device), tiny, config.samples, config.held_out, config.seed),
            held_out=config.held_out,
            seed=config.seed,
            validate_every=max(1, config.updates // 5),
            batch_size=tiny.batch_size,
            device=config.device,
        )
        yardstick = Yardstick.of(tiny, config.scenes, config.seed)
        pipes, outcomes = [load_variant(tiny, variant, config.device) for variant in shown], []
        for variant, pipe in zip(shown, pipes, strict=True):
            outcomes.append(examine(variant, pipe, adaptation, yardstick))
            _say(f"  {variant.name}: {outcomes[-1].row.digit_accuracy:.0%} of the digits recognised")
        outcomes = time_all(pipes, outcomes, adaptation)
        rows = [outcome.row for outcome in outcomes]
        _say(f"\n{text_table(_header_of(rows), (row.cells for row in rows), right=True)}\n")
        growth = _grow(config)
        if streamed_variant(tiny) is not None:
            streams = streaming.judge_streams(tiny, yardstick.scenes[:_STREAMED], config.seed, config.device)
            _say(f"{text_table(streaming.HEADER, (one.cells for one in streams), right=True)}\n")
        few = judge_few_steps(tiny, yardstick, config.device)
        curves = _adapt_live(config, shown, adaptation, rows[0].held_out_loss)
    circumstances = {
        "machine": f"{platform.processor() or platform.machine()}, {config.device}",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "minutes": f"{(time.perf_counter() - started) / 60:.1f}",
    }
    _write_folder(config, yardstick, outcomes, growth, streams, few, curves, circumstances)
    _say(f"{config.output / 'index.html'} shows all of it.")
    return rows


def examine(variant: Variant, pipe: Any, adaptation: Adaptation, yardstick: Yardstick) -> Outcome:
    """Generate and measure with a pipeline of :func:`load_variant`, all but the time."""
    pictures = yardstick.generate(pipe)
    matrices = attention_matrices(
        pipe.transformer, TransformerCall((), arguments_of(pipe.transformer, _last_samples(pipe, adaptation, 1)))
    )
    row = Row(
        name=variant.name,
        held_out_loss=fmean(adaptation.held_out_losses(pipe)),
        digit_accuracy=digit_accuracy(pictures, yardstick.scenes, yardstick.tiny, yardstick.classifier),
        frechet_distance=yardstick.distance(pictures),
        rank=mean_rank(matrices),
        entropy=mean_entropy(matrices),
    )
    if variant.patch is None or not variant.patch.mixing_learnable:
        return Outcome(row, pictures)
    name, layer = next(iter(mhla_layers(pipe).items()))
    before = initial_mixing(variant.patch.blocks, variant.patch.mixing_init)
    return Outcome(row, pictures, {f"{name}, before": before, f"{name}, after": layer.mixing})


def _last_samples(pipe: Any, adaptation: Adaptation, samples: int) -> Any:
    """The last samples of the data, half noised."""
    count = len(adaptation.data)
    return adaptation.batch(pipe.transformer, range(count - samples, count), torch.full((samples,), 0.5))


@torch.no_grad()
def time_all(pipes: Sequence[Any], outcomes: Sequence[Outcome], adaptation: Adaptation) -> list[Outcome]:
    """The outcomes with the median time of a forward with two samples: all in turns, on one thread of a CPU.

    Several threads that wait for each other would measure what else the machine does. The times stay out where their
    spread says that it was busy all the same.
    """
    # two samples, as classifier-free guidance has them
    runs = {
        outcome.row.name: partial(predict, pipe.transformer, _last_samples(pipe, adaptation, 2))
        for outcome, pipe in zip(outcomes, pipes, strict=True)
    }
    with threads(1):
        timed = time_interleaved(runs, torch.device(adaptation.device), Budget(seconds=2.0, least=7))
    timings = [timed[outcome.row.name].timing for outcome in outcomes]
    if any(timing is None or timing.p80 - timing.p20 > _STEADY * timing.median for timing in timings):
        return list(outcomes)
    return [
        replace(outcome, row=replace(outcome.row, seconds_per_step=timing.median if timing else None))
        for outcome, timing in zip(outcomes, timings, strict=True)
    ]


def _grow(config: DemoConfig) -> speed.Growth | None:
    """Time attention over growing N, unless there is to be none; ``speed.json`` and ``speed.png`` have the times."""
    if not config.speed_seconds:
        return None
    _say(f"Timing attention over growing N, for {config.speed_seconds:g} s at most")
    growth = speed.measure_growth(torch.device(config.device), config.speed_seconds)
    write_json(asdict(growth), config.output / "speed.json")
    speed.draw_growth(growth, speed.shipped_growth(), config.output / "speed.png")
    _say(f"  {speed.tell_growth(growth)}\n")
    return growth


def _adapt_live(config: DemoConfig, shown: Sequence[Variant], adaptation: Adaptation, goal: float) -> Curves:
    """Adapt two by a shortened recipe, from the weights that ship; ``loss.png`` is redrawn as the loss is measured."""
    if not config.updates:
        return {}
    live = [variant for variant in shown if variant.short in _LIVE][::-1] or [shown[-1]]
    names, picture = " and ".join(variant.name for variant in live[::-1]), config.output / "loss.png"
    _say(f"Live: {names}, {config.updates} updates each; {picture} is drawn anew as they go on")
    curves: Curves = {}
    shutil.rmtree(config.output / "live", ignore_errors=True)  # from an earlier demo, perhaps with another length
    for variant in live:
        run = config.output / "live" / variant.short

        def redraw(_: torch.nn.Module, __: Path, name: str = variant.name, run: Path = run) -> None:
            draw_loss_curves({**curves, name: held_out_curve(run)}, goal, picture)

        recipe = recipe_of(variant, adaptation.tiny)
        transfer = round(_TRANSFER * config.updates) if recipe.transfer_steps else 0
        short = replace(recipe, steps=config.updates, transfer_steps=transfer)
        adaptation.adapt(adaptation.patched(variant.patch), short, run, redraw)
        curves[variant.name] = held_out_curve(run)
    return curves


def _write_folder(
    config: DemoConfig,
    yardstick: Yardstick,
    outcomes: Sequence[Outcome],
    growth: speed.Growth | None,
    streams: Sequence[streaming.Judged],
    few: FewStepClips | None,
    curves: Curves,
    circumstances: dict[str, str],
) -> None:
    """The record, the pictures that are not there yet, and last the page."""
    rows, output = [outcome.row for outcome in outcomes], config.output
    results = {
        "config": {**asdict(config), "output": str(output)},
        "circumstances": circumstances,
        "rows": [asdict(row) for row in rows],
        "live": curves,
        "streamed": {one.name: one.right for one in streams},
    }
    write_json(results, output / "results.json")
    pictures = {outcome.row.name: outcome.pictures for outcome in outcomes}
    samples = draw_pictures(pictures, yardstick.scenes, output)
    sections = {
        "Is it good?": _judgement(rows) + html_media(samples, "What each attention generates, by the same noise")
    }
    if growth is not None:
        picture = html_media(output / "speed.png", "Milliseconds of an attention over N")
        sections["Is it fast?"] = speed.html_speed(growth, speed.shipped_growth(), picture)
    if streams:
        long = streams[-1]
        clips = draw_clips(long.name, long.pictures, yardstick.scenes[:_STREAMED], output / "stream.gif")
        remark = (
            f"A few frames after others, {streaming.LONGER} times as many as were trained on, each seeing what is kept "
            "of the frames before it, which takes the same memory however many there are."
        )
        table = html_table(streaming.HEADER, (one.cells for one in streams))
        sections["A longer clip"] = f"<p>{remark}</p>{table}{html_media(clips, long.name)}"
    if few is not None:
        clips = draw_clips(few.name, few.pictures[:_STREAMED], yardstick.scenes[:_STREAMED], output / "few-steps.gif")
        sections["In four steps"] = f"<p>{few.remark}</p>{html_media(clips, few.name)}"
    if curves:
        heading = "Held-out loss while two of them adapt"
        sections[heading] = html_media(output / "loss.png", heading)
    for name, mixing in ((outcome.row.name, outcome.mixing) for outcome in outcomes if outcome.mixing):
        heading = f"Mixing matrices of {name}"
        file = draw_mixing_matrices(mixing, yardstick.tiny.blocks, output / f"mixing-{file_name(name)}.png")
        sections[heading] = html_media(file, heading)
    write_page(output / "index.html", f"MHLA on tiny-{config.family}", circumstances, sections)


def _judgement(rows: Sequence[Row]) -> str:
    """What was measured of the variants, in sentences and as a table."""
    control, *others = rows
    seen = ", ".join(f"{row.name} {row.digit_accuracy:.0%}" for row in others[::-1])
    remarks = [
        f"Digits that the classifier recognises: {seen}; {control.name} {control.digit_accuracy:.0%}.",
        f"Every row but the first is a patch that ships adapted; {control.name} was trained on for as long.",
    ]
    if control.seconds_per_step is None:
        remarks.append("There are no times, since the machine was busy: they spread too much to be reliable.")
    said = "".join(f"<p>{escape(remark)}</p>" for remark in remarks)
    return said + html_table(_header_of(rows), (row.cells for row in rows))


def _header_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Names of the columns that the rows have."""
    return _HEADER[: len(rows[0].cells)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without diffusers' and transformers' bars of loading, and warnings that are about the size of the models."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    both, verbosity = (of_diffusers, of_transformers), of_diffusers.get_verbosity()
    try:
        for library in both:
            library.disable_progress_bar()
        of_diffusers.set_verbosity(logging.ERROR)
        yield
    finally:
        of_diffusers.set_verbosity(verbosity)
        for library in both:
            library.enable_progress_bar()


def _say(text: str) -> None:
    """Log one line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
