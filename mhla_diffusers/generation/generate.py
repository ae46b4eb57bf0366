"""Generate images and videos into a folder: resumable, with noise that does not depend on batches or processes."""

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy
import torch

from ..devices import launched_on_cpus
from ..errors import check
from ..files import file_hash, folder_for_results
from ..settings import PositiveInteger, Seed, check_value, differences
from .pipelines import PipelineChoice, usual_clip
from .pixels import read_picture
from .record import Record, Sample, read_record, write_sample

_MAX_LENGTH, _MAX_BYTES = 60, 150
"""Limits of a prompt within a file name, in letters and in bytes; file names may have 255 bytes."""


@dataclass(frozen=True)
class SampleSet(PipelineChoice):
    """Which samples to generate, with which model, into which folder."""

    samples: Sequence[Sample]
    output: Path
    batch_size: int = 1
    """Samples per call of the pipeline; 1 where they have pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("batch_size", self.batch_size, PositiveInteger)
        suffix = self.of_family.calling.suffix
        wrong = next((sample.file for sample in self.samples if not sample.file.endswith(suffix)), None)
        if wrong is not None:
            raise ValueError(f"{self.family} generates {suffix} files, not {wrong!r}.")


def plan_samples(
    prompts: Sequence[str], suffix: str, seeds: Sequence[int] = (0,), images: Sequence[Path | None] | None = None
) -> list[Sample]:
    """Plan one sample per prompt and seed: ``{prompt number}-{seed}-{prompt}`` and the suffix, .png or .mp4.

    Prompts are text, or for DiT classes by name or number; ``images`` has the picture of each, or None.
    """
    check_value("seeds", list(seeds), list[Seed])
    samples = []
    for place, (prompt, image) in enumerate(zip(prompts, images or [None] * len(prompts), strict=True)):
        name = name_of_prompt(prompt)
        if image is not None:
            name = f"{name}-{file_hash(image)[:8]}"  # another picture is another file
        shown = None if image is None else str(image)
        samples += [Sample(f"{place:04d}-{seed}-{name}{suffix}", prompt, shown, seed) for seed in seeds]
    return samples


def name_of_prompt(prompt: str) -> str:
    """Make a prompt part of a file name: letters and digits of any script, and a hash if that loses anything."""
    letters = "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:_MAX_LENGTH]
    name = letters.encode()[:_MAX_BYTES].decode(errors="ignore").strip("-") or "empty"
    if name.replace("-", " ") == prompt:
        return name
    return f"{name}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


def generate(config: SampleSet, process: int = 0, processes: int = 1) -> Iterator[tuple[Sample, bool]]:
    """Generate the missing samples of one of several processes.

    Yields each sample, those that existed first, and whether it was generated. OSError if the folder cannot be written
    or another run has it; ValueError for a choice that does not fit the pipeline, a folder with other samples, or a
    result that is not finite.
    """
    from diffusers.image_processor import VaeImageProcessor

    with folder_for_results(config.output, lock=process == 0):
        config.check(*(["image"] if any(sample.image for sample in config.samples) else []))
        record = _record_with(config)
        missing = []
        for sample in config.samples[process::processes]:
            if (config.output / sample.file).is_file():  # whole, since files are written aside
                yield sample, False
            else:
                missing.append(sample)
        if not missing:
            record.write(config.output)
            return
        pipe = config.load(sorted({sample.text for sample in config.samples}))
        pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
        rate = round(usual_clip(config.model, config.of_family).fps)
        for start in range(0, len(missing), config.batch_size):
            batch = missing[start : start + config.batch_size]
            noise = [torch.Generator().manual_seed(sample.seed) for sample in batch]
            picture = {} if batch[0].image is None else {"image": read_picture(Path(batch[0].image))}
            results = config.call(pipe, [sample.text for sample in batch], noise, output_type="np", **picture)
            if not start:  # just before the first file, so that a failing run leaves nothing
                record.write(config.output)
            for sample, result in zip(batch, results, strict=True):
                if not numpy.isfinite(result).all():
                    raise ValueError(
                        f"{type(pipe).__name__} returns values that are not finite for {sample.text!r} with dtype "
                        f"{config.dtype} and settings {config.settings}; use another dtype, settings or weights."
                    )
                if sample.file.endswith(".png"):
                    (result,) = VaeImageProcessor.numpy_to_pil(result)
                write_sample(result, config.output / sample.file, rate)
                yield sample, True


def generate_share(config: SampleSet) -> Iterator[tuple[Sample, bool]]:
    """Run :func:`generate` in every process that accelerate has launched, on its own device, and wait for the others.

    Only the main process yields.
    """
    from accelerate import PartialState

    # at the end processes wait for the slowest one, perhaps longer than the default timeout of half an hour
    state = PartialState(cpu=launched_on_cpus(), timeout=timedelta(days=7))
    if config.device == "auto" and state.num_processes > 1:
        config = replace(config, device=str(state.device))
    for done in generate(config, state.process_index, state.num_processes):
        if state.is_main_process:
            yield done
    state.wait_for_everyone()


def _record_with(config: SampleSet) -> Record:
    """Return the folder's record with the samples added; ValueError if its files were made otherwise."""
    folder, record = config.output, read_record(config.output)
    made = {one.file: one for one in record.samples if (folder / one.file).is_file()} if record else {}
    # without samples a record is left over from a run that failed
    changed = list(differences(record.choices, config.choices)) if record and made else []
    planned = {one.file: one for one in config.samples}
    for file, sample in planned.items():
        if file in made:
            before, now = ({"text": one.text, "seed": one.seed} for one in (made[file], sample))
            changed += differences(before, now, file)
        else:
            check(not (folder / file).is_file(), f"{folder} has a file {file} of another set. Choose an empty folder.")
    said = "; ".join(f"{name}={old!r}, now {new!r}" for name, old, new in changed)
    check(not said, f"{folder} has files that were made otherwise ({said}). Choose another output folder.")
    listed = made | planned
    return Record(config.choices, [listed[file] for file in sorted(listed)])
