"""``mhla data``, ``encode``, ``synthesize`` and ``finetune``; their modules are imported when one is called."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files import folder_for_results
from ..generation.names import device_options, expand_options

_Model = Annotated[str, typer.Option(help="Hub id or folder of the pipeline; or tiny-wan, tiny-sana, tiny-dit.")]
_Output = Annotated[Path, typer.Option(help="Folder for the latents.")]


def finetune_command(
    config: Annotated[Path, typer.Argument(exists=True, help="YAML file, such as one of finetune/configs.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example steps=200.")] = None,
    resume: Annotated[
        str | None, typer.Option(help='Checkpoint folder, or "latest", which starts a new run if there is none.')
    ] = None,
) -> None:
    """Adapt a patched model. On several devices, use accelerate launch finetune/adapt.py with the same arguments."""
    from ..devices import is_first_process
    from .config import TrainingConfig
    from .finetune import finetune

    _log_lines()
    result = finetune(TrainingConfig.from_yaml(config, overrides or []), resume=resume)
    if not result.finished:
        raise typer.Exit(result.exit_code)
    if is_first_process():
        typer.echo(f"Wrote {result.result}")


def export_command(
    checkpoint: Annotated[Path, typer.Argument(exists=True, help="Folder of a checkpoint, or of a run (its latest).")],
    output: Annotated[Path, typer.Option(help="New folder for the weights.")],
) -> None:
    """Save a checkpoint as a patch, with the moving average of the weights if there is one."""
    from .finetune import export_checkpoint

    _log_lines()
    export_checkpoint(checkpoint, output)
    typer.echo(f"Wrote {output}")


def clip_options(
    frames: Annotated[
        list[int] | None,
        typer.Option(
            help="Frames of a clip; repeat for several lengths; 1 for images; default: the model's, 81 for Wan."
        ),
    ] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second; default: the model's, 16 for Wan.")] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            help="480x832, height first, or 512 for a square; repeat for buckets; auto adds usual aspect ratios.",
        ),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Frames between the starts of clips; default: one clip, at the start.")
    ] = None,
    longest: Annotated[
        bool,
        typer.Option(
            "--longest",
            help="Cut only the longest clip up to --frames that a video has frames for, none below a second --frames.",
        ),
    ] = False,
    upscale: Annotated[
        bool, typer.Option("--upscale", help="Upscale files that are too small instead of leaving them out.")
    ] = False,
) -> dict[str, Any]:
    """Return the arguments of :meth:`DataModel.clips`."""
    return {"frames": frames, "fps": fps, "sizes": sizes, "stride": stride, "longest": longest, "upscale": upscale}


@expand_options(clip_options)
def data_command(
    source: Annotated[Path, typer.Argument(exists=True, help="Folder of captioned videos or images, or of latents.")],
    options: dict[str, Any],
    model: Annotated[str | None, typer.Option(help="Hub id or folder of the pipeline; not needed for latents.")] = None,
) -> None:
    """Show which files of a folder of videos, images or latents are used, which are not, and why."""
    from ..errors import check
    from ..reporting import progress
    from .data.cache import INDEX_NAME, CachedClip, read_index
    from .data.media import find_media, read_files
    from .data.model import DataModel
    from .data.summary import summarize

    _log_lines()
    data = None if model is None else DataModel(model)
    if (source / INDEX_NAME).is_file():
        check(not any(options.values()), f"{source} holds latents, whose clips are cut; give no option but --model.")
        files = read_index(source)[1]
    elif data is None:
        raise ValueError(f"How clips are cut from {source} depends on the model; give --model.")
    else:
        clips, found = data.clips(**options), find_media(source)
        data.check_captions(found)
        read = read_files(source, found, clips, lambda _, pixels: CachedClip(tuple(pixels.shape[1:])))
        files = list(progress(read, total=len(found), desc="read"))
    typer.echo(summarize(source, files, data))
    if not any(file.clips for file in files):
        raise ValueError(f"None of the files in {source} can be used.")


@expand_options(clip_options, device_options)
def encode_command(
    model: _Model,
    source: Annotated[Path, typer.Option(exists=True, help="Folder of videos or images with captions.")],
    output: _Output,
    options: dict[str, Any],
    shuffle_captions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Encode each caption in N orders of its tags between commas.")
    ] = 1,
) -> None:
    """Encode videos or images with captions into latents for finetune. Resumes where it stopped."""
    from .data.encode import encode_files
    from .data.media import find_media
    from .data.model import DataModel
    from .data.summary import summarize

    _log_lines()
    device = {name: options.pop(name) for name in ("device", "dtype")}
    data, files = DataModel(model), find_media(source, shuffle_captions)
    data.check_captions(files)
    clips = data.clips(**options)
    with folder_for_results(output):
        pipe = _load(data.name, uses_transformer=False, **device)
        encoded = encode_files(pipe, data, source, files, output, clips)
    typer.echo(summarize(output, encoded, data))


@expand_options(device_options)
def synthesize_command(
    model: _Model,
    prompts: Annotated[Path, typer.Option(exists=True, help="One per line, or a .csv or .jsonl with a column text.")],
    output: _Output,
    options: dict[str, Any],
    frames: Annotated[int | None, typer.Option(help="Frames per video; default: the model's, 81 for Wan.")] = None,
    size: Annotated[str | None, typer.Option(help="480x832, or 512 for a square; default: the model's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 50,
    guidance: Annotated[float, typer.Option(min=0, help="Guidance scale.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Noise seed.")] = 0,
) -> None:
    """Generate latents for finetune from prompts, with the unpatched model. Resumes where it stopped."""
    from ..generation.names import read_prompts
    from .data.cache import SourceFile
    from .data.encode import synthesize
    from .data.model import DataModel

    data = DataModel(model)
    lines = [prompt for prompt, _ in read_prompts(prompts)]
    files = [SourceFile(f"{number}: {prompt}", prompt) for number, prompt in enumerate(lines)]
    data.check_captions(files)
    clips = data.clips([frames] if frames else None, sizes=[size] if size else None)
    with folder_for_results(output):
        pipe = _load(data.name, uses_transformer=True, **options)
        synthesize(pipe, data, files, output, clips, steps=steps, guidance=guidance, seed=seed)
    typer.echo(f"{output} holds {len(files)} samples.")


def _log_lines() -> None:
    """Show log lines of the first process, and errors that end another."""
    from ..devices import is_first_process

    logging.basicConfig(level=logging.INFO if is_first_process() else logging.CRITICAL, format="%(message)s")


def _load(model: str, device: str, dtype: str | None, uses_transformer: bool) -> Any:
    """Load a pipeline, without its transformer if that is not used."""
    from ..devices import device_and_type
    from ..generation.pipelines import family_of, load_pipeline, transformers_of

    left_out = () if uses_transformer else transformers_of(model)
    return load_pipeline(model, family_of(model).name, device, device_and_type(device, dtype)[1], left_out)
