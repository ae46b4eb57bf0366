"""Where data comes from: one folder of media, or several with a share and a prefix."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...errors import check
from ...files import read_text
from ...settings import Positive, Settings, read_yaml, settings
from .clips import Clips
from .media import NO_CAPTION, Media, find_media


@settings()
class Source(Settings):
    """A folder of videos and pictures with captions."""

    path: Annotated[str, Field(min_length=1)]
    """See :func:`~.media.find_media`."""
    share: Positive | None = None
    """Part of an epoch's samples that is drawn from here, beside the other sources' shares, of any sum."""
    prefix: str = ""
    """Text before every caption."""
    missing_captions: Literal["skip", "empty"] = "skip"
    """Whether files without a caption are left out, or encoded with the prefix alone."""


@settings()
class Sources(Settings):
    """The folders that data is from, and what is cut out of their files."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    clip: Clips | None = None
    """None for what the command says, or the model's own clip."""

    def __post_init__(self) -> None:
        paths = [source.path for source in self.sources]
        for index, path in enumerate(paths):
            check(path not in paths[:index], f"sources.{index}.path: {path!r} is listed twice; remove one.")
        shares = [source.share for source in self.sources]
        check(
            None not in shares or not any(shares),
            f"Either all sources have a share or none; got {', '.join(map(str, shares))}.",
        )

    @property
    def shares(self) -> dict[str, float]:
        """Path → share; empty where sources have none."""
        return {source.path: source.share for source in self.sources if source.share is not None}

    def media(self) -> list[Media]:
        """Return the videos and images of all sources; of several, each name begins with the path of its source."""
        found = []
        for source in self.sources:
            for item in find_media(Path(source.path)):
                is_empty = item.problem == NO_CAPTION and source.missing_captions == "empty"
                name = f"{source.path}/{item.name}" if self.sources[1:] else item.name
                problem = None if is_empty else item.problem
                prefixed = "\n".join(f"{source.prefix}{caption}".strip() for caption in item.captions)
                caption = prefixed if problem is None else item.caption
                found.append(replace(item, name=name, caption=caption, problem=problem, origin=source.path))
        return found


def read_sources(path: str | Path) -> Sources:
    """Read a YAML file of sources; any other path is one source."""
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return read_yaml(Sources, read_text(Path(path)), path)
    return Sources((Source(str(path)),))
