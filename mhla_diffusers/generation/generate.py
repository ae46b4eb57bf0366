"""Generate images and videos from prompts into a folder."""

import hashlib
import inspect
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..families.styles import takes_picture
from ..files import file_hash, folder_for_results
from .pipelines import PipelineChoice
from .record import (
    Sample,
    check_choices,
    import_imageio,
    is_whole,
    read_sample_list,
    record_choices,
    write_sample,
    write_sample_list,
)

MAX_SEED = 2**63 - 1
"""Largest seed of torch's generators, which also accept negative seeds but map them to others."""
_MAX_LENGTH, _MAX_BYTES = 60, 150
"""Maximum length of a prompt in a file name, which may have 255 bytes: 37 letters of four bytes."""


@dataclass(frozen=True)
class GenerationConfig(PipelineChoice):
    """What to generate, with which model, to where."""

    prompts: tuple[str, ...]
    """For DiT: class labels, by name or number."""
    output: Path
    """Folder for ``{prompt number}-{seed}-{prompt}.png`` or ``.mp4``, see :func:`name_of_prompt`."""
    seeds: tuple[int, ...] = (0,)
    """Every prompt is generated once per seed."""
    images: tuple[Path | None, ...] = ()
    """For an image-to-video pipeline: the picture of every prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts:
            raise ValueError("There are no prompts; give at least one, or a file with one prompt per line.")
        if not self.seeds:
            raise ValueError("There are no seeds; give at least one.")
        wrong = next((seed for seed in self.seeds if not 0 <= seed <= MAX_SEED), None)
        if wrong is not None:
            raise ValueError(f"The seed {wrong} is out of range; allowed: 0 to {MAX_SEED}.")
        if len(self.images) not in (0, len(self.prompts)):
            raise ValueError(f"images has {len(self.images)} pictures for {len(self.prompts)} prompts; give one each.")
        missing = next((image for image in self.images if image is not None and not image.is_file()), None)
        if missing is not None:
            raise FileNotFoundError(f"There is no picture {missing}.")

    def check(self) -> None:
        """As :meth:`PipelineChoice.check`, and whether the pipeline takes the pictures.

        Raises:
            ValueError: it takes none, or needs one for every prompt.
        """
        super().check()
        pipeline, images = self.pipeline_class(), self.images or (None,) * len(self.prompts)
        takes = inspect.signature(pipeline.__call__).parameters.get("image")
        if takes is None and any(images):
            raise ValueError(
                f"{pipeline.__name__} takes no picture; leave --image out, or give --model a folder or Hub id with an "
                "image-to-video pipeline."
            )
        shows = takes is not None and (
            takes.default is takes.empty or (self.of_family.makes_videos and takes_picture(pipeline))
        )
        if shows and not all(images):
            lacking = self.prompts[images.index(None)]
            raise ValueError(
                f"{pipeline.__name__} needs a picture for every prompt, and {lacking!r} has none; give --image FILE, "
                "or a prompt file with a column 'image'."
            )


@dataclass(frozen=True)
class Task:
    """One file to make."""

    prompt: str
    seed: int
    file: Path
    image: Path | None = None


def plan_tasks(config: GenerationConfig) -> list[Task]:
    """The files that a configuration asks for."""
    tasks, suffix = [], config.of_family.suffix
    for index, prompt in enumerate(config.prompts):
        image, name = config.images[index] if config.images else None, name_of_prompt(prompt)
        if image is not None:  # another picture is another file
            name = f"{name}-{file_hash(image)[:8]}"
        tasks += [
            Task(prompt, seed, config.output / f"{index:04d}-{seed}-{name}{suffix}", image) for seed in config.seeds
        ]
    return tasks


def read_picture(file: Path) -> Any:
    """A picture as RGB, turned as it was taken, as ``mhla encode`` and diffusers' own ``load_image`` read it.

    Raises:
        ValueError: no picture, a damaged one, or one of too many pixels for PIL.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"{file} is not a picture that can be read: {error}.") from error


def generate(config: GenerationConfig) -> Iterator[tuple[Task, bool]]:
    """Generate missing and incomplete files.

    Yields:
        Each task, and whether it was generated (True) or its file existed already (False).

    Raises:
        OSError: the output folder is not writable, raised before anything is loaded; or writing a file failed.
        ValueError: a setting that the pipeline does not take, an unknown class label, a model of another family, a
            patch that is unknown or does not fit, or a folder with files made with other choices.
    """
    with folder_for_results(config.output):
        config.check()
        # file names hold the seeds; a set of mhla eval samples has one seed and must not be mixed with them
        choices = {**config.choices, "seed": None}
        check_choices(config.output, choices)
        if config.of_family.makes_videos:
            import_imageio()
        pipe: Any = None
        tasks = plan_tasks(config)
        for task in tasks:
            if is_whole(task.file):
                yield task, False
                continue
            if pipe is None:
                pipe = config.load(config.prompts)
            picture = {} if task.image is None else {"image": read_picture(task.image)}
            (sample,) = config.generate(pipe, [task.prompt], [torch.Generator().manual_seed(task.seed)], **picture)
            record_choices(config.output, choices)
            write_sample(sample, task.file, config.video_rate)
            yield task, True
        # including the entries of earlier runs
        earlier = [one for one in read_sample_list(config.output) or () if is_whole(config.output / one.file)]
        listed = {one.file: one for one in earlier} | {t.file.name: _entry(t) for t in tasks}
        write_sample_list([listed[name] for name in sorted(listed)], config.output)


def _entry(task: Task) -> Sample:
    return Sample(task.file.name, task.prompt, None if task.image is None else str(task.image))


def name_of_prompt(prompt: str) -> str:
    """A prompt as part of a file name: letters and digits of any script, and a hash if that loses anything."""

    def is_letter(character: str) -> bool:  # or a digit, or a mark, such as the vowels of Devanagari
        return character.isalnum() or unicodedata.category(character).startswith("M")

    letters = "".join(part if is_letter(part) else " " for part in unicodedata.normalize("NFC", prompt).lower())
    name = unicodedata.normalize("NFC", "-".join(letters.split()))[:_MAX_LENGTH]
    name = name.encode()[:_MAX_BYTES].decode(errors="ignore").strip("-") or "empty"
    if name.replace("-", " ") == prompt:
        return name
    return f"{name}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"
