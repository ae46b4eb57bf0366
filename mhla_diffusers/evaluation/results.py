"""Results as JSON files."""

import json
from pathlib import Path
from typing import Any


def write_text(text: str, file: Path) -> None:
    """Write a text file, aside first, so that a file that is there is whole.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


def write_json(result: Any, file: Path) -> None:
    """Write a result as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", file)


def read_text(file: Path) -> str:
    """Read a text file.

    Raises:
        FileNotFoundError: no such file.
        IsADirectoryError: it is a folder.
        ValueError: it holds something else than text.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; give a file.")
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text file: {error}.") from error


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged.
    """
    try:
        return json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no readable JSON file: {error}.") from error


def read_json_lines(file: Path) -> list[Any]:
    """Read a file with one JSON value per line; empty lines are passed over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged or holds nothing.
    """
    try:
        values = [json.loads(line) for line in read_text(file).splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no readable file of JSON lines: {error}.") from error
    if not values:
        raise ValueError(f"{file} is empty.")
    return values
