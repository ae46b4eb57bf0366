"""VBench: the videos of its suite, its commands, and the totals of its sixteen dimensions.

VBench needs old versions of its libraries, so its commands run in an environment of its own.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..files import read_json
from ..generation.record import Sample

FLICKERING = "temporal_flickering"
"""The dimension whose videos VBench's static filter chooses."""
QUALITY: dict[str, tuple[float, float, float]] = {
    "subject_consistency": (0.1462, 1, 1),
    "background_consistency": (0.2615, 1, 1),
    "temporal_flickering": (0.6293, 1, 1),
    "motion_smoothness": (0.706, 0.9975, 1),
    "dynamic_degree": (0, 1, 0.5),
    "aesthetic_quality": (0, 1, 1),
    "imaging_quality": (0, 1, 1),
}
"""Dimensions of the quality score: lowest and highest value, which are scaled to 0 and 1, and weight."""
SEMANTIC: dict[str, tuple[float, float, float]] = {
    "object_class": (0, 1, 1),
    "multiple_objects": (0, 1, 1),
    "human_action": (0, 1, 1),
    "color": (0, 1, 1),
    "spatial_relationship": (0, 1, 1),
    "scene": (0, 0.8222, 1),
    "appearance_style": (0.0009, 0.2855, 1),
    "temporal_style": (0, 0.364, 1),
    "overall_consistency": (0, 0.364, 1),
}
DIMENSIONS = (*QUALITY, *SEMANTIC)
"""Names of all dimensions, as VBench's code has them, in the order of its tables."""
VIDEO_FOLDER = "videos"
"""Folder inside a set with nothing but the videos, since VBench takes the suffix of any first file for theirs."""
_VIDEOS, _FLICKERING_VIDEOS = 5, 25
"""Videos per prompt, and per prompt of the flickering dimension, from which the static filter chooses."""


def suite_videos(entries: list[dict[str, Any]], *, all_flickering: bool = False) -> list[Sample]:
    """List every video of ``VBench_full_info.json``, ``videos/{prompt}-{number}.mp4``, as VBench finds them: 4 720.

    Two prompts occur twice and share their videos. ``all_flickering`` asks for 25 instead of 5 videos of the flickering
    prompts, for VBench's static filter: 6 220.
    """
    counts: dict[str, int] = {}
    for entry in entries:
        flickering = all_flickering and FLICKERING in entry["dimension"]
        prompt = entry["prompt_en"]
        counts[prompt] = max(counts.get(prompt, 0), _FLICKERING_VIDEOS if flickering else _VIDEOS)
    return [
        Sample(f"{VIDEO_FOLDER}/{prompt}-{number}.mp4", prompt)
        for prompt, count in counts.items()
        for number in range(count)
    ]


def total_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """Compute VBench's quality, semantic and total in percent from scores of 0 to 1; ValueError if one is missing."""
    missing = [name for name in DIMENSIONS if name not in scores]
    if missing:
        raise ValueError(f"Dimensions are missing: {', '.join(missing)}. VBench's totals need all of them.")
    means = []
    for dimensions in (QUALITY, SEMANTIC):
        values = [w * (scores[name] - low) / (high - low) for name, (low, high, w) in dimensions.items()]
        means.append(100 * sum(values) / sum(weight for _, _, weight in dimensions.values()))
    quality, semantic = means
    return {"quality": quality, "semantic": semantic, "total": (4 * quality + semantic) / 5}


def read_results(files: Iterable[Path]) -> dict[str, float]:
    """Read VBench's ``*_eval_results.json``, or folders of them: {dimension: [score, details of every video]}.

    ValueError for unknown dimensions, a score outside 0 to 1, or two scores of a dimension.
    """
    scores: dict[str, float] = {}
    for file in files:
        parts = sorted(file.glob("*_eval_results.json")) if file.is_dir() else [file]
        if not parts:
            raise FileNotFoundError(f"{file} holds no *_eval_results.json of VBench.")
        for part in parts:
            for key, value in read_json(part).items():
                name, score = key.replace(" ", "_"), value[0] if isinstance(value, list) and value else value
                if name not in DIMENSIONS or type(score) not in (int, float) or not 0 <= score <= 1:
                    raise ValueError(
                        f"{part}: {name}={score!r} must be a dimension of VBench and a score between 0 and 1; its "
                        "tables show percent, its files not."
                    )
                if scores.setdefault(name, score) != score:
                    raise ValueError(
                        f"{part} has {name}={score}, another file {scores[name]}; give the files of one run."
                    )
    return scores


def vbench_commands(suite: Path, folder: Path, flickering: Path | None = None) -> list[list[str]]:
    """Return the commands of VBench 0.1.5, one per dimension, which write into ``vbench`` in the set's folder.

    ``flickering`` is the folder ``filtered_videos`` of VBench's ``static_filter.py``; None for the unfiltered videos of
    the set. ValueError for missing videos, for which VBench itself only warns.
    """
    entries, commands = read_json(suite), []
    missing: list[Path] = []
    for dimension in DIMENSIONS:
        filtered = flickering if dimension == FLICKERING else None
        videos = filtered or folder / VIDEO_FOLDER
        names = [Path(x.file).name for x in suite_videos([e for e in entries if dimension in e["dimension"]])]
        absent = [videos / name for name in names if not (videos / name).is_file()]
        # the filter may leave fewer than five videos of a prompt, which VBench accepts, but not none at all
        if filtered is None or len(absent) == len(names):
            missing += absent
        # it puts all but the videos into a line of the shell without quotes
        suite_path, output = (shlex.quote(str(path.resolve())) for path in (suite, folder / "vbench"))
        command = ["vbench", "evaluate", "--dimension", dimension, "--videos_path", str(videos.resolve())]
        commands.append([*command, "--full_json_dir", suite_path, "--output_path", output])
    if missing:
        raise ValueError(
            f"{len(set(missing))} videos are missing, for example {str(missing[0])!r}. Generate them with mhla eval "
            "samples vbench."
        )
    return commands
