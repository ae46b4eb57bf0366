"""VBench: the videos of its suite, and its sixteen dimensions with their totals."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_json, read_text
from ..generation.record import Sample

VIDEOS_PER_PROMPT = 5
FLICKERING = "temporal_flickering"
"""The dimension whose videos VBench's static filter chooses."""
FLICKERING_VIDEOS = 25
"""Videos per prompt of the temporal flickering dimension, from which VBench's static filter chooses."""


def read_suite(file: str | Path) -> list[dict[str, Any]]:
    """The entries of ``VBench_full_info.json``, which comes with VBench.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no suite.
    """
    entries = read_json(Path(file))
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and {"prompt_en", "dimension"} <= entry.keys() for entry in entries
    ):
        raise ValueError(f"{file} is no prompt suite of VBench: a list of entries with prompt_en and dimension.")
    return entries


def read_augmented(file: str | Path, entries: list[dict[str, Any]]) -> dict[str, str]:
    """Prompts and what is generated instead, from a text file with one line per entry of the suite, in its order.

    Wan's are such a file in VBench's repository. Of a prompt that occurs twice the first line counts.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another number of lines than of entries or of distinct prompts.
    """
    lines = [line.strip() for line in read_text(Path(file)).splitlines() if line.strip()]
    prompts = [entry["prompt_en"] for entry in entries]
    distinct = list(dict.fromkeys(prompts))
    matching = next((some for some in (prompts, distinct) if len(some) == len(lines)), None)
    if matching is None:
        raise ValueError(
            f"{file} holds {len(lines)} lines, but the suite has {len(prompts)} entries with {len(distinct)} distinct "
            "prompts; there must be one line for each, in the suite's order."
        )
    return dict(reversed(list(zip(matching, lines, strict=True))))


def suite_videos(
    entries: list[dict[str, Any]], augmented: Mapping[str, str] | None = None, *, all_flickering: bool = False
) -> list[Sample]:
    """Every video of the suite, ``{prompt}-{number}.mp4``: 4 720, or 6 220 with all of the flickering dimension.

    Two prompts of VBench occur twice and share their videos. Files are named after VBench's own prompts, by which it
    finds them in one flat folder, also where the model is given their augmented form.

    Args:
        entries: see :func:`read_suite`.
        augmented: prompt → what the model is given instead.
        all_flickering: 25 instead of 5 videos of the flickering prompts, for VBench's static filter.
    """
    counts: dict[str, int] = {}
    for entry in entries:
        flickering = all_flickering and FLICKERING in entry["dimension"]
        prompt = entry["prompt_en"]
        counts[prompt] = max(counts.get(prompt, 0), FLICKERING_VIDEOS if flickering else VIDEOS_PER_PROMPT)
    texts = augmented or {}
    return [
        Sample(f"{prompt}-{number}.mp4", texts.get(prompt, prompt))
        for prompt, count in counts.items()
        for number in range(count)
    ]


def missing_videos(entries: list[dict[str, Any]], dimension: str, folder: Path) -> list[str]:
    """Names of the videos that a dimension needs and that are not there; VBench itself only warns of them."""
    wanted = [entry for entry in entries if dimension in entry["dimension"]]
    present = {file.name for file in folder.iterdir()}
    return [video.file for video in suite_videos(wanted) if video.file not in present]


@dataclass(frozen=True)
class Dimension:
    """One dimension: a score is brought to (score − lowest) / (highest − lowest) and weighted."""

    lowest: float = 0.0
    highest: float = 1.0
    weight: float = 1.0


QUALITY = {
    "subject_consistency": Dimension(lowest=0.1462),
    "background_consistency": Dimension(lowest=0.2615),
    "temporal_flickering": Dimension(lowest=0.6293),
    "motion_smoothness": Dimension(lowest=0.706, highest=0.9975),
    "dynamic_degree": Dimension(weight=0.5),
    "aesthetic_quality": Dimension(),
    "imaging_quality": Dimension(),
}
"""Dimensions of the quality score."""
SEMANTIC = {
    "object_class": Dimension(),
    "multiple_objects": Dimension(),
    "human_action": Dimension(),
    "color": Dimension(),
    "spatial_relationship": Dimension(),
    "scene": Dimension(highest=0.8222),
    "appearance_style": Dimension(lowest=0.0009, highest=0.2855),
    "temporal_style": Dimension(highest=0.364),
    "overall_consistency": Dimension(highest=0.364),
}
"""Dimensions of the semantic score."""
DIMENSIONS = (*QUALITY, *SEMANTIC)
"""Names of all dimensions, as VBench's code has them, in the order of its tables."""
_QUALITY_SHARE = 4 / 5


@dataclass(frozen=True)
class Totals:
    """VBench's totals in percent."""

    quality: float
    semantic: float
    total: float


def total_scores(scores: Mapping[str, float]) -> Totals:
    """Quality, Semantic and Total.

    Args:
        scores: of every dimension, from 0 to 1.

    Raises:
        ValueError: a dimension is missing or unknown, or a score lies outside 0 to 1.
    """
    missing = [name for name in DIMENSIONS if name not in scores]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(DIMENSIONS)} dimensions are missing: {', '.join(missing)}. VBench's totals "
            "exist only over all of them; evaluate these as well."
        )
    check_scores(scores)
    quality, semantic = _weighted_mean(scores, QUALITY), _weighted_mean(scores, SEMANTIC)
    total = _QUALITY_SHARE * quality + (1 - _QUALITY_SHARE) * semantic
    return Totals(100 * quality, 100 * semantic, 100 * total)


def check_scores(scores: Mapping[str, float]) -> None:
    """Raise unless names and values can be VBench's.

    Raises:
        ValueError: an unknown dimension, or a score outside 0 to 1.
    """
    for name, score in scores.items():
        if name not in DIMENSIONS:
            raise ValueError(f"{name!r} is no dimension of VBench; allowed: {', '.join(DIMENSIONS)}.")
        if not 0 <= score <= 1:
            raise ValueError(
                f"{name}={score} must lie between 0 and 1; VBench's tables show percent, its files do not."
            )


def _weighted_mean(scores: Mapping[str, float], dimensions: Mapping[str, Dimension]) -> float:
    weighted = sum(
        dimension.weight * (scores[name] - dimension.lowest) / (dimension.highest - dimension.lowest)
        for name, dimension in dimensions.items()
    )
    return weighted / sum(dimension.weight for dimension in dimensions.values())


def read_results(files: Iterable[Path]) -> dict[str, float]:
    """Scores from VBench's ``*_eval_results.json`` files: {dimension: [score, details of every video]}.

    Args:
        files: such files, or folders of them.

    Raises:
        FileNotFoundError: no such file, or a folder without results.
        ValueError: damaged files, unknown dimensions, or a dimension that two files score differently.
    """
    scores: dict[str, float] = {}
    for file in files:
        for part in _result_files(file):
            content = read_json(part)
            if not isinstance(content, dict):
                raise ValueError(f"{part} holds no results of VBench: it must map dimensions to scores.")
            for key, value in content.items():
                name, score = key.replace(" ", "_"), value[0] if isinstance(value, list) and value else value
                if isinstance(score, bool) or not isinstance(score, int | float):
                    raise ValueError(f"{part} holds no score of {key!r}, but {score!r}.")
                if scores.setdefault(name, float(score)) != score:
                    raise ValueError(
                        f"{part} scores {name} {score}, another file {scores[name]}; give one run's files."
                    )
    check_scores(scores)
    return scores


def _result_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*_eval_results.json"))
    if not found:
        raise FileNotFoundError(f"{path} holds no *_eval_results.json of VBench.")
    return found
