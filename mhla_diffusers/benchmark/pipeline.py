"""A whole call of a pipeline and its parts, unpatched and with patches, and how near their samples are."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy
import torch

from ..config import adapted_patch_folder, load_patch
from ..generation import PipelineChoice, family_of, generator_for, load_result
from ..generation.pipelines import few_step_arguments
from ..generation.similarity import image_metrics, psnr, ssim
from ..patching import CONFIG_NAME, apply_mhla, change_mhla, find_transformers, remove_mhla
from ..settings import check_value
from ..tiny import tiny_pipeline
from .correctness import check_operation
from .measure import Results, Row, measured_row, peak_bytes, refused_row, synchronize, with_progress
from .models import models
from .operation import SPARSE, fastest_backend
from .shapes import BLOCK_SIZE, Shape
from .transformer import CLASSIFIERS, LINEAR_KINDS, PATCHES, patch_settings

UNPATCHED = "unpatched"
WHOLE = "whole call"
PARTS = ("text encoding", "denoising", "VAE")


def choose_pipeline(name: str, **settings: Any) -> PipelineChoice:
    """Choose a pipeline, tiny-dit, tiny-sana, tiny-wan, or a Hub id or folder; checked before anything is loaded.

    Args:
        name: of the pipeline.
        **settings: further fields of :class:`PipelineChoice`.

    Raises:
        FileNotFoundError: no such pipeline.
        ValueError: it has no transformer that MHLA supports, does not take a setting, or is no pipeline.
    """
    is_tiny = name.startswith("tiny-")
    if name in CLASSIFIERS.keys() | models().keys() and not is_tiny:
        raise ValueError(
            f"{name!r} is a configuration without weights and without a pipeline, which mhla bench transformer --model "
            f"{name} measures. Give the Hub id or folder of a pipeline, or tiny-dit, tiny-sana or tiny-wan."
        )
    family = tiny_pipeline(name.removeprefix("tiny-")).family if is_tiny else family_of(name).name
    choice = PipelineChoice(family, model=None if is_tiny else name, **settings)
    choice.check()
    return choice


def benchmark_pipeline(
    choice: PipelineChoice,
    patches: Sequence[str],
    results: Results,
    *,
    dense_steps: Mapping[str, Any] = MappingProxyType({}),
    repetitions: int = 3,
) -> None:
    """Check MHLA, then call the pipeline unpatched and with every patch in turns, after one call each to warm up.

    All samples are made from the same prompt and noise. Each is compared with the first one of the unpatched pipeline;
    so is the unpatched pipeline's own last one, which tells whether a call can be repeated.

    Args:
        choice: the pipeline and the settings of its call.
        patches: of ``PATCHES``, presets, YAML files, or names, folders or Hub ids of saved patches; all kinds that the
            family takes if empty.
        results: gets a row per patch for the whole call and for each of its parts.
        dense_steps: settings of all patches that choose steps of the model's own attention, such as ``refresh``.
        repetitions: calls of each.

    Raises:
        IncorrectAttentionError: MHLA is wrong here; then nothing is timed.
        ImportError: torchmetrics is missing, which compares the samples.
        OSError: no such pipeline or patch.
        ValueError: a value that is not allowed, or the call fails with every patch.
    """
    image_metrics()  # raises before anything is timed
    check_value("repetitions", repetitions, int, above=0)
    family, device = choice.of_family, results.device
    family.default_config.replace(**dense_steps)  # raises what is not allowed
    blocks = family.mhla_blocks
    for name in patches:
        if name == SPARSE and family.own_attention != "softmax":
            raise ValueError(
                f"patch={name!r} is for softmax attention; that of {choice.family} is {family.own_attention}."
            )
        if name not in PATCHES:
            is_saved_patch(name)
    names = (UNPATCHED, *(patches or (PATCHES if family.own_attention == "softmax" else LINEAR_KINDS)))

    pipe = choice.load()
    attn = next(iter(family.self_attentions(next(iter(find_transformers(pipe).values()))).values()))
    size = BLOCK_SIZE if family.own_attention == "softmax" else None
    shape = Shape(choice.family, blocks, blocks, *family.adapter_of(attn).heads(attn), size)
    for sparse in (False, SPARSE in names):
        backend = fastest_backend(shape, device, results.dtype)
        check_operation(shape, device, results.dtype, backend, sparse=sparse)

    def run() -> Any:
        prompt = "3" if family.prompts_are_classes else "a seven"
        # a patch that was distilled takes its own number of steps
        (sample,) = choice.call(pipe, [prompt], [generator_for(0)], **few_step_arguments(pipe, family))
        return sample

    refused: dict[str, Row] = {}
    peaks: dict[str, int | None] = {}
    reference: torch.Tensor | None = None
    for name in with_progress(names, "warming up"):
        try:
            with patched(pipe, name, choice, dense_steps):
                frames = frames_of(run())
                peaks[name] = peak_bytes(run, device)
            reference = frames if name == UNPATCHED else reference
        except (RuntimeError, ValueError) as error:
            refused[name] = refused_row(name, error)
    if not peaks:
        raise ValueError(f"{choice.model or choice.family} fails with every patch: {refused[UNPATCHED].reason}.")
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in peaks}
    samples: dict[str, torch.Tensor] = {}
    for name in with_progress([name for _ in range(repetitions) for name in peaks], "timing"):
        with patched(pipe, name, choice, dense_steps):
            times, sample = timed_call(pipe, run, device)
        seconds[name].append(times)
        samples[name] = frames_of(sample)

    settings = {**choice.settings, **dense_steps}
    case = ", ".join([choice.model or f"tiny-{choice.family}", *(f"{name}={x}" for name, x in settings.items())])
    rows = []
    for stage in (WHOLE, *PARTS):
        for name in names:
            if name in refused:
                row = refused[name]
            else:
                peak = peaks[name] if stage == WHOLE else None
                row = measured_row(name, [call[stage] for call in seconds[name]], peak)
                if stage == WHOLE and reference is not None:
                    row = replace(row, **similarities(samples[name], reference))
            if name not in refused or stage == WHOLE:
                rows.append(replace(row, case=case, stage=stage, baseline=name == UNPATCHED))
    results.add(rows)


def is_saved_patch(name: str) -> bool:
    """Whether a patch comes with weights: the name of one that ships, a folder or a Hub id.

    Raises:
        ValueError: an unknown name, or a folder without a saved patch.
        FileNotFoundError: no such YAML file.
    """
    if Path(name).is_dir() and not Path(name, CONFIG_NAME).is_file():
        raise ValueError(f"patch={name!r} holds no saved patch: {CONFIG_NAME} is missing; save one with save_mhla.")
    is_file = Path(name).suffix in (".yaml", ".yml")
    if adapted_patch_folder(name) is not None or (not is_file and "/" in name) or Path(name).is_dir():
        return True
    try:
        load_patch(name)
    except ValueError as error:
        raise ValueError(f"{error} Kinds without a file: {', '.join(map(repr, PATCHES))}.") from error
    return False


@contextmanager
def patched(pipe: Any, patch: str, choice: PipelineChoice, dense_steps: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the pipeline has a patch; afterwards it is as it was."""
    with ExitStack() as stack:
        if patch in PATCHES:
            apply_mhla(pipe, **patch_settings(patch, choice.of_family.mhla_blocks))
        elif patch != UNPATCHED and is_saved_patch(patch):
            load_result(pipe, adapted_patch_folder(patch) or patch)
        elif patch != UNPATCHED:
            apply_mhla(pipe, patch)
        if patch != UNPATCHED:
            stack.callback(remove_mhla, pipe)
            if dense_steps:
                change_mhla(pipe, **dense_steps)
        yield


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

    methods = [(pipe, "encode_prompt", "text encoding"), (pipe.vae, "decode", "VAE")]
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
    values = numpy.asarray(sample)
    frames = torch.from_numpy(values.copy())
    if frames.is_floating_point():
        frames = (255 * frames.float().clamp(0, 1)).round().to(torch.uint8)
    return (frames if frames.ndim == 4 else frames[None]).movedim(-1, 1)


def similarities(frames: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """Return ``psnr`` in dB and ``ssim``, each the mean over the frames, without those undefined for their size.

    Args:
        frames: uint8 (F, 3, H, W).
        reference: like ``frames``.
    """
    found = {"psnr": psnr(frames, reference).mean().item(), "ssim": ssim(frames, reference).mean().item()}
    return {name: value for name, value in found.items() if not math.isnan(value)}
