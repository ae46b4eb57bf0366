"""``mhla eval``."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files import read_json, read_json_lines, write_json
from ..generation.names import CHOICE, expand_options
from ..generation.record import Sample
from ..reporting import progress, text_table
from ..settings import parse_assignment
from .geneval import geneval_samples, geneval_score, write_geneval_metadata
from .vbench import DIMENSIONS, read_results, suite_videos, total_scores, vbench_commands

app = typer.Typer(help="Score generated images and videos.", no_args_is_help=True)
samples = typer.Typer(
    help="Generate a set of samples; accelerate launch shares the work between processes. Resumes where it stopped.",
    no_args_is_help=True,
)
app.add_typer(samples, name="samples")

_SET = Annotated[Path, typer.Argument(help="Folder for the samples.")]
_OUTPUT = Annotated[Path | None, typer.Option(help="Also write the result to this JSON file.")]
_DEVICE = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]


@app.command()
def fid(
    samples: Annotated[Path, typer.Argument(exists=True, help="Folder of images or videos.")],
    reference: Annotated[
        Path, typer.Argument(exists=True, help="Folder of images or videos, or an npz with mu and sigma.")
    ],
    extractor: Annotated[
        str, typer.Option(help="adm, clean, or package.module:callable: uint8 images (B, 3, H, W) to features (B, D).")
    ] = "adm",
    weights: Annotated[Path | None, typer.Option(help="Inception weights.")] = None,
    device: _DEVICE = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per call of the extractor.")] = 50,
    output: _OUTPUT = None,
) -> None:
    """Compute FID with the ADM suite's or clean-fid's Inception, or with your own features."""
    from .extractors import load_extractor
    from .fid import measure_images

    scores = measure_images(samples, reference, load_extractor(extractor, weights, device), batch_size=batch_size)
    _report({"extractor": extractor, **scores}, output)


def _report(result: dict[str, Any], output: Path | None) -> None:
    for name, value in result.items():
        typer.echo(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
    if output is not None:
        write_json(result, output)


@app.command()
def vbench(
    folder: Annotated[Path | None, typer.Argument(help="Folder written by mhla eval samples vbench.")] = None,
    source: Annotated[list[Path] | None, typer.Option("--from", help="Results of VBench: files or folders.")] = None,
    suite: Annotated[Path | None, typer.Option(help="VBench_full_info.json, which comes with VBench.")] = None,
    flickering: Annotated[
        Path | None, typer.Option(help="The folder filtered_videos of VBench's static_filter.py.")
    ] = None,
    output: _OUTPUT = None,
) -> None:
    """Print VBench's command for each dimension, or read its results: Quality, Semantic, Total."""
    if source:
        scores = read_results(source)
        totals = total_scores(scores)  # raises if dimensions are missing
        _report({name: scores[name] for name in DIMENSIONS} | totals, output)
    elif folder is not None and suite is not None:
        typer.echo("\n".join(map(shlex.join, vbench_commands(suite, folder, flickering))))
    else:
        raise ValueError("Give --from with results, or the folder of a set with --suite.")


@app.command("geneval")
def geneval_results(
    results: Annotated[Path, typer.Argument(exists=True, help="results.jsonl of GenEval's evaluate_images.py.")],
    output: _OUTPUT = None,
) -> None:
    """Compute GenEval's score from its evaluator's results; eval samples geneval generates the images."""
    _report(geneval_score(results), output)


