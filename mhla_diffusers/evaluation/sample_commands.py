"""``mhla eval samples``: a subcommand per kind of set, with its own and shared parameters."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from ..generation.names import PipelineOptions, expand_options, read_prompts
from ..generation.record import Sample
from .geneval import geneval_samples, read_geneval_metadata, write_geneval_metadata
from .vbench import read_augmented, read_suite, suite_videos

app = typer.Typer(
    help="Generate a set of samples; accelerate launch shares the work between processes. Resumes where it stopped.",
    no_args_is_help=True,
)

_FOLDER = Annotated[Path, typer.Argument(help="Folder of the set.")]
_NPZ = Annotated[Path | None, typer.Option(help="Also write all images into this npz, in ADM's format.")]


@dataclass(frozen=True, kw_only=True)
class SetOptions(PipelineOptions):
    """Options of every set: the pipeline, and how to sample from it."""

    family: Annotated[str, typer.Option(help="wan, flux, mochi, …; mhla info lists all.")]
    seed: Annotated[int, typer.Option(help="Of the set.")] = 0
    batch_size: Annotated[int, typer.Option(help="Samples per call of the pipeline.")] = 1
    device: Annotated[str, typer.Option(help='cpu, cuda, …; "auto" for that of each process.')] = "auto"


@app.command()
@expand_options
def classes(
    output: _FOLDER,
    count: Annotated[int, typer.Option(help="How many images; 50000 for ImageNet.")],
    options: SetOptions,
    labels: Annotated[int | None, typer.Option(help="Number of classes; default: all of the model.")] = None,
    label_order: Annotated[str, typer.Option(help="balanced or random.")] = "balanced",
    npz: _NPZ = None,
) -> None:
    """Images of classes, as FID on ImageNet needs them."""
    from ..generation.pipelines import class_count, family_named
    from .samples import class_samples

    if not family_named(options.family).prompts_are_classes:
        raise ValueError(f"{options.family} takes text, not classes; use mhla eval samples prompts.")
    if labels is None:
        labels = class_count(options.model, options.family)
    _generate(options, output, class_samples(count, labels, label_order, options.seed), npz)


@app.command()
@expand_options
def prompts(
    output: _FOLDER,
    file: Annotated[Path, typer.Argument(help="One prompt per line; classes by number or name for dit.")],
    options: SetOptions,
    per_prompt: Annotated[int, typer.Option(help="Samples of each.")] = 1,
    npz: _NPZ = None,
) -> None:
    """Images or videos of the prompts in a file."""
    from ..generation.pipelines import family_named
    from .samples import prompt_samples

    family = family_named(options.family)
    if npz is not None and family.makes_videos:
        raise ValueError(f"--npz {npz} is for images, but {family.name} makes videos.")
    _generate(options, output, prompt_samples(read_prompts(file), per_prompt, family.suffix), npz)


@app.command()
@expand_options
def geneval(
    output: _FOLDER,
    metadata: Annotated[Path, typer.Argument(help="GenEval's evaluation_metadata.jsonl.")],
    options: SetOptions,
) -> None:
    """Images of GenEval's prompts, laid out as its evaluator reads them."""
    entries = read_geneval_metadata(metadata)
    if _generate(options, output, geneval_samples(entries)):
        write_geneval_metadata(entries, output)


@app.command()
@expand_options
def vbench(
    output: _FOLDER,
    suite: Annotated[Path, typer.Argument(help="VBench_full_info.json, which comes with VBench.")],
    options: SetOptions,
    augmented: Annotated[Path | None, typer.Option(help="Augmented prompts, a line per entry of the suite.")] = None,
    all_flickering: Annotated[bool, typer.Option(help="25 videos of each temporal flickering prompt.")] = False,
) -> None:
    """Videos of VBench's prompts, named as it reads them."""
    entries = read_suite(suite)
    texts = read_augmented(augmented, entries) if augmented is not None else None
    _generate(options, output, suite_videos(entries, texts, all_flickering=all_flickering))


def _generate(options: SetOptions, output: Path, samples: list[Sample], npz: Path | None = None) -> bool:
    """Generate this process's share of a set and wait for the others.

    Returns:
        Whether this process completes the set, for example with an npz of all images.
    """
    from accelerate import PartialState

    from ..devices import launched_on_cpus
    from ..reporting import show_progress
    from .images import Images, write_npz
    from .samples import SampleConfig, generate_samples, prepare_folder

    # at the end processes wait for the slowest one, perhaps longer than the default timeout of half an hour
    state = PartialState(cpu=launched_on_cpus(), timeout=timedelta(days=7))
    device = str(state.device) if options.device == "auto" else options.device
    config = SampleConfig(**{**options.arguments(), "device": device}, samples=samples, output=output)
    with state.main_process_first():
        if state.is_main_process:
            prepare_folder(config)
    own = len(samples[state.process_index :: state.num_processes])
    for done in generate_samples(config, state.process_index, state.num_processes):
        if state.is_main_process:
            show_progress(done, own)
    state.wait_for_everyone()
    if state.is_main_process:
        typer.echo(f"{output} holds {len(samples)} samples.")
        if npz is not None:
            write_npz(Images(output), npz)
    return bool(state.is_main_process)
