"""webdataset's tar shards: which samples they hold, and where in the archive."""

import json
import tarfile
from pathlib import Path
from typing import Any

from .media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Media, TarMember

CAPTION_KEYS = ("text", "caption", "prompt", "label")
"""Names that a caption goes by in metadata."""

_PATTERN_MARKS = "*?["


def find_shards(source: Path) -> dict[str, Path]:
    """Name and path of the .tar files that a source means; none if it is something else.

    Raises:
        FileNotFoundError: a pattern that fits no .tar file.
        ValueError: a folder with tar files beside videos or images.
    """
    if source.suffix == ".tar" and source.is_file():
        return {source.name: source}
    parts = source.parts
    first = next((place for place, part in enumerate(parts) if set(part) & set(_PATTERN_MARKS)), len(parts))
    if source.is_dir():
        folder, files = source, [path for path in source.rglob("*") if path.is_file()]
    elif first < len(parts):
        folder = Path(*parts[:first])
        files = list(folder.glob("/".join(parts[first:])))
    else:
        return {}
    shards = {str(path.relative_to(folder)): path for path in sorted(files) if path.suffix == ".tar"}
    if folder != source and not shards:
        raise FileNotFoundError(f"{source} fits no .tar file.")
    loose = [path.name for path in files if path.suffix.lower() in VIDEO_SUFFIXES + IMAGE_SUFFIXES]
    if shards and loose:
        raise ValueError(
            f"{source} holds tar shards ({next(iter(shards))}, …) and videos or images ({loose[0]}, …); encode them "
            "from folders of their own."
        )
    return shards


def media_of_shard(name: str, path: Path) -> list[Media]:
    """The samples of a shard; the shard itself, with its problem, comes last if it is damaged or cut off.

    Args:
        name: stands before the names of the samples.
        path: of the archive.
    """
    samples, problem = _read_members(path)
    media = [
        _media(f"{name}/{key}", members) for key, members in samples.items() if _picture_extension(members) is not None
    ]
    if problem is None and not media:
        problem = "it holds no videos or images"
    return media if problem is None else [*media, Media(path, name, "", problem)]


def _read_members(path: Path) -> tuple[dict[str, dict[str, TarMember]], str | None]:
    """Sample → extension → member, and what is wrong with the archive."""
    samples: dict[str, dict[str, TarMember]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                key, _, extension = file.partition(".")
                if member.isreg() and not member.issparse() and key:
                    where = TarMember(path, member.name, member.offset_data, member.size)
                    samples.setdefault(f"{folder}/{key}" if folder else key, {})[extension.lower()] = where
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        return samples, f"no complete tar archive ({error}); {len(samples)} samples were found before the damage"
    # tarfile takes an archive that is cut off between two members for a complete one, which ends in zeros
    if TarMember(path, path.name, end, tarfile.BLOCKSIZE).read() != tarfile.NUL * tarfile.BLOCKSIZE:
        return samples, f"the archive has no end; {len(samples)} samples were found before it was cut off"
    return samples, None


def _picture_extension(members: dict[str, TarMember]) -> str | None:
    """The extension of the video, or else of the image, of a sample."""
    suffixes = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
    return next((suffix[1:] for suffix in suffixes if suffix[1:] in members), None)


def _media(name: str, members: dict[str, TarMember]) -> Media:
    extension = str(_picture_extension(members))
    caption, problem = "", None
    try:
        caption = _caption(members)
    except ValueError as error:
        problem = f"its caption cannot be read: {error}"
    if not caption and problem is None:
        problem = "it has no caption, neither .txt nor .json, or an empty one"
    return Media(members[extension], f"{name}.{extension}", caption, problem)


def _caption(members: dict[str, TarMember]) -> str:
    """Text of the .txt, or of the .json without one; empty if there is none.

    Raises:
        ValueError: no UTF-8, no JSON, or the archive ends before.
    """
    extension = next((extension for extension in ("txt", "json") if extension in members), None)
    if extension is None:
        return ""
    text = members[extension].read()
    if len(text) < members[extension].size:
        raise ValueError("the archive ends in the middle of it")
    if extension == "txt":
        return text.decode("utf-8").strip()
    content: Any = json.loads(text)
    if not isinstance(content, dict):
        return ""
    return str(next((content[key] for key in CAPTION_KEYS if content.get(key) is not None), "")).strip()
