"""Files of prompts."""

from pathlib import Path

from .evaluation.results import read_text


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt per line; empty lines are left out.

    Raises:
        OSError: no such file, or a folder.
        ValueError: a file without prompts, or not of text.
    """
    prompts = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not prompts:
        raise ValueError(f"Prompt file {path} holds no prompts; write one per line.")
    return prompts
