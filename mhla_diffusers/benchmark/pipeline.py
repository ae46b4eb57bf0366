"""Times whole pipeline calls, unpatched and patched, and compares their samples."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch

from ..config import PatchConfig
from ..errors import check
from ..generation.noise import generator_for
from ..generation.pipelines import PipelineChoice, put_on
from ..generation.similarity import psnr, ssim
from ..patching import is_patched, remove_mhla
from ..reporting import progress
from .measure import Results, Row, measured, refused, timed

UNPATCHED = "unpatched"


@contextmanager
def patched(pipe: Any, patch: str | PatchConfig | None, changes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the pipeline is patched, as :func:`put_on` does, unless by None; restores it afterwards."""
    transformer = pipe.transformer
    try:
        if patch is not None:
            put_on(pipe, patch, **changes)
        yield
    finally:
        pipe.transformer = transformer  # a folder of a whole trained one has replaced it
        if is_patched(pipe):
            remove_mhla(pipe)


def benchmark_pipeline(
    choice: PipelineChoice,
    patches: Sequence[str],
    results: Results,
    prompts: Sequence[str],
    changes: Mapping[str, Any],
    repetitions: int,
) -> None:
    """Call the pipeline unpatched and with every patch in turns, after one call each to warm up.

    All samples of a prompt are made from the same noise. Each is compared with the first one of the unpatched pipeline;
    so are the unpatched pipeline's own, to see whether a call can be repeated. Without ``prompts`` there is one;
    ``changes`` replace settings of all patches, such as ``density``.
    """
    for name in patches:
        replace(choice, patch=name, patch_settings=dict(changes))  # raises before anything runs
    texts = prompts or (("3",) if choice.of_family.calling.prompts_are_classes else ("a seven moving left",))
    pipe = choice.load(texts)
    settings = [f"{name}={x}" for name, x in {**choice.settings, **changes}.items()]
    case = ", ".join([choice.model, *settings, *([f"{len(prompts)} prompts"] if prompts else [])])
    names = (UNPATCHED, *patches)
    rows = {name: Row(name, case, "whole call", baseline=name == UNPATCHED) for name in names}
    references: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    similar: dict[str, list[list[float]]] = {name: [] for name in names}
    peaks: dict[str, int | None] = {}
    turns = [(0, texts[0], name) for name in names]
    turns += [(turn, text, name) for turn in range(1, 1 + repetitions) for text in texts for name in names]
    for turn, text, name in progress(turns, desc="timing", leave=False):
        if rows[name].reason:
            continue
        try:
            with patched(pipe, None if name == UNPATCHED else name, changes):
                run = partial(choice.call, pipe, [text], [generator_for(0)])
                seconds, peaks[name], (sample,) = timed(run, results.device)
        except (RuntimeError, ValueError) as error:
            rows[name] = refused(rows[name], error)
            continue
        frames = frames_of(sample)
        if turn:
            times[name].append(seconds)
            if text in references:
                similar[name].append([measure(frames, references[text]).mean().item() for measure in (psnr, ssim)])
        if name == UNPATCHED:
            references.setdefault(text, frames)
    for name in [name for name, row in rows.items() if not row.reason]:
        rows[name] = measured(rows[name], times[name], peaks[name])
        if similar[name]:
            means = torch.tensor(similar[name]).mean(dim=0).tolist()
            rows[name] = replace(rows[name], psnr=means[0], ssim=means[1])
    results.add(list(rows.values()))


def frames_of(sample: Any) -> torch.Tensor:
    """Convert a PIL image, or frames (F, H, W, 3) in [0, 1], to uint8 (F, 3, H, W)."""
    pixels = numpy.array(sample)
    check(pixels.dtype != object, f"The call returned {type(sample).__name__}, not an image or frames of a video.")
    frames = torch.from_numpy(pixels)
    if frames.is_floating_point():
        frames = (255 * frames.float().clamp(0, 1)).round().to(torch.uint8)
    return (frames if frames.ndim == 4 else frames[None]).movedim(-1, 1)
