"""The files of the tiny pipelines that ship with the package, and the check that they are whole."""

import hashlib
import json
from pathlib import Path

ASSET_FOLDER = Path(__file__).parent / "assets"
CHECKSUM_FILE = ASSET_FOLDER / "checksums.json"


class DamagedAssetError(OSError):
    """A file of a tiny pipeline is missing or is not the one that was shipped."""


def pipeline_folder(family: str) -> Path:
    """Where the pipeline of a family lies."""
    return ASSET_FOLDER / f"tiny-{family}"


def check_asset(path: Path) -> None:
    """Compare a file, or every file of a folder, with the checksums that were recorded when it was made.

    Raises:
        DamagedAssetError: which files are missing or damaged, and how to restore them.
    """
    name = path.relative_to(ASSET_FOLDER).as_posix()
    recorded = _read_checksums()
    expected = {file: value for file, value in recorded.items() if file == name or file.startswith(f"{name}/")}
    if not expected:
        raise _damaged([f"{name} (not in {CHECKSUM_FILE.name})"])
    wrong = []
    for file, value in expected.items():
        if not (ASSET_FOLDER / file).is_file():
            wrong.append(f"{file} (missing)")
        elif _checksum(ASSET_FOLDER / file) != value:
            wrong.append(f"{file} (damaged)")
    if wrong:
        raise _damaged(wrong)


def record_checksums() -> None:
    """Write the checksums of all files in the asset folder."""
    files = sorted(path for path in ASSET_FOLDER.rglob("*") if path.is_file() and path != CHECKSUM_FILE)
    checksums = {path.relative_to(ASSET_FOLDER).as_posix(): _checksum(path) for path in files}
    CHECKSUM_FILE.write_text(json.dumps(checksums, indent=1) + "\n", encoding="utf-8")


def _read_checksums() -> dict[str, str]:
    try:
        checksums: dict[str, str] = json.loads(CHECKSUM_FILE.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise _damaged([CHECKSUM_FILE.name]) from error
    return checksums


def _damaged(files: list[str]) -> DamagedAssetError:
    return DamagedAssetError(
        f"Files of the tiny pipelines in {ASSET_FOLDER} are missing or damaged: {', '.join(files)}. Restore them with "
        "`git checkout -- mhla_diffusers/tiny/assets` in a clone, or "
        "`pip install --force-reinstall --no-deps mhla_diffusers`."
    )


def _checksum(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".json":
        content = content.replace(b"\r\n", b"\n")
    return hashlib.sha256(content).hexdigest()
