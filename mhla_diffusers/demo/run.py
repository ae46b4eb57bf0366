"""Run the demo from beginning to end."""

import logging
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..devices import free_threads, threads
from ..files import check_writable, write_json
from ..reporting import require_matplotlib, text_table
from ..tiny import TinyPipeline, load_tiny, tiny_pipeline
from .adaptation import Adaptation
from .examining import Yardstick, examine, load_variant, time_all
from .figures import draw_mixing, draw_pictures, file_name, write_page
from .latents import digit_latents
from .live import LIVE, Curves, adapt_live
from .results import Outcome, Row, format_table
from .streaming import HEADER, Judged, judge_streams, section_of_page
from .variants import Variant, streamed_variant, variants

_STREAMED = 3
"""Scenes that are generated as a longer clip."""


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does.

    Raises:
        ValueError: a value that is not allowed.
    """

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

    def __post_init__(self) -> None:
        tiny_pipeline(self.family)
        for name, least in (("updates", 0), ("scenes", 2), ("samples", 16), ("held_out", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")


def run_demo(config: DemoConfig) -> list[Row]:
    """Compare the attentions that ship adapted, adapt two live, and write all of it into ``config.output``.

    Returns:
        The rows of the table. With the same seed they are the same on the same CPU, but for the seconds.

    Raises:
        OSError: the output folder cannot be written; said before any work.
        ImportError: matplotlib or scikit-learn is missing.
        DamagedAssetError: files of the tiny pipeline are missing or damaged.
    """
    check_writable(config.output)
    require_matplotlib()
    started, tiny = time.perf_counter(), tiny_pipeline(config.family)
    shown = variants(tiny)
    with _quiet(), threads(free_threads()):
        told = f"{len(shown)} attentions, {config.scenes} scenes, {torch.get_num_threads()} threads"
        _say(f"tiny-{config.family}: {told}")
        adaptation = _adaptation(config, tiny)
        yardstick = Yardstick.of(adaptation, config.scenes, config.seed)
        pipes = [load_variant(tiny, variant, config.device) for variant in shown]
        outcomes = [_examine(variant, pipe, yardstick) for variant, pipe in zip(shown, pipes, strict=True)]
        outcomes = time_all(pipes, outcomes, adaptation)
        rows = [outcome.row for outcome in outcomes]
        _say(f"\n{format_table(rows)}\n")
        streams = _stream(config, tiny, yardstick)
        curves = _adapt_live(config, shown, adaptation, rows[0].held_out_loss)
    circumstances = {
        "machine": f"{platform.processor() or platform.machine()}, {config.device}",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "minutes": f"{(time.perf_counter() - started) / 60:.1f}",
    }
    _write_folder(config, yardstick, outcomes, streams, curves, circumstances)
    _say(f"{config.output / 'index.html'} shows all of it.")
    return rows


def _adaptation(config: DemoConfig, tiny: TinyPipeline) -> Adaptation:
    return Adaptation(
        tiny,
        digit_latents(load_tiny(config.family, config.device), tiny, config.samples, config.held_out, config.seed),
        held_out=config.held_out,
        seed=config.seed,
        validate_every=max(1, config.updates // 5),
        batch_size=tiny.batch_size,
        device=config.device,
    )


def _examine(variant: Variant, pipe: Any, yardstick: Yardstick) -> Outcome:
    outcome = examine(variant, pipe, yardstick)
    _say(f"  {variant.name}: {outcome.row.digit_accuracy:.0%} of the digits recognised")
    return outcome


def _stream(config: DemoConfig, tiny: TinyPipeline, yardstick: Yardstick) -> list[Judged]:
    """Of videos: a few scenes as clips longer than any that was trained on."""
    if streamed_variant(tiny) is None:
        return []
    judged = judge_streams(tiny, yardstick.scenes[:_STREAMED], config.seed, config.device)
    _say(f"{text_table(HEADER, (one.cells for one in judged), right=True)}\n")
    return judged


def _adapt_live(config: DemoConfig, shown: Sequence[Variant], adaptation: Adaptation, goal: float) -> Curves:
    if not config.updates:
        return {}
    live = [variant for variant in shown if variant.short in LIVE] or [shown[-1]]
    names = " and ".join(variant.name for variant in live)
    _say(f"Live: {names}, {config.updates} updates each; {config.output / 'loss.png'} is drawn anew as they go on")
    return adapt_live(live[::-1], config.updates, adaptation, goal, config.output)


def what_one_sees(rows: Sequence[Row]) -> str:
    """The picture in one sentence."""
    control, *others = rows
    told = ", ".join(f"{row.name} {row.digit_accuracy:.0%}" for row in others[::-1])
    return f"Digits that the classifier recognises: {told}; {control.name} {control.digit_accuracy:.0%}."


def _write_folder(
    config: DemoConfig,
    yardstick: Yardstick,
    outcomes: Sequence[Outcome],
    streams: Sequence[Judged],
    curves: Curves,
    circumstances: dict[str, str],
) -> None:
    rows = [outcome.row for outcome in outcomes]
    results = {
        "config": {**asdict(config), "output": str(config.output)},
        "circumstances": circumstances,
        "rows": [asdict(row) for row in rows],
        "live": curves,
        "streamed": {one.name: one.right for one in streams},
    }
    write_json(results, config.output / "results.json")
    figures = {
        "What each attention generates from the same noise": draw_pictures(outcomes, yardstick.scenes, config.output)
    }
    if curves:
        figures["Held-out loss while two of them adapt"] = config.output / "loss.png"
    for outcome in outcomes:
        if outcome.mixing:
            file = config.output / f"mixing-{file_name(outcome.row.name)}.png"
            figures[f"Mixing matrices of {outcome.row.name}"] = draw_mixing(
                outcome, yardstick.adaptation.tiny.blocks, file
            )
    remarks = [
        what_one_sees(rows),
        f"Every row but the first is a patch that ships adapted; {rows[0].name} was trained on for as long. "
        "Everything on this page was computed in one run.",
    ]
    if rows[0].seconds_per_step is None:
        remarks.append("There are no times, since the machine was busy: they spread too much to be believed.")
    scenes = yardstick.scenes[:_STREAMED]
    sections = {"A longer clip": section_of_page(streams, scenes, config.output)} if streams else {}
    title = f"MHLA on tiny-{config.family}"
    write_page(config.output / "index.html", title, rows, figures, remarks, circumstances, sections)


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
    """One line of the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
