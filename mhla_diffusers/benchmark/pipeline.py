"""Times whole pipeline calls and their parts, unpatched and patched, and compares their samples."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy
import torch

from ..config import PROFILES, adapted_patch_folder, load_patch
from ..families import Family
from ..generation.noise import generator_for
from ..generation.pipelines import PipelineChoice, family_of, has_weights, put_on
from ..generation.similarity import psnr, ssim
from ..patching import PATCH_FILE, find_transformers, remove_mhla
from ..reporting import progress
from ..tiny import tiny_pipeline
from .cases import SPARSE_CONFIG, Shape, models
from .correctness import check_operator
from .measure import Results, Row, measured, peak_bytes, refused, synchronize
from .operator import SOFTMAX

UNPATCHED = "unpatched"
WHOLE = "whole call"
PARTS = ("text encoding", "denoising", "VAE")


def choose_pipeline(name: str, **settings: Any) -> PipelineChoice:
    """Choose a pipeline, tiny-dit, tiny-sana, tiny-wan, or a Hub id or folder; checked before anything is loaded."""
    is_tiny = name.startswith("tiny-")
    if name in models() and not is_tiny:
        raise ValueError(
            f"{name!r} is a configuration without weights; mhla bench transformer --model {name} measures it. Here "
            "give the Hub id or folder of a pipeline, or tiny-dit, tiny-sana or tiny-wan."
        )
    family = tiny_pipeline(name.removeprefix("tiny-")).family if is_tiny else family_of(name).name
    choice = PipelineChoice(family, model=name, **settings)
    choice.check()
    return choice


@contextmanager
def patched(pipe: Any, patch: str | None, changes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the pipeline is patched, as :func:`put_on` does; restores it afterwards."""
    if patch is None:
        yield
        return
    put_on(pipe, patch, changes)
    try:
        yield
    finally:
        remove_mhla(pipe)


def benchmark_pipeline(
    choice: PipelineChoice,
    patches: Sequence[str],
    results: Results,
    prompts: Sequence[str],
    changes: Mapping[str, Any],
    repetitions: int,
) -> None:
    """Check MHLA, then call the pipeline unpatched and with every patch in turns, after one call each to warm up.

    All samples of a prompt are made from the same noise. Each is compared with the first one of the unpatched pipeline;
    so are the unpatched pipeline's own, to see whether a call can be repeated. The profiles are called without
    ``patches``, and one prompt without ``prompts``; ``changes`` replace settings of all patches, such as ``density``.
    """
    family, device = choice.of_family, results.device
    _check_patches(family, patches, changes)
    patching: dict[str, str | None] = {UNPATCHED: None, **{name: name for name in patches or PROFILES}}
    texts = prompts or (("3",) if family.calling.prompts_are_classes else ("a seven",))
    pipe = choice.load(texts)
    attn = next(iter(family.self_attentions(next(iter(find_transformers(pipe).values()))).values()))
    sparse = SPARSE_CONFIG if family.computes == SOFTMAX else None
    grid, blocks = tuple(4 * x for x in family.mhla_blocks), family.mhla_blocks
    check_operator(Shape(choice.family, grid, blocks, *family.heads(attn), sparse), device, results.dtype)

    def run(prompt: str) -> Any:
        (sample,) = choice.call(pipe, [prompt], [generator_for(0)])
        return sample

    model = choice.model or f"tiny-{choice.family}"
    settings = [f"{name}={x}" for name, x in {**choice.settings, **changes}.items()]
    case = ", ".join([model, *settings, *([f"{len(prompts)} prompts"] if prompts else [])])
    rows = {name: Row(name, case, WHOLE, baseline=name == UNPATCHED) for name in patching}
    peaks: dict[str, int | None] = {}
    references: dict[str, torch.Tensor] = {}
    for name, patch in progress(patching.items(), desc="warming up", leave=False):
        try:
            with patched(pipe, patch, changes):
                if name == UNPATCHED:
                    references = {text: frames_of(run(text)) for text in texts}
                else:
                    run(texts[0])
                peaks[name] = peak_bytes(partial(run, texts[0]), device)
        except (RuntimeError, ValueError) as error:
            rows[name] = refused(rows[name], error)
    if not peaks:
        raise ValueError(f"{model} fails with every patch: {rows[UNPATCHED].reason}.")
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in peaks}
    similar: dict[str, list[dict[str, float]]] = {name: [] for name in peaks}
    turns = [(name, text) for _ in range(repetitions) for text in texts for name in peaks]
    for name, text in progress(turns, desc="timing", leave=False):
        with patched(pipe, patching[name], changes):
            times, sample = timed_call(pipe, partial(run, text), device)
        seconds[name].append(times)
        if text in references:
            similar[name].append(similarities(frames_of(sample), references[text]))
    parts = []
    for name, calls in seconds.items():
        measures = similar[name][0] if similar[name] else ()
        means: dict[str, Any] = {measure: fmean(one[measure] for one in similar[name]) for measure in measures}
        rows[name] = replace(measured(rows[name], [call[WHOLE] for call in calls], peaks[name]), **means)
        of_part = {part: Row(name, case, part, baseline=name == UNPATCHED) for part in PARTS}
        parts += [measured(row, [call[part] for call in calls], None) for part, row in of_part.items()]
    results.add([*rows.values(), *parts])


