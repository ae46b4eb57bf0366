"""Generate images and videos from prompts into a folder: what ``pipelines/generate_*.py`` and ``mhla generate`` run."""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .class_labels import class_label
from .devices import FLOAT_TYPES, choose_device
from .evaluation.results import read_json
from .families import families, get_family
from .patches import load_patch
from .patching import apply_mhla, find_transformers
from .pipeline_settings import check_settings, parse_settings
from .prompts import read_prompts
from .sample_folder import check_writable, record_choices
from .training.encoders import pipeline_file
from .training.export import load_result


@dataclass(frozen=True)
class ModelChoice:
    """Which pipeline generates, and how it is called.

    Raises:
        ValueError: a value that is not allowed.
    """

    family: str
    """dit, sana or wan."""
    _: KW_ONLY
    model: str | None = None
    """Hub id or folder; None for the tiny pipeline that ships with the package."""
    patch: str | None = None
    """Name or YAML file of a patch to apply, as it is before training."""
    weights: str | None = None
    """What ``mhla finetune`` has left, or the folder or Hub id of a patch."""
    frames_per_second: int | None = None
    """Of videos; 16, as Wan was trained, or what the tiny pipeline was trained with, if left out."""
    device: str = "cpu"
    """For example cuda:1, or "auto" for a GPU if there is one."""
    dtype: str = "float32"
    """Of the weights, for example bfloat16."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call, for example height, width, num_frames, num_inference_steps."""

    def __post_init__(self) -> None:
        allowed = [family.name for family in families()]
        if self.family not in allowed:
            raise ValueError(f"family={self.family!r} is unknown; allowed: {', '.join(allowed)}.")
        if self.patch is not None and self.weights is not None:
            raise ValueError(
                f"Give either patch ({self.patch}) or weights ({self.weights}); trained weights bring their own patch."
            )
        choose_device(self.device)
        if self.dtype not in FLOAT_TYPES:
            raise ValueError(f"dtype={self.dtype!r} is unknown; allowed: {', '.join(FLOAT_TYPES)}.")
        if self.frames_per_second is not None and self.frames_per_second < 1:
            raise ValueError(f"frames_per_second={self.frames_per_second} must be positive.")


@dataclass(frozen=True)
class GenerationConfig(ModelChoice):
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


MAX_SEED = 2**63 - 1
"""Of torch's generators, which take a few more, but map negative ones to others."""


@dataclass(frozen=True)
class Task:
    """One file to make."""

    prompt: str
    seed: int
    file: Path


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
    check_call(config)
    record_choices(config.output, model_choices(config))
    if config.family == "wan":
        import_imageio()
    pipe: Any = None
    for task in plan_tasks(config):
        if task.file.exists():
            yield task, False
            continue
        if pipe is None:
            pipe = load_pipeline(config)
            check_prompts(pipe, config.family, config.prompts)
        result = call_pipeline(pipe, config, task.prompt, task.seed)
        aside = task.file.with_name(f".{task.file.name}")
        _write(result, aside, video_frames_per_second(config))
        aside.replace(task.file)
        yield task, True


def model_choices(config: ModelChoice) -> dict[str, Any]:
    """What decides how a result looks, but for prompt and seed."""
    names = ("family", "model", "patch", "weights", "dtype", "settings")
    return {name: getattr(config, name) for name in names}


def video_frames_per_second(config: ModelChoice) -> int:
    """Of the videos that are written."""
    if config.frames_per_second is not None:
        return config.frames_per_second
    if config.model is None:
        from .tiny.digits import FRAMES_PER_SECOND

        return FRAMES_PER_SECOND
    return 16


def plan_tasks(config: GenerationConfig) -> list[Task]:
    """The files that a configuration asks for."""
    suffix = ".mp4" if config.family == "wan" else ".png"
    return [
        Task(prompt, seed, config.output / f"{index:04d}-{seed}-{_file_name(prompt)}{suffix}")
        for index, prompt in enumerate(config.prompts)
        for seed in config.seeds
    ]


def check_call(config: ModelChoice) -> None:
    """Check the patch and the settings of the pipeline's call; of the pipeline, only the class is looked at.

    Raises:
        FileNotFoundError: no such model, or no such patch file.
        ValueError: an unknown patch, or a setting that the pipeline does not take.
    """
    import diffusers

    from .tiny.checksums import pipeline_folder

    if config.patch is not None:
        load_patch(config.patch)
    if config.settings:
        model = str(pipeline_folder(config.family)) if config.model is None else config.model
        name = read_json(pipeline_file(model, "model_index.json")).get("_class_name")
        pipeline = getattr(diffusers, str(name), None)
        if pipeline is None:
            raise ValueError(
                f"{model} is a pipeline of the class {name}, which diffusers {diffusers.__version__} lacks."
            )
        check_settings(pipeline, config.settings)


