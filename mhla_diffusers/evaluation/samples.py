"""Generate a set of samples: the same files whatever the batch size and the number of processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import check_writable
from ..generation import PipelineChoice, generator_for
from ..generation.record import (
    RECORD_NAME,
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


@dataclass(frozen=True)
class SampleConfig(PipelineChoice):
    """Which samples, of which model, to where.

    Raises:
        ValueError: a value that is not allowed.
    """

    samples: Sequence[Sample]
    """See :mod:`mhla_diffusers.evaluation.sets`."""
    output: Path
    """Folder of the set."""
    seed: int = 0
    """Of the set; every sample has noise of its own."""
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


def generate_samples(config: SampleConfig, process: int = 0, processes: int = 1) -> Iterator[int]:
    """Generate what this process has to and is not there yet, or is there in part.

    Args:
        config: what to generate.
        process: index of this process.
        processes: how many share the work.

    Yields:
        The number of this process's samples that are there, first as it begins.

    Raises:
        OSError: a file cannot be written.
        ValueError: the model is refused, or a class that it does not have.
        ImportError: imageio is missing and there are videos to write.
    """
    if config.of_family.makes_videos:
        import_imageio()
    own = config.samples[process::processes]
    missing = [sample for sample in own if not is_whole(config.output / sample.file)]
    done = len(own) - len(missing)
    yield done
    if not missing:
        _record(config)
        return
    pipe = config.load(sorted({sample.text for sample in config.samples}))
    for start in range(0, len(missing), config.batch_size):
        batch = missing[start : start + config.batch_size]
        noise = [generator_for(config.seed, "sample", sample.file) for sample in batch]
        results = config.generate(pipe, [sample.text for sample in batch], noise)
        if not start:  # before the first file and not earlier, so that a run that fails leaves nothing
            _record(config)
        for sample, result in zip(batch, results, strict=True):
            write_sample(result, config.output / sample.file, config.video_rate)
        done += len(batch)
        yield done


def prepare_folder(config: SampleConfig) -> None:
    """Make the folder, and make sure that the set may go into it. One process calls this before any generates.

    A longer set may go on in the folder of a shorter one. What is written down there holds for files that are there.

    Raises:
        OSError: the folder cannot be written.
        ValueError: the folder holds samples of another run, or the pipeline does not take a setting.
    """
    check_writable(config.output)
    config.check()
    _check_foreign_files(config.output)
    check_choices(config.output, _choices(config))
    planned = {sample.file: sample.text for sample in config.samples}
    for sample in read_sample_list(config.output) or ():
        if planned.get(sample.file) != sample.text and (config.output / sample.file).is_file():
            raise ValueError(
                f"{config.output} holds another set: {sample.file} shows {sample.text!r}, but this one has "
                f"{planned.get(sample.file, 'no such file')!r} there. Choose another output folder."
            )


def _choices(config: SampleConfig) -> dict[str, Any]:
    return {**config.choices, "seed": config.seed}


def _record(config: SampleConfig) -> None:
    """Write down what goes into the folder; every process writes the same."""
    record_choices(config.output, _choices(config))
    write_sample_list(config.samples, config.output)


def _check_foreign_files(folder: Path) -> None:
    if (folder / RECORD_NAME).is_file():
        return
    foreign = first_sample(folder)
    if foreign is not None:
        raise ValueError(
            f"{folder} holds files of unknown origin, such as {foreign.relative_to(folder)}. Choose an empty folder, "
            "so that sets do not mix."
        )
