"""Where data comes from: one folder of media, or several with a share, a prefix and a rule for missing captions."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...errors import check
from ...files import read_text
from ...settings import Positive, PositiveInteger, Settings, read_yaml, settings
from .clips import Clips
from .media import NO_CAPTION, Media, find_media, list_media


@settings()
class Source(Settings):
    """A folder of videos and pictures with captions, or webdataset's tar shards."""

    path: Annotated[str, Field(min_length=1)]
    """See :func:`~.media.find_media`; a relative one begins at the working directory."""
    share: Positive | None = None
    """Part of the samples that training draws from here, beside the other sources' shares, of any sum; rounded in every
    bucket. Without, every sample is drawn equally often."""
    repeats: PositiveInteger = 1
    """How often each sample is drawn in an epoch."""
    prefix: str = ""
    """Text before every caption."""
    missing_captions: Literal["error", "skip", "empty"] = "error"
    """What is done about a file without a caption: raise, which members of shards never do; leave it out; or encode it
    with the prefix alone."""

    def __post_init__(self) -> None:
        check(
            self.share is None or self.repeats == 1,
            f"share={self.share} and repeats={self.repeats} both say how often samples are drawn; give one of them.",
        )


@settings()
class Sources(Settings):
    """The data of a cache, as a YAML file says it, and what is cut out of it."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    clip: Clips | None = None
    """What to cut out of every file; None for what the command says, or the model's own clip."""

    def __post_init__(self) -> None:
        paths = [source.path for source in self.sources]
        for index, path in enumerate(paths):
            check(path not in paths[:index], f"sources.{index}.path: {path!r} is an earlier source too.")
        shares = [source.share for source in self.sources]
        check(
            None not in shares or not any(shares),
            f"Either all sources have a share or none; got {', '.join(map(str, shares))}.",
        )

    def media(self, listing: bool = False) -> list[Media]:
        """Return the videos and images of all sources, with their captions.

        With several sources the name of a file begins with the path of its source.

        Args:
            listing: whether to return files that cannot be used with their problem, in place of raising.

        Raises:
            FileNotFoundError: a source is missing or empty.
            ValueError: as :func:`~.media.find_media`.
        """
        found = []
        for source in self.sources:
            needs_captions = source.missing_captions == "error"
            for item in list_media(source.path) if listing else find_media(source.path, needs_captions):
                is_empty = item.problem == NO_CAPTION and source.missing_captions == "empty"
                name = f"{source.path}/{item.name}" if self.sources[1:] else item.name
                problem = None if is_empty else item.problem
                caption = f"{source.prefix}{item.caption}".strip() if problem is None else item.caption
                found.append(replace(item, name=name, caption=caption, problem=problem, origin=source.path))
        return found


def read_sources(path: str | Path) -> Sources:
    """Read a YAML file of sources; any other path is one source.

    Raises:
        FileNotFoundError: no such YAML file.
        ValueError: malformed YAML, or settings that are not allowed.
    """
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return read_yaml(Sources, read_text(Path(path)), path)
    return Sources((Source(str(path)),))
