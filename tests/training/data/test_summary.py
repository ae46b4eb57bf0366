"""Summary and pictures of data, before and after encoding."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mhla_diffusers.cli import app
from mhla_diffusers.tiny import pipeline_folder
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.summary import summarize

from ...refusals import refused
from ..pipelines import write_frames, write_image, write_video

CLIP = Clips(frames=9, fps=6.0, sizes=((64, 64), (64, 96)), upscale=True)
OPTIONS = ("--frames", 9, "--fps", 6, "--size", 64, "--size", "64x96", "--upscale")
TINY_WAN = str(pipeline_folder("wan"))


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Seven files: three are used, one of each problem is left out."""
    folder = tmp_path / "videos"
    ramp = np.linspace(0, 255, 96, dtype=np.uint8)
    wide = np.stack([np.tile(np.roll(ramp, 4 * frame)[None, :, None], (64, 1, 3)) for frame in range(20)])
    write_frames(folder / "wide.mp4", wide, fps=12)
    write_video(folder / "small.mp4", frames=9, fps=6, size=(32, 32))
    write_video(folder / "slow.mp4", frames=8, fps=3, size=(64, 72))
    write_video(folder / "short.mp4", frames=4, fps=6, size=(64, 64))
    write_video(folder / "mute.mp4", frames=12, fps=6, size=(64, 64))
    write_image(folder / "picture.png", (64, 64))
    (folder / "broken.mp4").write_bytes(b"no video")
    for name in ("small", "slow", "short", "picture", "broken"):
        (folder / f"{name}.txt").write_text("a seven moving left")
    (folder / "wide.txt").write_text("a <three> bouncing")
    return folder


def _rows(text: str) -> list[list[str]]:
    """Cells of the table of buckets."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.split("\n\n")[1].splitlines()]


def test_numbers_of_files_and_every_reason(videos: Path) -> None:
    text = str(summarize(videos, CLIP, TINY_WAN))
    assert f"{videos}: 3 of 7 files are used, as 3 clips." in text
    header, *rows = _rows(text)
    assert header == ["size", "frames", "clips", "latents", "tokens"]
    assert [row[:4] for row in rows] == [["64x64", "9", "2", "4x9x16x16"], ["64x96", "9", "1", "4x9x16x24"]]
    assert int(rows[1][4]) == int(rows[0][4]) * 3 // 2
    for reason in ("short.mp4: too short", "mute.mp4: it has no caption", "picture.png: an image", "broken.mp4: not a"):
        assert f"\n  {reason}" in text


def test_options_that_do_not_fit_are_refused(videos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "broken.mp4").write_bytes(b"no video")
    (broken / "broken.txt").write_text("a ball")

    def data(*options: object) -> None:
        CliRunner().invoke(app, ["data", *map(str, options)], catch_exceptions=False)

    with refused("fps, sizes"):
        data(videos, "--frames", 9)
    with refused("--model"):
        data(videos)
    with refused("63x64", " 8", "64x64"):
        data(videos, "--model", TINY_WAN, "--size", "63x64")
    for preview in ((), ("--preview", 1, "--output", tmp_path / "pictures")):
        with refused("/broken "):
            data(broken, "--model", TINY_WAN, *preview)


def test_what_is_encoded_is_what_was_announced_and_is_shown(videos: Path, tmp_path: Path) -> None:
    pictures, latents = tmp_path / "pictures", tmp_path / "latents"

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    before = run("data", videos, "--model", TINY_WAN, *OPTIONS, "--preview", 9, "--output", pictures)
    assert "wide.mp4: a <three> bouncing" in before and len(list(pictures.glob("*.jpg"))) == 3
    assert Image.open(pictures / "2.jpg").height == 64
    encoded = run(
        *("encode", "--model", TINY_WAN, "--source", videos, "--output", latents, *OPTIONS, "--precision", "no")
    )
    after = run("data", latents, "--model", "tiny-wan")
    assert _rows(encoded) == _rows(before) == _rows(after)
    for text in (before, encoded, after):
        assert "3 of 7 files are used" in text and "mute.mp4: it has no caption" in text
