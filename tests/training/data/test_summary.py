"""Summary and preview of data, before and after encoding."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mhla_diffusers.cli import app
from mhla_diffusers.tiny import pipeline_folder
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.sheets import write_sheets
from mhla_diffusers.training.data.summary import summarize

from ...refusals import refused
from ..pipelines import write_frames, write_image, write_video

CLIP = Clips(frames=9, fps=6.0, sizes=((64, 64), (64, 96)), upscale=True)
OPTIONS = ("--frames", 9, "--fps", 6, "--size", 64, "--size", "64x96", "--upscale", "--precision", "no", "--workers", 0)
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


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So wide that no row of a table goes on in a further line."""
    monkeypatch.setenv("COLUMNS", "300")


def _height(picture: Path) -> int:
    return Image.open(picture).height


def _rows(text: str) -> dict[str, dict[str, str]]:
    """Size → column → cell of the printed table."""
    lines = text.split("\n\n")[1].splitlines()
    header, *rows = (re.split(r"\s{2,}", line.strip()) for line in lines)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_numbers_of_files(videos: Path) -> None:
    text = str(summarize(videos, CLIP, TINY_WAN))
    assert f"{videos}: 3 of 7 files are used, as 9 frames of 64x64, 64x96 at 6 fps (1.5 s)." in text
    assert "as 9 frames of 64x64 at 6 fps" in str(summarize(videos, model="tiny-wan")), "its own clip"
    rows = _rows(text)
    assert rows.keys() == {"64x64", "64x96", "all"}
    assert rows["64x96"]["files"] == "1" and rows["64x96"]["of sizes"] == "64x96"
    assert rows["64x96"]["fps"] == "12" and rows["64x96"]["seconds"] == "1.67"
    every = rows["all"]
    assert every["of sizes"] == "32x32 to 64x96" and every["fps"] == "3 to 12"
    assert (every["new rate"], every["repeated"], every["enlarged"]) == ("2", "1", "1 (to 2 x)")
    assert every["cropped"] == "to 11%"  # 64x72 to a square
    assert float(every["hours used"]) == pytest.approx(3 * 1.5 / 3600, rel=0.01)
    assert rows["64x64"]["latents"] == "4x9x16x16" and rows["64x96"]["latents"] == "4x9x16x24"
    tokens = [int(rows[size]["tokens"]) for size in ("64x64", "64x96")]
    assert tokens[1] == tokens[0] * 3 // 2 and every["tokens"] == f"{tokens[0]} to {tokens[1]}"
    for reason in ("short.mp4: too short", "mute.mp4: it has no caption", "picture.png: an image", "broken.mp4: not a"):
        assert f"1  {reason}" in text
    assert "1 missing; 2 files share theirs with another, the most (2) 'a seven moving left'" in text


def test_files_without_a_clip_are_told_as_they_are(videos: Path, tmp_path: Path) -> None:
    summary = summarize(videos)
    rows = _rows(str(summary))
    assert "5 of 7 files are readable; with --model" in str(summary)
    assert rows["64x64"]["files"] == "2" and rows["64x64"]["seconds"] == "0.667" and "hours used" not in rows["all"]
    lines = write_sheets(summary, 9, tmp_path / "sheets")
    assert len(lines) == len(list((tmp_path / "sheets").glob("*.jpg"))) == 5


def test_options_that_do_not_fit_are_refused(videos: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copy(videos / "broken.mp4", broken)

    def data(*options: object) -> None:
        CliRunner().invoke(app, ["data", *map(str, options)], catch_exceptions=False)

    with refused("--fps, --size"):
        data(videos, "--frames", 9)
    with refused("63x64", " 8", "64x64"):
        data(videos, "--model", TINY_WAN, "--size", "63x64")
    with refused("/broken "):
        data(broken, "--preview", 1, "--output", tmp_path / "sheets")


def test_an_encoded_folder_shows_its_latents_beside_the_source(videos: Path, tmp_path: Path) -> None:
    (videos / "mute.txt").write_text("a seven")
    sheets, latents = tmp_path / "sheets", tmp_path / "latents"

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    before = run("data", videos, "--model", TINY_WAN, *OPTIONS, "--preview", 4, "--output", sheets)
    (videos / "mute.txt").write_text("")
    ended = [
        CliRunner().invoke(app, list(map(str, (*arguments, "--model", TINY_WAN, *OPTIONS))))
        for arguments in (("data", videos), ("encode", "--source", videos, "--output", latents))
    ]
    assert "3 of 7 files are used" in ended[0].stdout
    for result in ended:
        assert result.exit_code == 1 and "1 of 7 files have no caption" in str(result.exception)
    (videos / "mute.txt").write_text("a seven")
    assert "wide.mp4: a <three> bouncing" in before and len(list(sheets.glob("*.jpg"))) == 4
    assert {_height(sheets / f"{number}.jpg") for number in range(4)} == {64}
    encoded = run("encode", "--model", TINY_WAN, "--source", videos, "--output", latents, *OPTIONS)
    after = run("data", latents, "--model", "tiny-wan", "--precision", "no", "--preview", 3, "--output", sheets)
    assert _rows(encoded) == _rows(before) == _rows(after)
    assert "Left out:" in after and "4 of 7 files are used" in after
    for number in range(3):  # decoded latents look like the frames above them
        pixels = np.asarray(Image.open(sheets / f"{number}.jpg")).astype(float)
        assert len(pixels) == 2 * 64 + 4
        assert np.square(pixels[:64] - pixels[-64:]).mean() < 255**2 / 10**2, "20 dB"
    run("data", latents, "--preview", 2, "--output", sheets)
    assert {_height(sheets / f"{number}.jpg") for number in range(2)} == {64}
    videos.rename(tmp_path / "elsewhere")
    shown = run("data", latents, "--model", TINY_WAN, "--precision", "no", "--preview", 2, "--output", sheets)
    assert shown.count("the file is not where") == 2
    assert {_height(sheets / f"{number}.jpg") for number in range(2)} == {64}
    with refused("is encoded"):
        summarize(latents, CLIP)
