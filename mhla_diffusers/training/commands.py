"""``mhla data``, ``encode``, ``synthesize`` and ``finetune``; their modules are imported when one is called."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..files import folder_for_results

if TYPE_CHECKING:
    from .data.clips import Clips

_Model = Annotated[str, typer.Option(help="Hub id or folder of the pipeline; or tiny-wan, tiny-sana, tiny-dit.")]
_Output = Annotated[Path, typer.Option(help="Folder for the latents.")]
_Frames = Annotated[
    list[int] | None,
    typer.Option(help="Of a clip; repeat for several lengths, 1 for pictures; default: the model's, 81 for Wan."),
]
_Fps = Annotated[float | None, typer.Option(help="Frames per second; default: the model's, 16 for Wan.")]
_Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--size", help='480x832, height first, or 512 for a square; repeat for buckets, or "auto", or "auto 240x416".'
    ),
]
_Upscale = Annotated[bool, typer.Option("--upscale", help="Enlarge files that are too small, else left out.")]
_Device = Annotated[str, typer.Option(help='"auto" for a GPU if there is one.')]
_Precision = Annotated[str, typer.Option("--precision", help="bf16, or no for float32.")]


def finetune_command(
    config: Annotated[Path, typer.Argument(help="YAML file, for example one of finetune/configs.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example steps=200.")] = None,
    resume: Annotated[
        str | None, typer.Option(help='Path of a checkpoint, or "latest"; without one, "latest" starts a new run.')
    ] = None,
) -> None:
    """Adapt a patched model; accelerate launch finetune/adapt.py takes the same arguments on several devices."""
    from ..devices import is_first_process
    from .config import TrainingConfig
    from .finetune import finetune
    from .run_folder import TrainingDivergedError

    _log_lines()
    settings = TrainingConfig.from_yaml(config, overrides or [])
    try:
        result = finetune(settings, resume=resume)
    except TrainingDivergedError as error:
        raise ValueError(error) from error
    if not result.finished:
        raise typer.Exit(result.exit_code)
    if is_first_process():
        typer.echo(f"Wrote {result.result}")


def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint, or of a run for its latest one.")],
    output: Annotated[Path, typer.Option(help="New folder for the weights.")],
) -> None:
    """Make a patch of a checkpoint, as the run's result would be: of the moving average where there is one."""
    from .finetune import export_checkpoint

    _log_lines()
    export_checkpoint(checkpoint, output)
    typer.echo(f"Wrote {output}")


def data_command(
    source: Annotated[
        Path, typer.Argument(help="Folder of videos or images with captions, YAML file of several, or latents.")
    ],
    model: Annotated[str | None, typer.Option(help="Hub id or folder of the pipeline to encode with.")] = None,
    frames: _Frames = None,
    fps: _Fps = None,
    sizes: _Sizes = None,
    upscale: _Upscale = False,
    preview: Annotated[int, typer.Option(min=0, help="Clips to make pictures of, before they are encoded.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the pictures of --preview.")] = Path("outputs/data"),
) -> None:
    """Summarize a folder of videos, images or latents: what is used, what is left out, and why."""
    from .data.summary import summarize, write_pictures

    _log_lines()
    clips = _clips(source, model, frames, fps, sizes, upscale)
    summary = summarize(source, clips, model)
    typer.echo(str(summary))
    if preview:
        typer.echo("\n" + "\n".join(write_pictures(source, preview, output, clips, model)))
    if not any(file.clips for file in summary.files):
        raise ValueError(f"None of the files in {source} can be used.")