def _check_patches(family: Family, patches: Sequence[str], changes: Mapping[str, Any]) -> None:
    """Raise ValueError for a patch that is not there, or settings that are not allowed, before anything is loaded."""
    family.default_config.replace(**changes)
    if not patches and family.computes != SOFTMAX:
        raise ValueError(
            f"Profiles replace softmax; the attention of {family.name} is {family.computes}: give --patch."
        )
    for name in patches:
        saved = adapted_patch_folder(name) or Path(name)
        if not has_weights(name):
            load_patch(name)
        elif saved.is_dir() and not (saved / PATCH_FILE).is_file():  # such as a trained model, which stays in the pipe
            raise ValueError(f"patch={name!r} holds no saved patch: {PATCH_FILE} is missing; save one with save_mhla.")


def timed_call(pipe: Any, run: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], Any]:
    """Time a whole call and each part, and return the sample too; methods are replaced on instances meanwhile."""
    seconds = dict.fromkeys((WHOLE, *PARTS), 0.0)

    def watched(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(device)
            seconds[part] += time.perf_counter() - start
            return result

        return call

    methods = [(pipe, "encode_prompt", "text encoding"), (getattr(pipe, "vae", None), "decode", "VAE")]
    methods += [(transformer, "forward", "denoising") for transformer in find_transformers(pipe).values()]
    with ExitStack() as stack:
        for owner, name, part in methods:
            if hasattr(owner, name):
                # which puts back a forward that accelerate's offloading has put on an instance
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), part)))
        sample = watched(run, WHOLE)()
    return seconds, sample


def frames_of(sample: Any) -> torch.Tensor:
    """Convert a PIL image, or frames (F, H, W, 3) in [0, 1], to uint8 (F, 3, H, W)."""
    pixels = numpy.array(sample)
    if pixels.dtype == object:
        raise ValueError(
            f"The call returned {type(sample).__name__}; it must return an image or the frames of a video."
        )
    frames = torch.from_numpy(pixels)
    if frames.is_floating_point():
        frames = (255 * frames.float().clamp(0, 1)).round().to(torch.uint8)
    return (frames if frames.ndim == 4 else frames[None]).movedim(-1, 1)


def similarities(frames: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Return ``psnr`` in dB and ``ssim`` of uint8 frames (F, 3, H, W), means of the frames large enough for them."""
    found = {"psnr": psnr(frames, reference).mean().item(), "ssim": ssim(frames, reference).mean().item()}
    return {name: value for name, value in found.items() if not math.isnan(value)}
