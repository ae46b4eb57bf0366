"""Sets of samples: their files, and generating them independently of batch size and number of processes."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import check_writable
from ..generation import PipelineChoice, generator_for
from ..generation.record import (
    RECORD_NAME,
    SAMPLE_LIST,
    Sample,
    check_choices,
    first_sample,
    import_imageio,
    is_whole,
    read_sample_list,
    record_choices,
    write_sample,
    write_sample_list,
)


def class_samples(count: int, labels: int, order: str = "balanced", seed: int = 0) -> list[Sample]:
    """Class-conditional images ``000000.png`` …: 50 000 of 1000 classes for ImageNet.

    The order "balanced" cycles through the classes; "random" draws them.
    """
    if count < 1 or labels < 1:
        raise ValueError(f"count={count} and labels={labels} must be positive.")
    if order not in ("balanced", "random"):
        raise ValueError(f"order={order!r} is unknown; allowed: 'balanced', 'random'.")
    chance = random.Random(seed)
    chosen = [number % labels if order == "balanced" else chance.randrange(labels) for number in range(count)]
    return [Sample(f"{number:06d}.png", str(label)) for number, label in enumerate(chosen)]


def prompt_samples(prompts: Sequence[str], per_prompt: int, suffix: str) -> list[Sample]:
    """``{prompt number}-{sample number}`` with a suffix of .png or .mp4.

    Raises:
        ValueError: ``per_prompt`` is not positive.
    """
    if per_prompt < 1:
        raise ValueError(f"per_prompt={per_prompt} must be positive.")
    return [
        Sample(f"{place:05d}-{number}{suffix}", prompt)
        for place, prompt in enumerate(prompts)
        for number in range(per_prompt)
    ]


def require_samples(folder: Path) -> list[Sample]:
    """The list of a complete set.

    Raises:
        FileNotFoundError: no list, or missing files.
        ValueError: the list is damaged or empty.
    """
    samples = read_sample_list(folder)
    if samples is None:
        raise FileNotFoundError(
            f"{folder} has no {SAMPLE_LIST}; generate the set with mhla eval samples or mhla generate."
        )
    if not samples:
        raise ValueError(f"{folder / SAMPLE_LIST} lists no samples.")
    missing = [sample.file for sample in samples if not (folder / sample.file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(samples)} samples, for example {missing[0]}; run the command that "
            "makes the set again, which resumes where it stopped."
        )
    return samples


@dataclass(frozen=True)
class SampleConfig(PipelineChoice):
    """Which samples, of which model, to where."""

    samples: Sequence[Sample]
    output: Path
    """Folder of the set."""
    seed: int = 0
    """Seed of the set; every sample has its own noise."""
    batch_size: int = 1
    """Samples per call of the pipeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.samples:
            raise ValueError("There are no samples to generate.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be positive.")
        suffix = self.of_family.suffix
        wrong = next((sample.file for sample in self.samples if not sample.file.endswith(suffix)), None)
        if wrong is not None:
            raise ValueError(f"{self.family} generates {suffix} files, but the samples are such as {wrong!r}.")

    @property
    def set_choices(self) -> dict[str, Any]:
        """The record written beside the samples."""
        return {**self.choices, "seed": self.seed}


def prepare_folder(config: SampleConfig) -> None:
    """Create the folder, and raise unless the set may be written into it. One process calls this first.

    A longer set may extend the folder of a shorter one. The folder's record applies to existing files.

    Raises:
        ValueError: the folder holds samples of another run, or the pipeline does not take a setting.
    """
    folder = config.output
    check_writable(folder)
    config.check()
    foreign = None if (folder / RECORD_NAME).is_file() else first_sample(folder)
    if foreign is not None:
        raise ValueError(
            f"{folder} holds files of unknown origin, such as {foreign.relative_to(folder)}. Choose an empty folder, "
            "so that sets do not mix."
        )
    check_choices(folder, config.set_choices)
    planned = {sample.file: sample.text for sample in config.samples}
    for sample in read_sample_list(folder) or ():
        if planned.get(sample.file) != sample.text and (folder / sample.file).is_file():
            raise ValueError(
                f"{folder} holds another set: {sample.file} shows {sample.text!r}, but this one has "
                f"{planned.get(sample.file, 'no such file')!r} there. Choose another output folder."
            )


def generate_samples(config: SampleConfig, process: int = 0, processes: int = 1) -> Iterator[int]:
    """Generate this process's missing and incomplete samples.

    Yields:
        The number of this process's existing samples, first at the start.

    Raises:
        ValueError: the model cannot be used, or it lacks a class.
        ImportError: imageio is missing, which videos need.
    """
    if config.of_family.makes_videos:
        import_imageio()
    own = config.samples[process::processes]
    missing = [sample for sample in own if not is_whole(config.output / sample.file)]
    done = len(own) - len(missing)
    yield done
    pipe: Any = None
    for start in range(0, len(missing), config.batch_size):
        if pipe is None:
            pipe = config.load(sorted({sample.text for sample in config.samples}))
        batch = missing[start : start + config.batch_size]
        noise = [generator_for(config.seed, "sample", sample.file) for sample in batch]
        results = config.generate(pipe, [sample.text for sample in batch], noise)
        if not start:  # just before the first file, so that a failing run leaves nothing
            _record(config)
        for sample, result in zip(batch, results, strict=True):
            write_sample(result, config.output / sample.file, config.video_rate)
        done += len(batch)
        yield done
    if not missing:
        _record(config)


def _record(config: SampleConfig) -> None:
    """Write the record of the folder; every process writes the same."""
    record_choices(config.output, config.set_choices)
    write_sample_list(config.samples, config.output)
