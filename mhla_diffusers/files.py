"""Atomic writing of files and folders, by a temporary path and renaming; reading with errors that name the file."""

import csv
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from io import StringIO
from pathlib import Path
from typing import Any

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv", ".flv")
_PART = 2**16
"""Bytes of each of the parts of a large file that are hashed to see whether it has changed."""

# Writing; every function raises OSError with the file where it cannot


@contextmanager
def written_aside(file: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces ``file`` at the end, or is removed on an error.

    It has the suffix of ``file``, because writers depend on it, and the process id, because two processes may write.
    """
    aside = file.with_name(f".{os.getpid()}-{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        aside.replace(file)
    except OSError as error:
        # the error of a full disk lacks the file, or names the temporary one
        if error.errno is None or error.filename not in (None, str(aside)):
            raise
        raise _cannot_write(file, error.strerror) from error
    finally:
        aside.unlink(missing_ok=True)


def _cannot_write(file: Path, reason: object) -> OSError:
    return OSError(f"Cannot write {file}: {reason}. Free some space, or choose another folder.")


def write_text(text: str, file: Path) -> None:
    """Write a text file."""
    with written_aside(file) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(result: Any, file: Path) -> None:
    """Write a result as JSON."""
    write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", file)


def write_tensors(tensors: Mapping[str, Any], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, contiguous and on the CPU, as a safetensors file with the permissions of any new file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with written_aside(file) as aside:
        aside.touch()
        rights = aside.stat().st_mode
        try:
            save_file(dict(tensors), aside, metadata=None if metadata is None else dict(metadata))
        except SafetensorError as error:  # a full disk, for example
            raise _cannot_write(file, error) from error
        aside.chmod(rights)  # safetensors writes its own temporary file, readable only by its owner


def write_whole_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Create or replace a folder atomically with what ``write`` puts into a temporary one."""
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        for file in aside.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream)
        if folder.exists():
            shutil.rmtree(folder)
        aside.replace(folder)
    except OSError as error:
        if error.errno is None:  # of a file in it
            raise OSError(str(error).replace(str(aside), str(folder))) from error
        raise _cannot_write(folder, error.strerror) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def folder_for_results(folder: Path, lock: bool = True) -> Iterator[None]:
    """Context with a folder, made if it is missing; OSError if another run has it, or nothing can be written there.

    A folder that was made and stays empty is removed again. Only one of several processes may ``lock`` it.
    """
    from filelock import FileLock, Timeout

    made, file = [place for place in (folder, *folder.parents) if not place.exists()], folder / ".lock"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file, timeout=0) if lock else nullcontext():
            try:
                yield
            finally:
                if lock:
                    file.unlink(missing_ok=True)  # while it is held; who has opened it meanwhile finds that it is gone
    except Timeout:
        raise OSError(f"Another run is writing into {folder}. Wait for it, or choose another folder.") from None
    finally:
        for place in made:
            with suppress(OSError):  # not empty, or removed meanwhile
                place.rmdir()


# Telling whether files have changed


def file_hash(path: Path) -> str:
    """Compute the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def visible_files(folder: Path) -> dict[str, Path]:
    """Return path inside a folder → file, in order, without those whose name or folder begins with a dot.

    Links are followed, except those to a folder that they lie in.
    """
    found: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        here = Path(place)
        around = {parent.resolve() for parent in (here, *here.absolute().parents)}
        folders[:] = [name for name in folders if name[0] != "." and (here / name).resolve() not in around]
        found += [here / name for name in names if name[0] != "." and (here / name).is_file()]
    return {str(file.relative_to(folder)): file for file in sorted(found)}


def fingerprint(path: Path) -> str | None:
    """Return a short hash of a file, or of a folder's visible files but Markdown; None if nothing is there.

    Of large files 16 parts count. It stays the same where the files are copied.
    """
    files = {"": path} if path.is_file() else visible_files(path)
    digest = hashlib.sha256()
    for name, file in files.items():
        size = 0 if file.suffix == ".md" else file.stat().st_size
        digest.update(f"{name} {size}\n".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(size // 16, _PART)):
                stream.seek(start)
                digest.update(stream.read(_PART))
    return digest.hexdigest()[:16] if files else None


# Reading: OSError for a missing file, ValueError with its name for a damaged one


def read_text(file: Path) -> str:
    """Read a text file, with or without a byte order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}.") from error


def read_lines(file: Path) -> list[str]:
    """Read the lines of a text file that are not empty, without white space around them."""
    # not splitlines(), which also splits at characters that a sentence may contain, such as U+2028
    return [line.strip() for line in read_text(file).split("\n") if line.strip()]


def read_json(file: Path) -> Any:
    """Read a JSON file."""
    return _json(read_text(file), file)


def check_unique(names: Sequence[str], what: str) -> None:
    """Raise ValueError if a name is given twice; ``what`` begins the message."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{what} {twice!r} is given twice; keep one of them.")


def read_csv(file: Path) -> list[dict[str, str | None]]:
    """Read the rows of a CSV file whose first line names the columns; a row may end early, with None for the rest."""
    rows = csv.DictReader(StringIO(read_text(file)), strict=True)
    found: list[dict[str, str | None]] = []
    try:
        for row in rows:
            if None in row:
                raise csv.Error(f"more values than the {len(rows.fieldnames or ())} columns")
            found.append(row)
    except csv.Error as error:
        advice = 'Quote texts with commas or quotation marks, and double the marks inside: "a, ""b""".'
        raise ValueError(f"{file} is not valid CSV at line {rows.reader.line_num}: {error}. {advice}") from error
    check_unique(rows.fieldnames or (), f"{file}: the column")
    return found


def read_json_lines(file: Path) -> list[Any]:
    """Read a file with one JSON value per line, without empty lines; ValueError for an empty file."""
    lines = {number: line for number, line in enumerate(read_text(file).split("\n"), start=1) if line.strip()}
    if not lines:
        raise ValueError(f"{file} is empty.")
    return [_json(line, f"Line {number} of {file}") for number, line in lines.items()]


def _json(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {str(error).rstrip('.')}.") from error
