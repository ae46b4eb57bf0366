"""``mhla finetune``, ``mhla encode`` and ``mhla synthesize``; their modules are imported when one is called."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..files import folder_for_results

if TYPE_CHECKING:
    from ..families import Clip

_Model = Annotated[str, typer.Option(help="Hub id or folder of the pipeline; or tiny-wan, tiny-sana, tiny-dit.")]
_Output = Annotated[Path, typer.Option(help="Folder for the latents.")]
_Frames = Annotated[int | None, typer.Option(help="Per video; default: the family's, 81 for Wan.")]
_Sizes = Annotated[list[str] | None, typer.Option("--size", help="HEIGHTxWIDTH; repeat for aspect buckets.")]
_Device = Annotated[str, typer.Option(help='"auto" for a GPU if there is one.')]
_Precision = Annotated[str, typer.Option("--precision", "--dtype", help="bf16 (or bfloat16), or no for float32.")]


def finetune_command(
    config: Annotated[Path, typer.Option(help="YAML file, for example one of finetune/configs.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example stages.0.steps=200.")] = None,
    resume: Annotated[str | None, typer.Option(help='"latest", or the path of a checkpoint.')] = None,
    dry_run: Annotated[bool, typer.Option(help="Show parameters, memory and FLOPs, and exit.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: processes that FSDP2 shards the weights over.")
    ] = None,
) -> None:
    """Adapt a patched model; the same as finetune/adapt.py, which accelerate launch starts on several devices."""
    import logging

    from . import finetune
    from .config import TrainingConfig
    from .run_folder import TrainingDivergedError

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = TrainingConfig.from_yaml(config, overrides or [])
    if dry_run:
        typer.echo(finetune.dry_run(settings, processes))
        return
    if processes is not None:
        raise ValueError(
            f"--processes {processes} is for --dry-run; accelerate launch --num_processes {processes} "
            "finetune/adapt.py … starts as many."
        )
    try:
        result = finetune.finetune(settings, resume=resume)
    except TrainingDivergedError as error:
        raise ValueError(error) from error
    if not result.finished:
        raise typer.Exit(result.exit_code)
    typer.echo(f"Wrote {result.result}")


def encode_command(
    model: _Model,
    source: Annotated[
        Path,
        typer.Option(help="Folder of videos or images with captions, or webdataset's tar shards: folder or 'a/*.tar'."),
    ],
    output: _Output,
    frames: _Frames = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second; default: the family's, 16 for Wan.")] = None,
    sizes: _Sizes = None,
    workers: Annotated[int, typer.Option(help="Processes that read files.")] = 4,
    device: _Device = "auto",
    precision: _Precision = "bf16",
) -> None:
    """Encode videos or images with captions into latents for finetune. Resumes where it stopped."""
    import logging

    from ..generation.pipelines import check_classes, family_of, pipeline_source
    from .latents.encode import encode_folder
    from .latents.media import find_media

    model = pipeline_source(model)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # before anything is loaded; captions in shards are skipped where they are no class
    captions = dict.fromkeys(item.caption for item in find_media(source) if item.offset is None)
    check_classes(model, family_of(model).name, captions)
    with folder_for_results(output, lock=False):
        pipe, clip = _load(model, device, precision, frames, fps, sizes, uses_transformer=False)
        index = encode_folder(pipe, model, source, output, clip, workers)
    typer.echo(f"{output} holds {len(index.samples)} samples; {len(index.skipped)} files were skipped.")


def synthesize_command(
    model: _Model,
    prompts: Annotated[Path, typer.Option(help="One prompt per line, or a .csv or .jsonl with a column text.")],
    output: _Output,
    frames: _Frames = None,
    sizes: _Sizes = None,
    steps: Annotated[int, typer.Option(help="Of the sampler; 0 encodes the prompts alone, for few_steps.")] = 50,
    guidance: Annotated[float, typer.Option(help="Scale of classifier-free guidance.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: _Device = "auto",
    precision: _Precision = "bf16",
) -> None:
    """Make latents for finetune from prompts, with the unpatched model. Resumes where it stopped."""
    from ..generation.names import read_prompts
    from ..generation.pipelines import check_classes, family_of, pipeline_source
    from .latents.encode import synthesize

    model = pipeline_source(model)
    if len(sizes or ()) > 1:
        raise ValueError(f"--size {', '.join(sizes or ())}: give one; each size needs a folder of its own.")
    lines = read_prompts(prompts)
    check_classes(model, family_of(model).name, lines)
    with folder_for_results(output, lock=False):
        pipe, clip = _load(model, device, precision, frames, None, sizes, uses_transformer=steps != 0)
        index = synthesize(pipe, model, lines, output, clip, steps=steps, guidance=guidance, seed=seed)
    typer.echo(f"{output} holds {len(index.samples)} samples.")


def _load(
    model: str,
    device: str,
    precision: str,
    frames: int | None,
    fps: float | None,
    sizes: Sequence[str] | None,
    uses_transformer: bool,
) -> tuple[Any, "Clip"]:
    """Load a pipeline, and return it with its family's default clip, overridden by the values given."""
    from dataclasses import replace

    from ..devices import FLOAT_TYPES, dtype_name
    from ..generation import family_of, load_pipeline
    from ..generation.pipelines import transformers_of

    pairs = []
    for size in sizes or ():
        height, _, width = size.partition("x")
        if not (height.isdigit() and width.isdigit()):
            raise ValueError(f"Size {size!r} must look like HEIGHTxWIDTH, for example 480x832.")
        pairs.append((int(height), int(width)))
    given: dict[str, Any] = {"frames": frames, "fps": fps, "sizes": tuple(pairs) or None}
    family, dtype = family_of(model), FLOAT_TYPES[dtype_name(precision, "precision", ("float32", "bfloat16"))]
    clip = replace(family.default_clip, **{name: value for name, value in given.items() if value is not None})
    unused = () if uses_transformer else transformers_of(model)
    return load_pipeline(model, family.name, device, dtype, unused), clip