def encode_command(
    model: _Model,
    source: Annotated[
        Path,
        typer.Option(help="Folder of videos or images with captions, or a YAML file of several."),
    ],
    output: _Output,
    frames: _Frames = None,
    fps: _Fps = None,
    sizes: _Sizes = None,
    upscale: _Upscale = False,
    device: _Device = "auto",
    precision: _Precision = "bf16",
) -> None:
    """Encode videos or images with captions into latents for finetune. Resumes where it stopped."""
    from .data.encode import encode_folder
    from .data.model import DataModel
    from .data.sources import read_sources
    from .data.summary import DataSummary

    _log_lines()
    data, sources = DataModel(model), read_sources(source)
    usable = [item for item in sources.media() if item.problem is None]
    data.check_captions(caption for item in usable for caption in item.captions)  # before anything is loaded
    with folder_for_results(output, lock=False):
        clips = _clips(source, model, frames, fps, sizes, upscale)
        pipe = _load(data.name, device, precision, uses_transformer=False)
        files = encode_folder(pipe, data.name, source, output, clips)
    typer.echo(str(DataSummary(str(output), files, data, sources.shares)))


def synthesize_command(
    model: _Model,
    prompts: Annotated[Path, typer.Option(help="One prompt per line, or a .csv or .jsonl with a column text.")],
    output: _Output,
    frames: Annotated[int | None, typer.Option(help="Per video; default: the model's, 81 for Wan.")] = None,
    sizes: Annotated[list[str] | None, typer.Option("--size", help="HEIGHTxWIDTH.")] = None,
    steps: Annotated[int, typer.Option(help="Of the sampler.")] = 50,
    guidance: Annotated[float, typer.Option(help="Scale of classifier-free guidance.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: _Device = "auto",
    precision: _Precision = "bf16",
) -> None:
    """Make latents for finetune from prompts, with the unpatched model. Resumes where it stopped."""
    from ..generation.names import read_prompts
    from .data.encode import synthesize
    from .data.model import DataModel

    data = DataModel(model)
    if len(sizes or ()) > 1:
        raise ValueError(f"--size {', '.join(sizes or ())}: give one; each size needs a folder of its own.")
    lines = read_prompts(prompts)
    data.check_captions(lines)
    with folder_for_results(output, lock=False):
        clips = _clips(None, model, frames if frames is None else [frames], None, sizes)
        pipe = _load(data.name, device, precision, uses_transformer=True)
        made = synthesize(pipe, data.name, lines, output, clips, steps=steps, guidance=guidance, seed=seed)
    typer.echo(f"{output} holds {len(made)} samples.")


def _log_lines() -> None:
    """Show log lines of the first process, and errors that end another."""
    from ..devices import is_first_process

    logging.basicConfig(level=logging.INFO if is_first_process() else logging.CRITICAL, format="%(message)s")
    logging.getLogger("accelerate").setLevel(logging.WARNING)  # it logs every file of a checkpoint


def _load(model: str, device: str, precision: str, uses_transformer: bool) -> Any:
    """Load a pipeline, without its transformer if that is not used."""
    from ..devices import PRECISIONS
    from ..errors import check_choice
    from ..generation.pipelines import family_of, load_pipeline, transformers_of

    check_choice("precision", precision, tuple(PRECISIONS))
    left_out = () if uses_transformer else transformers_of(model)
    return load_pipeline(model, family_of(model).name, device, PRECISIONS[precision], left_out)


def _clips(
    source: Path | None,
    model: str | None,
    frames: Sequence[int] | None,
    fps: float | None,
    sizes: Sequence[str] | None,
    upscale: bool = False,
) -> "Clips | None":
    """Return the clips of a source's YAML file, else of the model, changed by the values given; None if none is."""
    from dataclasses import replace

    from ..reporting import parse_size
    from .data.clips import Clips
    from .data.model import DataModel
    from .data.sources import read_sources

    shapes = sizes[0] if sizes and sizes[0].startswith("auto") else tuple(map(parse_size, sizes or ()))
    wanted = {"frames": tuple(frames or ()), "fps": fps, "sizes": shapes, "upscale": upscale}
    given: dict[str, Any] = {name: value for name, value in wanted.items() if value}
    if not given:
        return None
    base = None if source is None else read_sources(source).clip
    if base is None and model is not None:
        base = DataModel(model).fitted(None)
    return Clips.read(given) if base is None else replace(base, **given)
