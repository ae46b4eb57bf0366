"""Generate images and videos into a folder: resumable, with noise that does not depend on batches or processes."""

import hashlib
import inspect
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
from pydantic import Field

from ..devices import launched_on_cpus
from ..families.calling import takes_picture
from ..files import file_hash, folder_for_results
from ..patching import find_patched
from ..reporting import shows_bars
from ..settings import PositiveInteger, Seed, check_value
from .noise import generator_for
from .pipelines import PipelineChoice, check_classes
from .record import (
    RECORD_NAME,
    Sample,
    check_choices,
    first_sample,
    import_imageio,
    read_sample_list,
    record_choices,
    record_measured,
    write_sample,
    write_sample_list,
)

_MAX_LENGTH, _MAX_BYTES = 60, 150
"""Maximum length of a prompt in a file name, which may have 255 bytes: 37 letters of four bytes."""


@dataclass(frozen=True)
class SampleSet(PipelineChoice):
    """Which samples to generate, with which model, into which folder."""

    samples: Sequence[Sample]
    output: Path
    seed: int | None = 0
    """Seed of the set, from which every sample gets noise of its own; None where every sample has its own seed."""
    batch_size: int = 1
    """Samples per call of the pipeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("samples", list(self.samples), Annotated[list[Any], Field(min_length=1)])
        pictures = any(sample.image for sample in self.samples)
        check_value("batch_size", self.batch_size, Annotated[PositiveInteger, Field(le=1 if pictures else None)])
        suffix = self.of_family.calling.suffix
        wrong = next((sample.file for sample in self.samples if not sample.file.endswith(suffix)), None)
        if wrong is not None:
            raise ValueError(f"{self.family} generates {suffix} files, but the samples are such as {wrong!r}.")

    @property
    def choices(self) -> dict[str, Any]:
        """Everything but the prompts that determines the samples, which is recorded beside them."""
        rate = self.video_rate if self.of_family.makes_videos else None
        return {**super().choices, "frames_per_second": rate, "seed": self.seed}

    def check(self) -> None:
        """Check patch, settings and classes, and that pictures are given where the pipeline needs them alone."""
        super().check()
        check_classes(self.model, self.family, dict.fromkeys(sample.text for sample in self.samples))
        pipeline, images = self.pipeline_class(), [sample.image for sample in self.samples]
        takes = inspect.signature(pipeline.__call__).parameters.get("image")
        if takes is None and any(images):
            raise ValueError(
                f"{pipeline.__name__} takes no picture; leave --image out, or give --model a folder or Hub id with an "
                "image-to-video pipeline."
            )
        needs = takes is not None and (
            takes.default is takes.empty or (self.of_family.makes_videos and takes_picture(pipeline))
        )
        if needs and not all(images):
            raise ValueError(
                f"{pipeline.__name__} needs a picture for every prompt, and {self.samples[images.index(None)].text!r} "
                "has none; give --image FILE, or a prompt file with a column 'image'."
            )


def plan_samples(
    prompts: Sequence[str], suffix: str, seeds: Sequence[int] = (0,), images: Sequence[Path | None] | None = None
) -> list[Sample]:
    """Plan one sample per prompt and seed: ``{prompt number}-{seed}-{prompt}`` and the suffix, .png or .mp4.

    Prompts are text, or for DiT classes by name or number; ``images`` has the picture of each, or None.
    """
    check_value("prompts", list(prompts), Annotated[list[str], Field(min_length=1)])
    check_value("seeds", list(seeds), Annotated[list[Seed], Field(min_length=1)])
    samples = []
    for place, (prompt, image) in enumerate(zip(prompts, images or [None] * len(prompts), strict=True)):
        name = name_of_prompt(prompt)
        if image is not None:
            if not image.is_file():
                raise FileNotFoundError(f"There is no picture {image}.")
            name = f"{name}-{file_hash(image)[:8]}"  # another picture is another file
        shown = None if image is None else str(image)
        samples += [Sample(f"{place:04d}-{seed}-{name}{suffix}", prompt, shown, seed) for seed in seeds]
    return samples


def name_of_prompt(prompt: str) -> str:
    """Make a prompt part of a file name: letters and digits of any script, and a hash if that loses anything."""

    def is_letter(character: str) -> bool:  # or a digit, or a mark, such as the vowels of Devanagari
        return character.isalnum() or unicodedata.category(character).startswith("M")

    letters = "".join(part if is_letter(part) else " " for part in unicodedata.normalize("NFC", prompt).lower())
    name = unicodedata.normalize("NFC", "-".join(letters.split()))[:_MAX_LENGTH]
    name = name.encode()[:_MAX_BYTES].decode(errors="ignore").strip("-") or "empty"
    if name.replace("-", " ") == prompt:
        return name
    return f"{name}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


def generate(
    config: SampleSet, process: int = 0, processes: int = 1, *, show_steps: bool = False
) -> Iterator[tuple[Sample, bool]]:
    """Generate this process's missing samples, with diffusers' bar of the steps on a terminal if asked for.

    Args:
        config: which, and how.
        process: number of this process.
        processes: that share the samples.
        show_steps: whether diffusers shows its bar of the steps.

    Yields:
        Each sample, and whether it was generated (True) or existed already (False); those that existed first.

    Raises:
        OSError: the output folder is not writable or another run has it, raised before anything is loaded; or writing a
            file failed.
        ValueError: a setting that the pipeline does not take, an invalid prompt, a model of another family, a patch
            that is unknown or does not fit, a folder with files made with other choices, or a result that is not
            finite.
        ImportError: imageio is missing, which videos need.
    """
    from diffusers.image_processor import VaeImageProcessor

    with folder_for_results(config.output, lock=process == 0):
        config.check()
        _check_folder(config)
        if config.of_family.makes_videos:
            import_imageio()
        missing = []
        for sample in config.samples[process::processes]:
            if (config.output / sample.file).is_file():  # whole, since files are written aside
                yield sample, False
            else:
                missing.append(sample)
        pipe = config.load(sorted({sample.text for sample in config.samples})) if missing else None
        if pipe is not None:
            pipe.set_progress_bar_config(disable=not (show_steps and shows_bars()))
        for start in range(0, len(missing), config.batch_size):
            batch = missing[start : start + config.batch_size]
            noise = [
                torch.Generator().manual_seed(sample.seed)
                if sample.seed is not None
                else generator_for(config.seed or 0, "sample", sample.file)
                for sample in batch
            ]
            image = batch[0].image
            picture = {} if image is None else {"image": _read_first_frame(Path(image))}
            results = config.call(pipe, [sample.text for sample in batch], noise, output_type="np", **picture)
            if not start:  # just before the first file, so that a failing run leaves nothing
                _record(config)
            for sample, result in zip(batch, results, strict=True):
                if not numpy.isfinite(result).all():
                    raise ValueError(
                        f"{type(pipe).__name__} returns values that are not finite for {sample.text!r} with dtype "
                        f"{config.dtype} and settings {config.settings}; use another dtype, settings or weights."
                    )
                if sample.file.endswith(".png"):
                    (result,) = VaeImageProcessor.numpy_to_pil(result)
                write_sample(result, config.output / sample.file, config.video_rate)
                yield sample, True
        if not missing:
            _record(config)
        measured = [] if pipe is None or process else [one.error_words() for one in find_patched(pipe).values()]
        if any(measured):
            record_measured(config.output, measured)


def generate_share(config: SampleSet, *, show_steps: bool = False) -> Iterator[tuple[Sample, bool]]:
    """Generate the share of this process, on its own device, and wait for the others that accelerate has launched.

    Yields what :func:`generate` does, in the main process alone.
    """
    from accelerate import PartialState

    # at the end processes wait for the slowest one, perhaps longer than the default timeout of half an hour
    state = PartialState(cpu=launched_on_cpus(), timeout=timedelta(days=7))
    if config.device == "auto" and state.num_processes > 1:
        config = replace(config, device=str(state.device))
    for done in generate(config, state.process_index, state.num_processes, show_steps=show_steps):
        if state.is_main_process:
            yield done
    state.wait_for_everyone()


def _check_folder(config: SampleSet) -> None:
    """Raise ValueError unless the samples may be written into the folder.

    Further prompts and seeds may join those of ``mhla generate``, and a longer set with one seed a shorter one.
    """
    folder = config.output
    foreign = first_sample(folder)  # looked for first: other processes write the record before any sample
    if foreign is not None and not (folder / RECORD_NAME).is_file():
        raise ValueError(
            f"{folder} has files that are not of this set, such as {foreign.relative_to(folder)}. Choose an empty "
            "folder."
        )
    check_choices(folder, config.choices)
    planned = {sample.file: sample.text for sample in config.samples}
    for sample in read_sample_list(folder) or () if config.seed is not None else ():
        if planned.get(sample.file) != sample.text and (folder / sample.file).is_file():
            raise ValueError(
                f"{folder} has another set: there {sample.file} shows {sample.text!r}, here "
                f"{planned.get(sample.file, 'no such file')!r}. Choose another output folder."
            )


def _record(config: SampleSet) -> None:
    """Write the settings and the list of samples; every process writes the same."""
    record_choices(config.output, config.choices)
    planned = {sample.file: sample for sample in config.samples}
    earlier = {sample.file: sample for sample in read_sample_list(config.output) or ()}
    kept = {file: sample for file, sample in earlier.items() if file in planned or (config.output / file).is_file()}
    listed = kept | planned
    write_sample_list([listed[file] for file in sorted(listed)], config.output)


def _read_first_frame(file: Path) -> Any:
    """Read a sample's picture; ValueError naming it if that fails."""
    from .pixels import UnreadableMediaError, read_picture

    try:
        return read_picture(file)
    except UnreadableMediaError as error:
        raise ValueError(f"{file} is {error}.") from error
