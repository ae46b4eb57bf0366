"""VBench's prompts and the files that it reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import read_json

SAMPLES = 5
"""Videos per prompt."""
FLICKERING = "temporal_flickering"
"""The dimension whose videos VBench's static filter chooses."""
FLICKERING_SAMPLES = 25
"""Videos per prompt of the temporal flickering dimension, from which VBench's static filter chooses."""


@dataclass(frozen=True)
class SuiteVideo:
    """One video of the suite."""

    prompt: str
    """VBench's own, which the file is named after."""
    text: str
    """What the model is given: the prompt, or its augmented form."""
    number: int

    @property
    def file_name(self) -> str:
        """As VBench looks for it, in one flat folder."""
        return f"{self.prompt}-{self.number}.mp4"


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
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"There are no augmented prompts at {path}.")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [entry["prompt_en"] for entry in entries]
    distinct = list(dict.fromkeys(prompts))
    matching = next((some for some in (prompts, distinct) if len(some) == len(lines)), None)
    if matching is None:
        raise ValueError(
            f"{path} holds {len(lines)} lines, but the suite has {len(prompts)} entries with {len(distinct)} distinct "
            "prompts; there must be one line for each, in the suite's order."
        )
    return dict(reversed(list(zip(matching, lines, strict=True))))


def suite_videos(
    entries: list[dict[str, Any]], augmented: dict[str, str] | None = None, *, all_flickering: bool = False
) -> list[SuiteVideo]:
    """Every video of the suite: 4 720, or 6 220 with all of the flickering dimension.

    Two prompts of VBench occur twice and share their videos.

    Args:
        entries: see :func:`read_suite`.
        augmented: prompt → what the model is given instead.
        all_flickering: 25 instead of 5 videos of the flickering prompts, for VBench's static filter.
    """
    counts: dict[str, int] = {}
    for entry in entries:
        flickering = all_flickering and FLICKERING in entry["dimension"]
        prompt = entry["prompt_en"]
        counts[prompt] = max(counts.get(prompt, 0), FLICKERING_SAMPLES if flickering else SAMPLES)
    texts = augmented or {}
    return [
        SuiteVideo(prompt, texts.get(prompt, prompt), number)
        for prompt, count in counts.items()
        for number in range(count)
    ]


def missing_videos(entries: list[dict[str, Any]], dimension: str, folder: Path) -> list[str]:
    """Names of the videos that a dimension needs and that are not there; VBench itself only warns of them."""
    wanted = [entry for entry in entries if dimension in entry["dimension"]]
    present = {file.name for file in folder.iterdir()}
    return [video.file_name for video in suite_videos(wanted) if video.file_name not in present]