def check_prompts(pipe: Any, family: str, prompts: Iterable[str]) -> None:
    """Check the prompts that a pipeline does not take as they are.

    Raises:
        ValueError: a class that a DiT does not have.
    """
    if family == "dit":
        for prompt in prompts:
            class_label(pipe, prompt)


def load_pipeline(config: ModelChoice) -> Any:
    """The pipeline, patched where the configuration asks for it.

    Raises:
        ValueError: a model of another family, or a patch or weights that do not fit.
    """
    from diffusers import DiffusionPipeline

    device = str(choose_device(config.device))
    if config.model is None:
        from .tiny import load_tiny

        pipe = load_tiny(config.family, device).to(FLOAT_TYPES[config.dtype])
    else:
        pipe = DiffusionPipeline.from_pretrained(config.model, dtype=FLOAT_TYPES[config.dtype])
        pipe = pipe.to(device)
    found = {get_family(transformer).name for transformer in find_transformers(pipe).values()}
    if found != {config.family}:
        raise ValueError(f"{config.model} belongs to {', '.join(found)}, but family={config.family!r} was asked for.")
    if config.patch is not None:
        apply_mhla(pipe, config.patch)
    if config.weights is not None:
        load_result(pipe, config.weights)
    return pipe


def call_pipeline(pipe: Any, config: ModelChoice, prompt: str, seed: int) -> Any:
    """A PIL image, or frames (F, H, W, 3) in [0, 1]."""
    settings = call_arguments(config)
    generator = torch.Generator().manual_seed(seed)
    if config.family == "dit":
        return pipe(class_labels=[class_label(pipe, prompt)], generator=generator, **settings).images[0]
    output = pipe(prompt, generator=generator, **settings)
    return output.frames[0] if config.family == "wan" else output.images[0]


def call_arguments(config: ModelChoice) -> dict[str, Any]:
    """Settings of the pipeline's call; those that the tiny pipeline was trained for come first."""
    if config.model is None:
        from .tiny import call_settings

        return {**call_settings(config.family), **config.settings}
    return dict(config.settings)


def _write(result: Any, file: Path, frames_per_second: int) -> None:
    if file.suffix == ".png":
        result.save(file)
    else:
        write_video(result, file, frames_per_second)


def write_video(frames: Any, file: Path, frames_per_second: int) -> None:
    """Write an MP4 (H.264).

    Args:
        frames: (F, H, W, 3) in [0, 1].
        file: where to.
        frames_per_second: how fast it plays.

    Raises:
        ImportError: imageio is missing.
    """
    imageio = import_imageio()
    pixels = [(255 * torch.as_tensor(frame).clamp(0, 1)).round().to(torch.uint8).numpy() for frame in frames]
    imageio.mimwrite(file, pixels, format="FFMPEG", fps=frames_per_second, macro_block_size=2, quality=9)


def import_imageio() -> Any:
    """imageio, which writes MP4 through imageio-ffmpeg.

    Raises:
        ImportError: one of the two is missing.
    """
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401 - imageio writes MP4 through it
    except ImportError as error:
        raise ImportError(
            "Writing videos needs imageio and imageio-ffmpeg: pip install mhla_diffusers[video]"
        ) from error
    return imageio


def _file_name(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "empty"


def run_command_line(family: str, description: str, arguments: Sequence[str] | None = None) -> None:
    """What the scripts ``pipelines/generate_*.py`` and ``mhla generate`` do.

    Args:
        family: dit, sana or wan.
        description: shown by ``--help``.
        arguments: of the command line; those of the process if left out.

    Raises:
        SystemExit: with a message, if the arguments, the folder or the model are refused.
    """
    parser = argparse.ArgumentParser(
        prog=None if arguments is None else f"mhla generate {family}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--prompt-file", type=Path, help="one prompt per line")
    parser.add_argument("--output", type=Path, default=Path("outputs") / family)
    parser.add_argument("--model", help="Hub id or folder; the tiny pipeline of the package if left out")
    parser.add_argument("--patch", help="name or YAML file of a patch")
    parser.add_argument("--weights", help="folder or Hub id of a trained patch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--frames-per-second", type=int)
    parser.add_argument("--device", default=GenerationConfig.device, help="cpu, cuda, …, auto")
    parser.add_argument("--dtype", default=GenerationConfig.dtype)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="arguments of the pipeline's call")
    options = vars(parser.parse_args(arguments))
    prompts, prompt_file = tuple(options.pop("prompts")), options.pop("prompt_file")
    try:
        if prompt_file is not None:
            prompts += read_prompts(prompt_file)
        settings, seeds = parse_settings(options.pop("set")), tuple(options.pop("seeds"))
        config = GenerationConfig(family=family, prompts=prompts, seeds=seeds, settings=settings, **options)
        for task, made in generate(config):
            sys.stdout.write(f"{'wrote' if made else 'kept '} {task.file}\n")
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"Error: {error}") from None