@app.command("compare")
def compare_variants(
    sets: Annotated[
        list[Path], typer.Argument(exists=True, help="One or more folders of sample sets, the baseline first.")
    ],
    clip_model: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of a CLIP model, for 100 x the cosine of image and prompt."),
    ] = None,
    score: Annotated[
        list[str] | None, typer.Option(help="NAME=package.module:callable of images and texts; repeatable.")
    ] = None,
    similarity: Annotated[bool, typer.Option(help="PSNR, SSIM and LPIPS to the first set's samples.")] = True,
    device: _DEVICE = "auto",
    output: _OUTPUT = None,
) -> None:
    """Score sample sets, and compare those from the same noise with the first one, also by similarity."""
    from ..generation.similarity import load_similarities
    from .clip import ClipScorer
    from .compare import SampleScore, compare_sets, read_variants, score_table
    from .extractors import load_callable

    read_variants(sets)  # before a model is asked of the Hub
    scores: dict[str, SampleScore] = {x: load_callable(str(y)) for x, y in map(parse_assignment, score or ())}
    if clip_model is not None:
        scores["clip_score"] = ClipScorer(clip_model, device)
    similarities, missing = load_similarities(device) if similarity and sets[1:] else ({}, [])
    variants, remarks = compare_sets(sets, sample_scores=scores, similarities=similarities)
    typer.echo(text_table(*score_table(variants), right=True))
    for remark in (*missing, *remarks):
        typer.echo(remark)
    if output is not None:
        found = {
            one.name: {
                "choices": one.record.choices,
                "scores": {name: mean._asdict() for name, mean in one.scores.items()},
                "differences": {name: mean._asdict() for name, mean in one.differences.items()},
            }
            for one in variants
        }
        write_json({"variants": found, "remarks": remarks}, output)


def set_options(
    family: Annotated[str, typer.Option(help="wan, flux, mochi, …; mhla info lists all.")],
    seed: Annotated[int, typer.Option(help="Seed of the set.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per call of the pipeline.")] = 1,
) -> dict[str, Any]:
    """Return the options of every set as arguments of :class:`SampleSet`."""
    return {"family": family, "set_seed": seed, "batch_size": batch_size}


_SAMPLES = expand_options(*CHOICE, set_options)


@samples.command()
@_SAMPLES
def classes(
    output: _SET,
    count: Annotated[int, typer.Option(min=1, help="Number of images; 50000 for ImageNet.")],
    options: dict[str, Any],
) -> None:
    """Generate equally many images of every class, as FID on ImageNet needs."""
    from ..generation.pipelines import classes_of, family_named

    family = options["family"]
    if not family_named(family).calling.prompts_are_classes:
        raise ValueError(f"{family} takes text, not classes; use mhla generate {family} --prompts FILE.")
    _, labels = classes_of(options["model"] or f"tiny-{family}", family_named(family))
    _generate(options, output, [Sample(f"{number:06d}.png", str(number % labels)) for number in range(count)])


@samples.command("geneval")
@_SAMPLES
def geneval_set(
    output: _SET,
    metadata: Annotated[Path, typer.Argument(exists=True, help="GenEval's evaluation_metadata.jsonl.")],
    options: dict[str, Any],
) -> None:
    """Generate images of GenEval's prompts, laid out for its evaluator."""
    entries = read_json_lines(metadata)
    _generate(options, output, geneval_samples(entries))
    write_geneval_metadata(entries, output)


@samples.command("vbench")
@_SAMPLES
def vbench_set(
    output: _SET,
    suite: Annotated[Path, typer.Argument(help="VBench_full_info.json, which comes with VBench.")],
    options: dict[str, Any],
    all_flickering: Annotated[bool, typer.Option(help="Generate 25 videos per temporal flickering prompt.")] = False,
) -> None:
    """Generate videos of VBench's prompts, named as VBench expects."""
    _generate(options, output, suite_videos(read_json(suite), all_flickering=all_flickering))


def _generate(options: dict[str, Any], output: Path, chosen: list[Sample]) -> None:
    from ..generation.generate import SampleSet, generate_share
    from ..generation.noise import generator_for

    seed = options.pop("set_seed")
    seeds = [generator_for(seed, "sample", one.file).initial_seed() for one in chosen]
    samples = [replace(one, seed=own) for one, own in zip(chosen, seeds, strict=True)]
    config = SampleSet(**options, samples=samples, output=output)
    with progress(desc="samples", leave=False) as bar:
        generate_share(config, lambda *_: bar.update())
    if bar.n:  # in the main process alone
        typer.echo(f"{output} holds {len(chosen)} samples.")
