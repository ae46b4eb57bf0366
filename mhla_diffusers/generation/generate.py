"""Generate images and videos from prompts into a folder."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import check_writable
from .pipelines import PipelineChoice
from .record import import_imageio, record_choices, write_sample

MAX_SEED = 2**63 - 1
"""Of torch's generators, which take a few more, but map negative ones to others."""


@dataclass(frozen=True)
class GenerationConfig(PipelineChoice):
    """What to generate, with which model, to where.

    Raises:
        ValueError: a value that is not allowed.
    """

    prompts: tuple[str, ...]
    """For DiT: class labels, by name or number."""
    output: Path
    """Folder for ``{prompt number}-{seed}-{prompt}.png`` or ``.mp4``."""
    seeds: tuple[int, ...] = (0,)
    """Every prompt is generated once per seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts:
            raise ValueError("There are no prompts; give at least one, or a file with one prompt per line.")
        if not self.seeds:
            raise ValueError("There are no seeds; give at least one.")
        wrong = next((seed for seed in self.seeds if not 0 <= seed <= MAX_SEED), None)
        if wrong is not None:
            raise ValueError(f"The seed {wrong} is out of range; allowed: 0 to {MAX_SEED}.")


@dataclass(frozen=True)
class Task:
    """One file to make."""

    prompt: str
    seed: int
    file: Path


def plan_tasks(config: GenerationConfig) -> list[Task]:
    """The files that a configuration asks for."""
    suffix = config.of_family.suffix
    return [
        Task(prompt, seed, config.output / f"{index:04d}-{seed}-{_file_name(prompt)}{suffix}")
        for index, prompt in enumerate(config.prompts)
        for seed in config.seeds
    ]


def generate(config: GenerationConfig) -> Iterator[tuple[Task, bool]]:
    """Generate what is not there yet.

    Yields:
        Each task and whether it was generated (True) or its file was there already (False).

    Raises:
        OSError: the output folder cannot be written; said before anything is loaded.
        ValueError: a setting that the pipeline does not take, unknown class label, a model of another family, a patch
            that is unknown or does not fit, or a folder of files that were made with other choices.
    """
    check_writable(config.output)
    config.check()
    record_choices(config.output, config.choices)
    if config.of_family.makes_videos:
        import_imageio()
    pipe: Any = None
    for task in plan_tasks(config):
        if task.file.exists():
            yield task, False
            continue
        if pipe is None:
            pipe = config.load(config.prompts)
        (sample,) = config.generate(pipe, [task.prompt], [torch.Generator().manual_seed(task.seed)])
        write_sample(sample, task.file, config.video_rate)
        yield task, True


def _file_name(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "empty"
