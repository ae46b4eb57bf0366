"""VBench: the videos of its suite, its sixteen dimensions with totals, and running it.

VBench needs old versions of its libraries, so it runs in a separate environment.
"""

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import content_of, read_json, read_lines, write_json
from ..generation.record import Sample
from ..settings import check_names

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
"""Dimensions of the semantic score."""
DIMENSIONS = (*QUALITY, *SEMANTIC)
"""Names of all dimensions, as VBench's code has them, in the order of its tables."""
_VIDEOS, _FLICKERING_VIDEOS = 5, 25
"""Videos per prompt, and per prompt of the flickering dimension, from which the static filter chooses."""
LOG_NAME = "vbench.log"
_RECORD_NAME = "vbench_run.json"
_PROGRAM = """
import sys
import torch
from vbench import VBench
device, suite, output, videos, dimension = sys.argv[1:]
VBench(torch.device(device), suite, output).evaluate(videos_path=videos, name=dimension, dimension_list=[dimension])
"""
_LAST_LINES = 5


def read_suite(file: str | Path) -> list[dict[str, Any]]:
    """Read the entries of ``VBench_full_info.json``, which comes with VBench."""
    entries = read_json(Path(file))
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and {"prompt_en", "dimension"} <= entry.keys() for entry in entries
    ):
        raise ValueError(f"{file} is not a prompt suite of VBench: a list of entries with prompt_en and dimension.")
    return entries


def read_augmented(file: str | Path, entries: list[dict[str, Any]]) -> dict[str, str]:
    """Read augmented prompts: one line per entry, or per distinct prompt, of the suite, in its order.

    VBench's repository has such a file for Wan. For a prompt that occurs twice the first line counts.
    """
    lines = read_lines(Path(file))
    prompts = [entry["prompt_en"] for entry in entries]
    distinct = list(dict.fromkeys(prompts))
    if len(lines) not in (len(prompts), len(distinct)):
        raise ValueError(
            f"{file} holds {len(lines)} lines, but the suite has {len(prompts)} entries with {len(distinct)} distinct "
            "prompts; there must be one line for each, in the suite's order."
        )
    matching = prompts if len(lines) == len(prompts) else distinct
    return dict(reversed(list(zip(matching, lines, strict=True))))


def suite_videos(
    entries: list[dict[str, Any]], augmented: Mapping[str, str] | None = None, *, all_flickering: bool = False
) -> list[Sample]:
    """List every video of the suite, ``{prompt}-{number}.mp4``: 4 720, or 6 220 with all of the flickering dimension.

    Files are named after VBench's own prompts, even if the model gets augmented ones, because VBench finds them by name
    in one flat folder; two prompts occur twice and share their videos. ``all_flickering`` asks for 25 instead of 5
    videos of the flickering prompts, for VBench's static filter.
    """
    counts: dict[str, int] = {}
    for entry in entries:
        flickering = all_flickering and FLICKERING in entry["dimension"]
        prompt = entry["prompt_en"]
        counts[prompt] = max(counts.get(prompt, 0), _FLICKERING_VIDEOS if flickering else _VIDEOS)
    texts = augmented or {}
    return [
        Sample(f"{prompt}-{number}.mp4", texts.get(prompt, prompt))
        for prompt, count in counts.items()
        for number in range(count)
    ]


def total_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """Compute VBench's totals in percent, quality, semantic and total, from the scores of all dimensions, 0 to 1.

    Raises:
        ValueError: a dimension is missing or unknown, or a score lies outside 0 to 1.
    """
    missing = [name for name in DIMENSIONS if name not in scores]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(DIMENSIONS)} dimensions are missing: {', '.join(missing)}. VBench's totals "
            "exist only over all of them; evaluate these as well."
        )
    _check_scores(scores)
    means = []
    for dimensions in (QUALITY, SEMANTIC):
        values = [w * (scores[name] - low) / (high - low) for name, (low, high, w) in dimensions.items()]
        means.append(100 * sum(values) / sum(weight for _, _, weight in dimensions.values()))
    quality, semantic = means
    return {"quality": quality, "semantic": semantic, "total": (4 * quality + semantic) / 5}


def _check_scores(scores: Mapping[str, float]) -> None:
    """Raise ValueError for an unknown dimension, or a score outside 0 to 1."""
    for name, score in scores.items():
        check_names([name], list(DIMENSIONS), "dimension of VBench")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ValueError(
                f"{name}={score!r} must lie between 0 and 1; VBench's tables show percent, its files not. A dimension "
                "whose file is removed is evaluated again."
            )


def read_results(files: Iterable[Path]) -> dict[str, float]:
    """Read scores from VBench's ``*_eval_results.json``: {dimension: [score, details of every video]}.

    Args:
        files: such files, or folders of them.

    Raises:
        FileNotFoundError: a folder without results.
        ValueError: damaged files, unknown dimensions, or a dimension that two files score differently.
    """
    scores: dict[str, float] = {}
    for file in files:
        parts = sorted(file.glob("*_eval_results.json")) if file.is_dir() else [file]
        if not parts:
            raise FileNotFoundError(f"{file} holds no *_eval_results.json of VBench.")
        for part in parts:
            content = read_json(part)
            if not isinstance(content, dict):
                raise ValueError(f"{part} holds no results of VBench: it must map dimensions to scores.")
            for key, value in content.items():
                name, score = key.replace(" ", "_"), value[0] if isinstance(value, list) and value else value
                try:
                    _check_scores({name: score})
                except ValueError as error:
                    raise ValueError(f"{part}: {error}") from error
                if scores.setdefault(name, score) != score:
                    raise ValueError(
                        f"{part} scores {name} {score}, another file {scores[name]}; give the files of one run."
                    )
    return scores


