"""Generate images and videos into a folder: resumable, with noise that does not depend on batches or processes."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy
import torch

from ..devices import launched_on_cpus
from ..errors import check
from ..files import file_hash, folder_for_results, write_json
from ..settings import differences
from .pipelines import PipelineChoice, usual_clip
from .pixels import read_picture
from .record import RECORD_FILE, Record, Sample, read_record, write_sample


@dataclass(frozen=True)
class SampleSet(PipelineChoice):
    """Which samples to generate, with which model, into which folder."""

    samples: Sequence[Sample]
    output: Path
    batch_size: int = 1
    """Samples per call of the pipeline; 1 where they have pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        suffix = self.of_family.calling.suffix
        for sample in self.samples:
            check(sample.file.endswith(suffix), f"{self.family} generates {suffix} files, not {sample.file!r}.")
        self.check(*(["image"] if any(sample.image for sample in self.samples) else []))


def plan_samples(prompts: Sequence[tuple[str, Path | None]], suffix: str, seeds: Sequence[int] = (0,)) -> list[Sample]:
    """Plan one sample per prompt and seed: ``{prompt number}-{seed}-{prompt}`` and the suffix, .png or .mp4.

    Prompts are text, or for DiT classes by name or number, each with its picture, if any.
    """
    samples = []
    for place, (prompt, image) in enumerate(prompts):
        name = name_of_prompt(prompt)
        if image is not None:
            name = f"{name}-{file_hash(image)[:8]}"  # another picture is another file
        shown = None if image is None else str(image)
        samples += [Sample(f"{place:04d}-{seed}-{name}{suffix}", prompt, shown, seed) for seed in seeds]
    return samples


def name_of_prompt(prompt: str) -> str:
    """Make a prompt part of a file name: 60 bytes of letters and digits of any script, and a hash if that is less."""
    letters = "-".join(re.findall(r"[^\W_]+", prompt.lower()))
    name = letters.encode()[:60].decode(errors="ignore").strip("-") or "empty"
    if name.replace("-", " ") == prompt:
        return name
    return f"{name}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


def generate(config: SampleSet, process: int = 0, processes: int = 1) -> Iterator[tuple[Sample, bool]]:
    """Generate the missing samples of one of several processes.

    Yields each sample, those that existed first, and whether it was generated. OSError if the folder cannot be written
    or another run has it; ValueError for a folder with other samples, or a result that is not finite.
    """
    from diffusers.image_processor import VaeImageProcessor

    with folder_for_results(config.output, lock=process == 0):
        record = _record_with(config)
        missing = []
        for sample in config.samples[process::processes]:
            if (config.output / sample.file).is_file():  # whole, since files are written aside
                yield sample, False
            else:
                missing.append(sample)
        if not missing:
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
                write_json(asdict(record), config.output / RECORD_FILE)
            for sample, result in zip(batch, results, strict=True):
                said = f"{sample.text!r} gives values that are not finite; use another dtype, settings or weights."
                check(bool(numpy.isfinite(result).all()), said)
                if sample.file.endswith(".png"):
                    (result,) = VaeImageProcessor.numpy_to_pil(result)
                write_sample(result, config.output / sample.file, rate)
                yield sample, True


def generate_share(config: SampleSet, tell: Callable[[Sample, bool], object]) -> None:
    """Run :func:`generate` in every process that accelerate has launched, on its own device, and wait for the others.

    ``tell`` is called with each sample of the main process, and whether it was generated.
    """
    from accelerate import PartialState

    # at the end processes wait for the slowest one, perhaps longer than the default timeout of half an hour
    state = PartialState(cpu=launched_on_cpus(), timeout=timedelta(days=7))
    if config.device == "auto" and state.num_processes > 1:
        config = replace(config, device=str(state.device))
    try:
        for sample, is_new in generate(config, state.process_index, state.num_processes):
            if state.is_main_process:
                tell(sample, is_new)
    except KeyboardInterrupt:
        made = sum((config.output / sample.file).is_file() for sample in config.samples)
        if state.is_main_process:
            sys.stderr.write(f"\n{made} of {len(config.samples)} samples are made; the same command goes on.\n")
        raise
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
    return Record(config.choices, [sample for _, sample in sorted((made | planned).items())])
