"""Where videos, images and captions to encode are found: folders and webdataset's tar shards."""

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

from .media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Media
from .shards import CAPTION_KEYS, find_shards, media_of_shard


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
    shards = find_shards(folder)
    if shards:
        return [media for name, path in shards.items() for media in media_of_shard(name, path)]
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
    text = _read_text(file)
    rows: list[Any] = list(csv.DictReader(StringIO(text))) if file.suffix == ".csv" else _json_lines(text, file)
    if not rows:
        raise ValueError(f"{file} is empty; it needs a row with file_name and text for every file, or remove it.")
    return dict(_name_and_caption(row, file) for row in rows)


def _json_lines(text: str, file: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"Line {number} of {file} is no JSON: {error}.") from error
    return rows


def _read_text(file: Path) -> str:
    """UTF-8, with or without a byte order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}.") from error


def _name_and_caption(row: Any, path: Path) -> tuple[str, str]:
    names = row if isinstance(row, dict) else {}
    key = next((key for key in CAPTION_KEYS if key in names), None)
    if "file_name" not in names or key is None:
        has = ", ".join(map(str, names)) or repr(row)
        raise ValueError(f"{path} must have file_name and text in every row; a row has {has}.")
    return str(row["file_name"]), str("" if row[key] is None else row[key]).strip()


def _text_beside(path: Path) -> str:
    text = path.with_suffix(".txt")
    return _read_text(text).strip() if text.is_file() else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
