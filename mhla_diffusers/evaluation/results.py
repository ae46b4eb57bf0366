"""Results as JSON files."""

import json
from pathlib import Path
from typing import Any


def write_json(result: Any, file: Path) -> None:
    """Write a result, aside first, so that a file that is there is whole.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}")
    aside.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(file)


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}.")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no readable JSON file: {error}.") from error
