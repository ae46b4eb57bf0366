"""Where data comes from: one folder of media, or several with a share, a prefix and a rule for missing captions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...errors import check
from ...files import read_text
from ...settings import Positive, PositiveInteger, Settings, read_yaml, settings
from .clips import Clips
from .media import NO_CAPTION, Media, find_media


@settings()
class Source(Settings):
    """A folder of videos and pictures with captions."""

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
    """What is done about a file without a caption: raise, leave it out, or encode it with the prefix alone."""

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
            check(path not in paths[:index], f"sources.{index}.path: {path!r} is listed twice; remove one.")
        shares = [source.share for source in self.sources]
        check(
            None not in shares or not any(shares),
            f"Either all sources have a share or none; got {', '.join(map(str, shares))}.",
        )

    def media(self) -> list[Media]:
        """Return the videos and images of all sources, those without a caption with that problem unless it is empty.

        With several sources the name of a file begins with the path of its source.

        Raises:
            FileNotFoundError: a source is missing or empty.
            ValueError: as :func:`~.media.find_media`.
        """
        found = []
        for source in self.sources:
            for item in find_media(Path(source.path)):
                is_empty = item.problem == NO_CAPTION and source.missing_captions == "empty"
                name = f"{source.path}/{item.name}" if self.sources[1:] else item.name
                problem = None if is_empty else item.problem
                caption = f"{source.prefix}{item.caption}".strip() if problem is None else item.caption
                found.append(replace(item, name=name, caption=caption, problem=problem, origin=source.path))
        return found

    def check_captions(self, media: Sequence[Media]) -> None:
        """Raise ValueError for files without a caption in a source where that is an error."""
        for source in self.sources:
            of_source = [item for item in media if item.origin == source.path]
            missing = [item.name for item in of_source if item.problem == NO_CAPTION]
            check(
                source.missing_captions != "error" or not missing,
                f"{source.path}: {len(missing)} of {len(of_source)} files have no caption or an empty one, such as "
                f"{', '.join(missing[:5])}. Write one into a .txt of the same name, or list the files with file_name "
                "and text in metadata.jsonl or metadata.csv; in a YAML file of sources, missing_captions: skip or "
                "empty goes on without.",
            )


def read_sources(path: str | Path) -> Sources:
    """Read a YAML file of sources; any other path is one source.

    Raises:
        FileNotFoundError: no such YAML file.
        ValueError: malformed YAML, or settings that are not allowed.
    """
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return read_yaml(Sources, read_text(Path(path)), path)
    return Sources((Source(str(path)),))
