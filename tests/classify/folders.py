"""Tiny folders with a subfolder of pictures per class."""

from pathlib import Path

from PIL import Image

RED = (255, 0, 0)


def write_folder(folder: Path, counts: dict[str, int]) -> Path:
    """Red pictures of 16 x 16 pixels, so many of every class."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (16, 16), RED).save(folder / name / f"{index}.png")
    return folder
