"""Commands and Python snippets of the README and the pages, as a reader sees them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"(^|\s+)# .*$")
_INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A block of Python, or one command of a shell."""

    page: str
    line: int
    """Where it begins, counted from 1."""
    language: str
    """"python", "bash", or "" for a block that is not code."""
    text: str

    @property
    def where(self) -> str:
        """Page, line and the first line of the text."""
        return f"{self.page}:{self.line}: {self.text.strip().splitlines()[0]}"

    @property
    def arguments(self) -> list[str]:
        """Of a command: its words."""
        return shlex.split(self.text)


def snippets(page: Path) -> Iterator[Snippet]:
    """All of a page, in its order; a shell's block gives one for each of its commands."""
    lines, name = page.read_text(encoding="utf-8").splitlines(), page.relative_to(ROOT).as_posix()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        first = number
        while lines[number] != "```":
            number += 1
        block, number = lines[first:number], number + 1
        if fence[1] == "bash":
            yield from _commands(name, first + 1, block)
        else:
            text = _INCLUDED.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), "\n".join(block))
            yield Snippet(name, first + 1, fence[1], text)


def _commands(page: str, first: int, block: list[str]) -> Iterator[Snippet]:
    """Lines that end with a backslash go on with the next one."""
    begun: list[str] = []
    for number, line in enumerate(block, start=first):
        begun.append(_COMMENT.sub("", line).removesuffix("\\").strip())
        if not line.endswith("\\"):
            text = " ".join(begun)
            if text:
                yield Snippet(page, number - len(begun) + 1, "bash", text)
            begun = []