class VBenchError(OSError):
    """VBench could not run or failed; the message names its log."""


def run_vbench(
    python: Path,
    suite: Path,
    videos: Path,
    output: Path,
    *,
    dimensions: Sequence[str] = DIMENSIONS,
    device: str = "cuda",
    flickering: Path | None = None,
) -> Iterator[tuple[str, float, bool]]:
    """Evaluate one dimension after the other, each in its own process; finished ones are read.

    VBench's output goes to ``vbench.log`` in the output folder.

    Args:
        python: of the environment that VBench is installed in.
        suite: ``VBench_full_info.json``.
        videos: folder of ``{prompt}-{0..4}.mp4``.
        output: folder for results and the log.
        dimensions: which to evaluate.
        device: of that environment.
        flickering: folder ``filtered_videos`` of VBench's ``static_filter.py``, which selects from 25 videos per
            flickering prompt; None for the unfiltered ones in ``videos``.

    Yields:
        Dimension, its score from 0 to 1, and whether it was evaluated now (True) or before.

    Raises:
        FileNotFoundError, ValueError: a path, dimension or video that is not there, before any work; or an output
            folder with results of other videos, or of others at the same path.
        VBenchError: VBench is not installed there, or failed in a dimension; run again to resume with that dimension.
    """
    check_names(dimensions, list(DIMENSIONS), "dimension of VBench")
    if not python.is_file():
        raise FileNotFoundError(
            f"There is no Python at {python}. VBench 0.1.5 needs its own environment (transformers 4.33, numpy below "
            "2): create one, pip install vbench there, and give the path of its python."
        )
    folders = {"videos": videos} | ({} if flickering is None else {"flickering_videos": flickering})
    entries = read_suite(suite)

    def files_of(dimension: str) -> list[str]:
        return [video.file for video in suite_videos([entry for entry in entries if dimension in entry["dimension"]])]

    def content_seen(dimension: str) -> list[str | None]:
        place = flickering if dimension == FLICKERING and flickering is not None else videos
        return [content_of(place / file) for file in files_of(dimension)]

    # the filter may leave fewer than five videos of a prompt, which VBench accepts, but not none at all
    if flickering is not None and not any((flickering / file).is_file() for file in files_of(FLICKERING)):
        raise ValueError(
            f"{flickering} holds no videos of {FLICKERING}; give the folder filtered_videos that VBench's "
            "static_filter.py has written."
        )
    present = {file.name for file in videos.iterdir()}
    unfiltered = [name for name in dimensions if name != FLICKERING or flickering is None]
    missing = {name: [file for file in files_of(name) if file not in present] for name in unfiltered}
    if any(missing.values()):  # VBench itself only warns
        absent = list(dict.fromkeys(file for files in missing.values() for file in files))
        names = ", ".join(name for name, files in missing.items() if files)
        raise ValueError(
            f"{videos} lacks {len(absent)} videos of {names}, for example {absent[0]!r}. Generate them with mhla eval "
            "samples, or choose other dimensions."
        )
    output.mkdir(parents=True, exist_ok=True)
    record, now = output / _RECORD_NAME, {name: str(folder.resolve()) for name, folder in folders.items()}
    before: dict[str, Any] = read_json(record) if record.is_file() else {**now}
    contents, seen = before.pop("contents", {}), {name: content_seen(name) for name in dimensions}
    if before != now:
        was, wanted = (", ".join(places.values()) for places in (before, now))
        raise ValueError(f"{output} holds results of {was}, not of {wanted}. Choose another output folder.")
    for name in dimensions:
        if contents.get(name, seen[name]) != seen[name] and (output / f"{name}_eval_results.json").is_file():
            raise ValueError(
                f"{output} holds results of {name} for other videos than {videos} holds now. Choose another output "
                f"folder, or remove {name}_eval_results.json to evaluate it again."
            )
    write_json({**now, "contents": {**contents, **seen}}, record)
    tried = subprocess.run([python, "-c", "import vbench"], capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise VBenchError(f"VBench cannot be imported by {python}: {reason}")
    for name, folder in folders.items():
        # only links to the videos, because VBench takes the suffix of any first file for that of the videos
        (output / name).mkdir(exist_ok=True)
        for video in folder.glob("*.mp4"):
            link = output / name / video.name
            if not link.is_symlink():
                link.symlink_to(video.resolve())
    for dimension in dimensions:
        result, log = output / f"{dimension}_eval_results.json", output / LOG_NAME
        done = result.is_file()
        if not done:
            links = "flickering_videos" if dimension == FLICKERING and flickering is not None else "videos"
            paths = [str(path.resolve()) for path in (suite, output, output / links)]
            with log.open("a", encoding="utf-8") as stream:
                stream.write(f"=== {dimension}\n")
                stream.flush()
                command = [str(python), "-c", _PROGRAM, device, *paths, dimension]
                ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
            if ended.returncode or not result.is_file():
                last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
                raise VBenchError(
                    f"VBench failed in {dimension} (exit code {ended.returncode}). The end of {log}:\n{last}"
                )
        yield dimension, read_results([result])[dimension], not done
