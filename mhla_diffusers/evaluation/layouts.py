"""Which samples a set consists of, and the files that the official evaluators expect."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..generation.prompts import read_prompts
from .geneval import GENEVAL_SAMPLES
from ..files import read_json_lines
from .sample_list import Sample
from .vbench.suite import SuiteVideo, read_augmented, read_suite, suite_videos


def class_samples(count: int, labels: int, order: str = "balanced", seed: int = 0) -> list[Sample]:
    """Class-conditional images ``000000.png`` …: 50 000 of 1000 classes for ImageNet.

    Args:
        count: how many.
        labels: number of classes.
        order: "balanced" goes through the classes again and again, "random" draws them.
        seed: of the drawing.

    Raises:
        ValueError: a value that is not allowed.
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


def read_geneval_metadata(file: str | Path) -> list[dict[str, Any]]:
    """GenEval's ``evaluation_metadata.jsonl``: 553 prompts with what must be in the picture.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line without a prompt and a tag.
    """
    entries = read_json_lines(Path(file))
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"prompt", "tag"} <= entry.keys():
            raise ValueError(f"Line {number + 1} of {file} is no metadata of GenEval: it needs prompt and tag.")
    return entries


def geneval_samples(entries: Sequence[Mapping[str, Any]], per_prompt: int = GENEVAL_SAMPLES) -> list[Sample]:
    """``{prompt number}/samples/{sample number}.png``, as GenEval reads them."""
    return [
        Sample(f"{place:05d}/samples/{number:04d}.png", entry["prompt"])
        for place, entry in enumerate(entries)
        for number in range(per_prompt)
    ]


def vbench_samples(videos: Sequence[SuiteVideo]) -> list[Sample]:
    """One flat folder of ``{prompt}-{number}.mp4``."""
    return [Sample(video.file_name, video.text) for video in videos]


def choose_layout(
    family: str,
    *,
    classes: int | None = None,
    labels: int = 1000,
    order: str = "balanced",
    seed: int = 0,
    prompts: Path | None = None,
    per_prompt: int = 1,
    geneval: Path | None = None,
    vbench: Path | None = None,
    augmented: Path | None = None,
    all_flickering: bool = False,
) -> list[Sample]:
    """The samples of the one set that is asked for with ``classes``, ``prompts``, ``geneval`` or ``vbench``.

    Raises:
        FileNotFoundError: a file that is named and is not there.
        ValueError: none or several sets, or values that are not allowed.
    """
    asked = {"classes": classes, "prompts": prompts, "geneval": geneval, "vbench": vbench}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"Ask for one set of {', '.join(asked)}; got {' and '.join(given) or 'none'}.")
    if augmented is not None and vbench is None:
        raise ValueError(f"Augmented prompts ({augmented}) belong to VBench's suite; give it with vbench.")
    if classes is not None:
        return class_samples(classes, labels, order, seed)
    if prompts is not None:
        return prompt_samples(read_prompts(prompts), per_prompt, ".mp4" if family == "wan" else ".png")
    if geneval is not None:
        return geneval_samples(read_geneval_metadata(geneval))
    assert vbench is not None
    entries = read_suite(vbench)
    texts = read_augmented(augmented, entries) if augmented is not None else None
    return vbench_samples(suite_videos(entries, texts, all_flickering=all_flickering))
