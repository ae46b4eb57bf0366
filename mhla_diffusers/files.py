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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv", ".flv")
_SMALL = 2**20
"""Bytes up to which a file is hashed to see whether it has changed; of a larger one size and time count."""

# Writing; every function raises OSError with the file where it cannot


@contextmanager
def written_aside(file: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces ``file`` at the end, or is removed on an error.

    It has the suffix of ``file``, because writers depend on it, and the process id, because two processes may write.
    """
    aside = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(file, error.strerror) from error
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


def write_checked_json(content: Mapping[str, Any], file: Path) -> None:
    """Write named values as JSON with a hash of them, which :func:`read_checked_json` compares."""
    write_json({**content, "sha256": _json_hash(content)}, file)


def _json_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_tensors(tensors: Mapping[str, "torch.Tensor"], file: Path, metadata: Mapping[str, str] | None = None) -> None:
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
    """Create or replace a folder by what ``write`` puts into the one that it gets, complete or absent after a crash."""
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


def check_writable(folder: Path) -> None:
    """Create a folder; OSError with the reason if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may check at the same time
    except OSError as error:
        raise OSError(f"Cannot write to the output folder {folder}: {error.strerror}. Choose another one.") from error


@contextmanager
def folder_for_results(folder: Path, lock: bool = True) -> Iterator[None]:
    """Context with a writable folder, removed again if it was created and stays empty.

    OSError if it is not writable, or if another run has it. Only one of several processes may ``lock`` it.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        check_writable(folder)
        with _locked(folder) if lock else nullcontext():
            yield
    finally:
        for place in made:
            with suppress(OSError):  # not empty, or removed meanwhile
                place.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    file = folder / ".lock"
    try:
        with FileLock(file, timeout=0):
            try:
                yield
            finally:
                file.unlink(missing_ok=True)  # while it is held; who has opened it meanwhile finds that it is gone
    except Timeout:
        raise OSError(
            f"Another run is writing into {folder}. Wait for it to finish, or choose another folder."
        ) from None


# Telling whether files have changed


def file_hash(path: Path) -> str:
    """Compute the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(file: Path, expected: str, noted_in: str) -> None:
    """Raise ValueError unless a file has the hash that the file ``noted_in`` holds."""
    if file_hash(file) != expected:
        raise ValueError(f"{file} is damaged or was changed: its SHA-256 is not the one in {noted_in}.")


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

    Of large files size and time count, not the content.
    """
    if path.is_dir():
        files = {name: file for name, file in visible_files(path).items() if file.suffix != ".md"}
    elif path.is_file():
        files = {"": path}
    else:
        return None
    digest = hashlib.sha256()
    for name, file in files.items():
        status = file.stat()
        what = file_hash(file) if status.st_size <= _SMALL else f"{status.st_size} {status.st_mtime_ns}"
        digest.update(f"{name} {what}\n".encode())
    return digest.hexdigest()[:16]


def weights_of(folder: Path) -> str | None:
    """Return a short hash of the weights in a folder, by 64 parts of each large file; None if there are none.

    It stays the same where the folder is copied.
    """
    digest = hashlib.sha256()
    files = [file for file in visible_files(folder).values() if file.suffix in (".safetensors", ".bin")]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(size // 64, _SMALL // 64)):
                stream.seek(start)
                digest.update(stream.read(_SMALL // 64))
    return digest.hexdigest()[:16] if files else None


# Reading: OSError for a missing file, ValueError with its name for a damaged one


def read_text(file: Path) -> str:
    """Read a text file, with or without a byte order mark."""
    if not file.exists():
        raise FileNotFoundError(f"There is no {file}.")
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
    text = read_text(file)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not a readable JSON file: {str(error).rstrip('.')}.") from error


def check_unique(names: Sequence[str], what: str) -> None:
    """Raise ValueError if a name is given twice; ``what`` begins the message."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{what} {twice!r} is given twice; keep one of them.")


def read_checked_json(file: Path) -> dict[str, Any]:
    """Read what :func:`write_checked_json` wrote."""
    content = read_json(file)
    if not isinstance(content, dict) or content.pop("sha256", None) != _json_hash(content):
        raise ValueError(f"{file} is damaged or was changed: its content does not fit its SHA-256.")
    return content


def read_csv(file: Path) -> list[dict[str, str | None]]:
    """Read the rows of a CSV file whose first line names the columns; a row may end early, with None for the rest."""
    rows = csv.DictReader(StringIO(read_text(file)), strict=True)
    try:
        found = list(rows)
    except csv.Error as error:
        raise ValueError(
            f"{file} cannot be read up to line {rows.reader.line_num}: {error}. Close every quotation mark that a text "
            'begins with, and write one inside a text twice, "a ""b""".'
        ) from error
    check_unique(rows.fieldnames or (), f"{file}: the column")
    longer = next((number for number, row in enumerate(found, start=1) if None in row), None)
    if longer is not None:
        raise ValueError(
            f"Row {longer} of {file} has more values than the {len(rows.fieldnames or ())} columns; write a text that "
            'holds a comma in quotation marks, "a, b".'
        )
    return found


def read_json_lines(file: Path) -> list[Any]:
    """Read a file with one JSON value per line; empty lines are skipped, an empty file is refused."""
    values = []
    # not splitlines(), which also splits at characters that JSON may contain
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"Line {number} of {file} is not JSON: {str(error).rstrip('.')}.") from error
    if not values:
        raise ValueError(f"{file} is empty.")
    return values
