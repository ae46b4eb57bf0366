"""Where videos, images and captions to encode are found: folders and webdataset's tar shards.

Shards are listed here and not by webdataset's own reader: that reads every byte of every shard in one pass, so a
resumed encoding would read again what it has; it does not notice a shard that was cut off between two members; and the
error that it gives for other damage does not name the sample.
"""

import csv
import json
import tarfile
from io import StringIO
from pathlib import Path
from typing import Any

from ...files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, read_json_lines, read_text
from .media import Media, TarMember

CAPTION_KEYS = ("text", "caption", "prompt", "label")
"""Names that a caption goes by in metadata."""

_PATTERN_MARKS = "*?["


def find_media(source: str | Path) -> list[Media]:
    """The videos and images of a folder or of webdataset's tar shards, with their captions.

    In a folder captions come from metadata.jsonl, from metadata.csv or from a .txt beside each file. Metadata has the
    columns ``file_name`` and ``text`` (or ``caption``, ``prompt``, ``label``).

    In shards the members of one sample have the same name up to its first dot: a video or image, and a .txt or a .json
    with one of the keys above. Since nobody mends a shard by hand, samples without a caption and shards that are cut
    off are not refused, but come with their problem.

    Args:
        source: a folder of files, a folder of uncompressed tar shards, one shard, or a pattern such as
            ``shards/*.tar``.

    Raises:
        FileNotFoundError: nothing there, no videos or images in it, or files that the metadata names and that are not
            there.
        ValueError: missing, empty or unreadable captions beside files, or a folder of both files and shards.
    """
    folder = Path(source)
    shards = _find_shards(folder)
    if shards:
        return [media for name, path in shards.items() for media in _media_of_shard(name, path)]
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder, no .tar file and no pattern of any.")
    return _media_of_folder(folder)


def _media_of_folder(folder: Path) -> list[Media]:
    captions = _metadata(folder)
    suffixes = VIDEO_SUFFIXES + IMAGE_SUFFIXES
    if captions is None:
        files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in suffixes]
        captions = {str(path.relative_to(folder)): _text_beside(path) for path in files}
    if not captions:
        raise FileNotFoundError(f"{folder} holds no videos or images ({', '.join(suffixes)}).")
    absent = [name for name in captions if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder}: the metadata names {_some(absent)}, which are not there.")
    empty = [name for name, caption in captions.items() if not caption]
    if empty:
        raise ValueError(
            f"{folder}: {len(empty)} of {len(captions)} files have no caption or an empty one: {_some(empty)}. Write "
            "one into a .txt of the same name, or list the files with file_name and text in metadata.jsonl or "
            "metadata.csv."
        )
    return [Media(folder / name, name, caption) for name, caption in captions.items()]


def _metadata(folder: Path) -> dict[str, str] | None:
    """File name → caption, from the metadata file if there is one."""
    file = next((folder / name for name in ("metadata.jsonl", "metadata.csv") if (folder / name).is_file()), None)
    if file is None:
        return None
    text = read_text(file)
    rows: list[Any] = []
    if text.strip():
        rows = list(csv.DictReader(StringIO(text))) if file.suffix == ".csv" else read_json_lines(file)
    if not rows:
        raise ValueError(f"{file} is empty; it needs a row with file_name and text for every file, or remove it.")
    return dict(_name_and_caption(row, file) for row in rows)


def _name_and_caption(row: Any, path: Path) -> tuple[str, str]:
    names = row if isinstance(row, dict) else {}
    key = next((key for key in CAPTION_KEYS if key in names), None)
    if "file_name" not in names or key is None:
        has = ", ".join(map(str, names)) or repr(row)
        raise ValueError(f"{path} must have file_name and text in every row; a row has {has}.")
    return str(row["file_name"]), str("" if row[key] is None else row[key]).strip()


def _text_beside(path: Path) -> str:
    text = path.with_suffix(".txt")
    return read_text(text).strip() if text.is_file() else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _find_shards(source: Path) -> dict[str, Path]:
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


def _media_of_shard(name: str, path: Path) -> list[Media]:
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
