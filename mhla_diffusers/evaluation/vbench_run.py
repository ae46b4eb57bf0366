"""Run VBench, which needs old versions of its libraries, in an environment of its own."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_json, write_json
from .vbench import DIMENSIONS, FLICKERING, missing_videos, read_results, read_suite, suite_videos

LOG_NAME = "vbench.log"
_RECORD_NAME = "vbench_run.json"
_LINKS_NAME = "videos"
_FLICKERING_LINKS_NAME = "flickering_videos"
_PROGRAM = """
import sys
import torch
from vbench import VBench
device, suite, output, videos, dimension = sys.argv[1:]
VBench(torch.device(device), suite, output).evaluate(videos_path=videos, name=dimension, dimension_list=[dimension])
"""
_LAST_LINES = 5


class VBenchError(OSError):
    """VBench could not be run or failed; the message says where its log lies."""


@dataclass(frozen=True)
class VBenchConfig:
    """What to evaluate, with what.

    Raises:
        ValueError: unknown dimensions.
    """

    python: Path
    """Python of the environment that VBench is installed in."""
    suite: Path
    """``VBench_full_info.json``."""
    videos: Path
    """Folder of ``{prompt}-{0..4}.mp4``."""
    output: Path
    """Folder for results and the log."""
    dimensions: tuple[str, ...] = DIMENSIONS
    device: str = "cuda"
    flickering_videos: Path | None = None
    """Videos of the temporal flickering dimension that VBench's ``static_filter.py`` has chosen from 25 of each prompt,
    its ``filtered_videos``; None for the unfiltered ones among ``videos``."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.dimensions if name not in DIMENSIONS]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no dimension of VBench; allowed: {', '.join(DIMENSIONS)}.")

    def is_filtered(self, dimension: str) -> bool:
        """Whether a dimension is evaluated on the filtered videos."""
        return dimension == FLICKERING and self.flickering_videos is not None


def run_vbench(config: VBenchConfig) -> Iterator[tuple[str, float, bool]]:
    """Evaluate one dimension after the other, each in a process of its own; those that are done are read.

    Everything that VBench prints goes to ``vbench.log`` in the output folder.

    Yields:
        Dimension, its score from 0 to 1, and whether it was evaluated now (True) or before.

    Raises:
        FileNotFoundError: no such interpreter, suite or folder; said before any work.
        ValueError: missing videos (named), or an output folder with results of other videos.
        VBenchError: VBench is not installed there, or failed in a dimension; run again to go on with that dimension.
    """
    _check(config)
    _link_videos(config)
    for dimension in config.dimensions:
        result = config.output / f"{dimension}_eval_results.json"
        done = result.is_file()
        if not done:
            _evaluate(config, dimension, result)
        yield dimension, read_results([result])[dimension], not done


def _check(config: VBenchConfig) -> None:
    if not config.python.is_file():
        raise FileNotFoundError(
            f"There is no Python at {config.python}. VBench 0.1.5 needs an environment of its own (transformers 4.33, "
            "numpy below 2): make one, pip install vbench there, and give the path of its python."
        )
    for folder in _video_folders(config).values():
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder of videos at {folder}.")
    entries = read_suite(config.suite)
    _check_filtered(config, entries)
    unfiltered = [name for name in config.dimensions if not config.is_filtered(name)]
    missing = {name: missing_videos(entries, name, config.videos) for name in unfiltered}
    absent = list(dict.fromkeys(file for files in missing.values() for file in files))
    if absent:
        dimensions = ", ".join(name for name, files in missing.items() if files)
        raise ValueError(
            f"{config.videos} lacks {len(absent)} videos of {dimensions}, for example {absent[0]!r}. Generate them "
            "with mhla eval samples, or choose other dimensions."
        )
    config.output.mkdir(parents=True, exist_ok=True)
    _check_record(config)
    tried = subprocess.run([config.python, "-c", "import vbench"], capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise VBenchError(f"VBench cannot be imported by {config.python}: {reason}")


def _video_folders(config: VBenchConfig) -> dict[str, Path]:
    """Name of the folder of links in the output → the folder of videos."""
    if config.flickering_videos is None:
        return {_LINKS_NAME: config.videos}
    return {_LINKS_NAME: config.videos, _FLICKERING_LINKS_NAME: config.flickering_videos}


def _check_filtered(config: VBenchConfig, entries: list[dict[str, Any]]) -> None:
    """The filter may leave fewer than five videos of a prompt, which VBench then takes, but not none of all."""
    folder = config.flickering_videos
    if folder is None:
        return
    wanted = suite_videos([entry for entry in entries if FLICKERING in entry["dimension"]])
    if len(missing_videos(entries, FLICKERING, folder)) == len(wanted):
        raise ValueError(
            f"{folder} holds no videos of {FLICKERING}; give the folder filtered_videos that VBench's static_filter.py "
            "has written."
        )


def _check_record(config: VBenchConfig) -> None:
    """Keep beside the results which videos they are of, so that no other ones' are mixed with them."""
    file = config.output / _RECORD_NAME
    now = {name: str(folder.resolve()) for name, folder in _video_folders(config).items()}
    if not file.is_file():
        write_json(now, file)
        return
    before = read_json(file)
    if before != now:
        was, wanted = (", ".join(folders.values()) for folders in (before, now))
        raise ValueError(f"{config.output} holds results of {was}, not of {wanted}. Choose another output folder.")


def _link_videos(config: VBenchConfig) -> None:
    """Folders with nothing but links to the videos: VBench takes any first file's suffix for that of the videos."""
    for name, videos in _video_folders(config).items():
        folder = config.output / name
        folder.mkdir(exist_ok=True)
        for video in videos.glob("*.mp4"):
            link = folder / video.name
            if not link.is_symlink():
                link.symlink_to(video.resolve())


def _evaluate(config: VBenchConfig, dimension: str, result: Path) -> None:
    log = config.output / LOG_NAME
    links = config.output / (_FLICKERING_LINKS_NAME if config.is_filtered(dimension) else _LINKS_NAME)
    paths = [str(path.resolve()) for path in (config.suite, config.output, links)]
    command = [str(config.python), "-c", _PROGRAM, config.device, *paths, dimension]
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"=== {dimension}\n")
        stream.flush()
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if ended.returncode or not result.is_file():
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
        raise VBenchError(f"VBench failed in {dimension} (exit code {ended.returncode}). The end of {log}:\n{last}")
