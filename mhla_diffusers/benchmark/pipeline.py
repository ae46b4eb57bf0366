"""A whole call of a pipeline and its parts: text encoding, denoising, VAE; and how near its result is to the plain one.

A variant is an attention, alone or with LoRA, quantised weights, a step cache and other numbers of steps.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import numpy
import torch

from ..devices import FLOAT_TYPES
from ..generation.similarity import image_metrics, psnr, ssim
from ..patching import find_transformers
from .caches import counted
from .correctness import check_operation
from .operation import fastest_backend
from .results import CONTENT, PART, Recorder, Row
from .shapes import Shape
from .timing import Outcome, outcome_of, peak_bytes, show_progress, summarise, synchronize
from .variants import PipelineCase, PipelineVariant

WHOLE = "whole call"
PARTS = ("text encoding", "denoising", "VAE", "rest")


def benchmark_pipeline(case: PipelineCase, recorder: Recorder) -> list[Row]:
    """Check MHLA, then call the pipeline with every variant in turns.

    The samples of all variants are made from the same noise. Each is compared with the first one of the plain pipeline;
    so is the plain pipeline's own last one, which tells whether a call can be repeated.

    Returns:
        A row per variant for the whole call, and one per variant and part.

    Raises:
        ImportError: torchmetrics is missing, which compares the samples.
        IncorrectAttentionError: MHLA is wrong here; then nothing is timed.
        OSError: no such pipeline, patch or LoRA.
        ValueError: it is of another family, or the call is refused or fails with every variant.
    """
    image_metrics()  # raises before anything is timed
    pipe = case.load()
    _check(pipe, case)
    caches: dict[PipelineVariant, Any] = {}
    peaks: dict[PipelineVariant, int | None] = {}
    refused: dict[PipelineVariant, Outcome] = {}
    notes: dict[PipelineVariant, str] = {}
    reference: torch.Tensor | None = None
    for variant in show_progress(case.variants, "warming up"):
        try:
            with case.applied(pipe, variant, caches):
                with counted(pipe) as forwards:
                    frames = frames_of(case.run(pipe, variant))
                if variant.cache is not None:
                    notes[variant] = f"{sum(forwards)} of {len(forwards)} forwards computed"
                reference = frames if variant.is_plain else reference
                peaks[variant] = peak_bytes(partial(case.run, pipe, variant), case.place)
        except (RuntimeError, ValueError) as error:
            refused[variant] = outcome_of(error)
    if not peaks:
        raise ValueError(f"{case.name} fails with every variant: {next(iter(refused.values())).reason}.")
    calls: dict[PipelineVariant, list[dict[str, float]]] = {variant: [] for variant in peaks}
    samples: dict[PipelineVariant, torch.Tensor] = {}
    turns = [variant for _ in range(case.repetitions) for variant in calls]
    for variant in show_progress(turns, "timing"):
        with case.applied(pipe, variant, caches):
            seconds, sample = _timed_call(pipe, case, variant)
        calls[variant].append(seconds)
        samples[variant] = frames_of(sample)
    rows = []
    for variant in case.variants:
        if variant in refused:
            rows.append(case.row(recorder, refused[variant], WHOLE, variant))
            continue
        for part in (WHOLE, *PARTS):
            stage, peak = (part, peaks[variant]) if part == WHOLE else (PART + part, None)
            near = similarities(samples[variant], reference) if part == WHOLE and reference is not None else {}
            timing = summarise([call[part] for call in calls[variant]])
            note = notes.get(variant, "") if part == WHOLE else ""
            rows.append(case.row(recorder, Outcome("measured", timing, peak), stage, variant, note=note, **near))
    return rows


def frames_of(sample: Any) -> torch.Tensor:
    """A PIL image, or frames (F, H, W, 3) in [0, 1], as uint8 (F, 3, H, W)."""
    values = numpy.asarray(sample)
    frames = torch.from_numpy(values.copy())
    if frames.is_floating_point():
        frames = (255 * frames.float().clamp(0, 1)).round().to(torch.uint8)
    return (frames if frames.ndim == 4 else frames[None]).movedim(-1, 1)


def similarities(frames: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """``psnr`` in dB and ``ssim``, each the mean over the frames; no SSIM of frames smaller than its window.

    Args:
        frames: uint8 (F, 3, H, W).
        reference: like ``frames``.
    """
    found = {"psnr": psnr(frames, reference).mean().item(), "ssim": ssim(frames, reference).mean().item()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _timed_call(pipe: Any, case: PipelineCase, variant: PipelineVariant) -> tuple[dict[str, float], Any]:
    """Seconds of the whole call and of each part, and the sample.

    Methods are replaced on the instances and put back.
    """
    seconds = dict.fromkeys((WHOLE, *PARTS), 0.0)

    def watched(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(case.place)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(case.place)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    methods = [(pipe, "encode_prompt", "text encoding"), (pipe.vae, "decode", "VAE")]
    methods += [(transformer, "forward", "denoising") for transformer in find_transformers(pipe).values()]
    with ExitStack() as stack:
        for owner, name, part in methods:
            if hasattr(owner, name):
                # which puts back a forward that accelerate's offloading has put on an instance
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), part)))
        sample = watched(case.run, WHOLE)(pipe, variant)
    seconds["rest"] = seconds[WHOLE] - sum(seconds[part] for part in PARTS if part != "rest")
    return seconds, sample


def _check(pipe: Any, case: PipelineCase) -> None:
    """MHLA, and the sparse branch with lists given, with the heads of the pipeline's transformer."""
    transformer = next(iter(find_transformers(pipe).values()))
    attn = next(iter(case.of_family.self_attentions(transformer).values()))
    heads, head_dim = case.of_family.adapter_of(attn).heads(attn)
    config, dtype = case.of_family.default_config, FLOAT_TYPES[case.dtype]
    shape = Shape(case.name, config.blocks, config.blocks, heads, head_dim, config.block_size)
    backend = fastest_backend(shape, case.place, dtype)
    for sparse in (False, CONTENT in (variant.attention for variant in case.variants)):
        check_operation(shape, case.place, dtype, backend, sparse=sparse)
