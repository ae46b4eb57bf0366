"""Commands and Python snippets of the README and the pages, as a reader sees them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*) *\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:.*\\\n)*.+")
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


def snippets(page: Path) -> Iterator[Snippet]:
    """All of a page, in its order; a shell's block gives one for each of its commands."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2)) + 1
        if block[1] != "bash":
            content = _INCLUDED.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), block[2])
            yield Snippet(name, line, block[1], content)
            continue
        for command in _COMMAND.finditer(block[2]):
            parts = [_COMMENT.sub("", part).removesuffix("\\").strip() for part in command[0].splitlines()]
            if any(parts):
                yield Snippet(name, line + block[2].count("\n", 0, command.start()), "bash", " ".join(parts))
