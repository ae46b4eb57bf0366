"""Videos and images: found with their captions in folders, cut into clips, and read."""

import math
import re
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusers.evaluation.images import read_sample
from mhla_diffusers.generation.pixels import UnreadableMediaError
from mhla_diffusers.training.data.clips import Clips, auto_sizes
from mhla_diffusers.training.data.media import find_media, read_clips
from mhla_diffusers.training.data.model import DataModel

from ...refusals import refused
from ..pipelines import write_frames, write_image, write_video

CLIP = Clips(frames=(5,), fps=8.0, sizes=((32, 32),))
IMAGE = Clips(frames=(1,), fps=1.0, sizes=((32, 32),))


def _read(file: Path, clip: Clips = CLIP) -> torch.Tensor:
    return next(read_clips(file, clip))


def _clips(file: Path, clips: Clips) -> list[tuple[int, int]]:
    """First frame, by its grey level, and length of every clip."""
    return sorted((round(float(clip[:, 0].float().mean()) / 10), clip.shape[1]) for clip in read_clips(file, clips))


def test_clips_begin_where_the_settings_say_with_every_length_that_is_left(tmp_path: Path) -> None:
    """Frame i of the video has level 10 i."""
    write_video(tmp_path / "a.mp4", frames=12, fps=8)
    clips = Clips(frames=(1, 5), fps=8.0, sizes=((32, 32),))
    for stride, expected in (
        (None, [(0, 1), (0, 5)]),
        (5, [(0, 1), (0, 5), (5, 1), (5, 5), (10, 1)]),
        (4, [(0, 1), (0, 5), (4, 1), (4, 5), (8, 1)]),
        (7, [(0, 1), (0, 5), (7, 1), (7, 5)]),
    ):
        assert _clips(tmp_path / "a.mp4", clips.replace(stride=stride)) == expected
    longest = clips.replace(frames=(1, 3, 5), longest=True)
    assert _clips(tmp_path / "a.mp4", longest) == [(0, 5)]
    assert _clips(tmp_path / "a.mp4", longest.replace(stride=4)) == [(0, 5), (4, 5), (8, 3)]
    assert _clips(tmp_path / "a.mp4", clips.replace(fps=4.0, stride=5)) == [(0, 1), (0, 5), (10, 1)]


def test_automatic_sizes_have_one_area_and_sides_for_the_model() -> None:
    sizes = auto_sizes((480, 832), 16)
    assert sizes[:2] == [(480, 832), (832, 480)]
    for height, width in sizes:
        assert height % 16 == width % 16 == 0 and 0.9 < height * width / (480 * 832) < 1.1
    for shape in ((1080, 1920), (1920, 1080), (1000, 1000), (480, 640), (3000, 2000), (1080, 2560)):
        size = Clips(frames=(81,), fps=16.0, sizes=tuple(sizes), upscale=True).size_for(*shape)
        assert size[1] / size[0] == pytest.approx(shape[1] / shape[0], rel=0.06)
    assert DataModel("tiny-wan").clips([9], 6.0, ["auto", "32x64"]).sizes[0] == (32, 64)
    assert DataModel("tiny-dit").clips(sizes=["auto"]).sizes == ((64, 64),)


def _problem(file: Path, clip: Clips) -> str:
    with pytest.raises(UnreadableMediaError) as raised:
        list(read_clips(file, clip))
    return str(raised.value)


def test_unreadable_files_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an image of too many pixels, rather than the end of an encoding of thousands of files."""
    import av

    write_image(tmp_path / "huge.png")
    write_image(tmp_path / "image.png", size=(8, 8))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    write_video(tmp_path / "short.mp4", frames=3)
    write_video(tmp_path / "small.mp4", size=(16, 16))
    write_video(tmp_path / "whole.mp4")
    video = (tmp_path / "whole.mp4").read_bytes()
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    pages = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    pages[0].save(tmp_path / "moving.webp", save_all=True, append_images=pages[1:])
    for name, content, clip, reason in (
        ("empty.mp4", b"", CLIP, "empty"),
        ("truncated.mp4", video[: len(video) // 3], CLIP, "not a readable video"),
        ("text.mp4", b"no video at all", CLIP, "not a readable video"),
        ("broken.png", b"no image at all", IMAGE, "not a readable image"),
        ("image.png", None, CLIP, "5 frames"),
        ("huge.png", None, IMAGE, "not a readable image"),
        ("short.mp4", None, CLIP, "too short: 3 frames at 8 fps.* 5"),
        ("small.mp4", None, CLIP, "16x16 would be upscaled 2 times"),
        ("sound.mp4", None, IMAGE, "no video, but audio"),
        ("moving.webp", None, IMAGE, "animated image of 2 frames"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert re.search(reason, _problem(tmp_path / name, clip))


def _captions(source: object) -> dict[str, str]:
    return {media.name: media.problem or media.caption for media in find_media(Path(str(source)))}


def test_captions_from_text_files_jsonl_and_csv(tmp_path: Path) -> None:
    """Unusual line separators stay, and a byte order mark goes; suffixes may be capitals."""
    (tmp_path / "deep").mkdir()
    for name, text in (("a.png", "a.txt"), ("deep/b.png", "deep/b.txt"), ("UP.PNG", "UP.TXT")):
        write_image(tmp_path / name)
        (tmp_path / text).write_text(f"caption of {name}\n")
    assert _captions(tmp_path) == {name: f"caption of {name}" for name in ("UP.PNG", "a.png", "deep/b.png")}
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,"from, csv"\n', encoding="utf-8-sig")
    assert _captions(tmp_path) == {"a.png": "from, csv"}
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "./deep/b.png", "text": ["from\u2028jsonl", "b"]}\n\n', "utf-8"
    )
    assert _captions(tmp_path) == {"deep/b.png": "from\u2028jsonl\nb"}


def test_links_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    write_image(tmp_path / "other" / "a.png")
    (tmp_path / "other/a.txt").write_text("a")
    (tmp_path / "source").mkdir()
    for link, target in (("source/up", tmp_path), ("source/sub", "../other"), ("other/back", "../source")):
        (tmp_path / link).symlink_to(target)
    assert _captions(tmp_path / "source") == {"sub/a.png": "a"}


def test_hidden_files_are_passed_over_and_what_is_left_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()
    names = ["a.png", "b.png", "am4v.m4v", "ats.ts", "aMPG.MPG", "awmv.wmv", "aflv.flv"]
    for name in [*names, "arm.rm", "._a.png", ".ipynb_checkpoints/a-checkpoint.png"]:
        (tmp_path / name).touch()
        (tmp_path / name).with_suffix(".txt").write_text("a")
    assert _captions(tmp_path) == dict.fromkeys(names, "a")
    assert "1 captions have no" in caplog.text and "arm.txt" in caplog.text
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": 3}\n')
    assert _captions(tmp_path) == {"a.png": "3"}
    assert "6 files in" in caplog.text and "such as aMPG.MPG" in caplog.text


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("jsonl", b'{"file": "c.png", "text": "x"}\n', "Row 1 of .*file_name and text"),
        ("jsonl", b'{"file_name": "a.png", "text": "x"}\n{"f\n', "Line 2 of .*jsonl"),
        ("jsonl", b"\n", "metadata.jsonl .*empty"),
        ("csv", b"text,file_name\nx\n", "Row 1 of .*'file_name': None"),
        ("csv", b"file_name,text\na.png,a, b\n", "line 2.* 2 "),
        ("csv", b"file_name,text\na.png,a\nb/../a.png,b\n", "Row 2 of .* a.png"),
        ("jsonl", b"\xff", "metadata.jsonl .*UTF-8"),
        ("jsonl", b'{"file_name": "a.png", "text": ["x", []]}\n', r"Row 1 of .*text=\['x', \[\]\]"),
        ("jsonl", b'{"file_name": "a.png", "text": NaN}\n', "Row 1 of .*text=nan"),
        ("csv", b'file_name,text\na.png,"a cat\nb.png,"a dog"\n', "metadata.csv is not valid CSV.*quotation"),
    ],
)
def test_captions_in_a_file_that_is_wrong_are_refused(kind: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / f"metadata.{kind}").write_bytes(content)
    for name in ("a.png", "b.png"):
        write_image(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        find_media(tmp_path)


def test_folders_without_media_or_with_two_files_of_captions_are_refused(tmp_path: Path) -> None:
    with refused("none", error=FileNotFoundError):
        find_media(tmp_path / "none")
    with refused("no videos or images", error=FileNotFoundError):
        find_media(tmp_path)
    write_image(tmp_path / "a.png")
    for kind, content in (("jsonl", "{}\n"), ("csv", "a\n")):
        (tmp_path / f"metadata.{kind}").write_text(content)
    with refused("metadata.jsonl and metadata.csv"):
        find_media(tmp_path)


_STREAMS = [("mp4", "mpeg4"), ("mkv", "mpeg4"), ("webm", "libvpx")]
# an AVI cannot begin later: its first frame lasts until then
_CONTAINERS = [*((*stream, offset) for stream in _STREAMS for offset in (0, 0.37)), ("avi", "mpeg4", 0)]
_RATES = ["16:16", "48:24", "48:16", "24:48", "24000/1001:24", "30000/1001:30", "30:16", "25:16", "8:24"]


@pytest.mark.parametrize(("kind", "codec", "offset"), _CONTAINERS)
@pytest.mark.parametrize("rates", _RATES)
def test_frames_are_those_nearest_to_the_times_asked_for(
    kind: str, codec: str, offset: float, rates: str, tmp_path: Path
) -> None:
    """The earlier of two, also where a container rounds timestamps to milliseconds, or begins later than at 0."""
    exe = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    given, wanted = rates.split(":")
    levels = f"color=gray:s=32x32:r={given}:d=1,geq=lum='16+4*N':cb=128:cr=128,format=yuv420p"
    file = tmp_path / f"a.{kind}"
    made = [exe, "-loglevel", "error", "-f", "lavfi", "-i", levels, "-c:v", codec, "-b:v", "2M"]
    subprocess.run([*made, "-output_ts_offset", str(offset), str(file)], check=True)
    ratio = Fraction(given) / Fraction(wanted)
    nearest = [math.ceil(number * ratio - Fraction(1, 2)) for number in range(8)]
    found = _read(file, Clips(frames=(8,), fps=float(wanted), sizes=((32, 32),))).float().mean(dim=(0, 2, 3))
    step = 4 * 255 / 219  # from the range of video to that of pictures
    assert (found / step).round().int().tolist() == nearest


@pytest.mark.parametrize(
    ("shown", "width", "size", "bright"),
    [
        ("rotation 90", 64, (64, 32), (1, 0)),  # counter-clockwise
        ("rotation 270", 64, (64, 32), (0, 1)),
        ("rotation 180", 64, (32, 64), (1, 1)),
        ("hflip", 32, (32, 64), (0, 1)),  # with pixels that are not square
        ("vflip", 32, (32, 64), (1, 0)),
    ],
)
def test_frames_are_turned_and_mirrored_as_they_are_shown(
    shown: str, width: int, size: tuple[int, int], bright: tuple[int, int], tmp_path: Path
) -> None:
    """The upper left quarter is bright as it is stored."""
    exe = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    stored = torch.zeros(8, 3, 32, width, dtype=torch.uint8)
    stored[:, :, :16, : width // 2] = 200
    write_frames(tmp_path / "stored.mp4", stored.permute(0, 2, 3, 1).numpy())
    command = [exe, "-loglevel", "error", *f"-display_{shown}".split(), "-i", str(tmp_path / "stored.mp4")]
    subprocess.run([*command, "-c", "copy", "-aspect", "2:1", str(tmp_path / "shown.mp4")], check=True)
    for frame in (
        _read(tmp_path / "shown.mp4", Clips(frames=(5,), fps=8.0, sizes=((32, 64), (64, 32), (32, 32))))[:, 0],
        read_sample(tmp_path / "shown.mp4")[0],
    ):
        assert frame.shape == (3, *size)
        rows, columns = (side // 2 * place for side, place in zip(size, bright, strict=True))
        quarter = frame[:, rows : rows + size[0] // 2, columns : columns + size[1] // 2].float()
        assert quarter.mean() == pytest.approx(200, abs=8)  # MPEG-4 is lossy
        assert frame.float().mean() == pytest.approx(50, abs=8)


@pytest.mark.parametrize(
    ("mode", "colour", "seen"), [("I;16", 127 * 257, 127), ("RGBA", (200, 0, 0, 0), 255)], ids=["16 bits", "clear"]
)
def test_grey_of_16_bits_keeps_its_level_and_what_is_transparent_is_laid_on_white(
    mode: str, colour: object, seen: int, tmp_path: Path
) -> None:
    Image.new(mode, (32, 32), colour).save(tmp_path / "a.png")  # type: ignore[arg-type]
    assert _read(tmp_path / "a.png", IMAGE).unique().tolist() == [seen]
    assert read_sample(tmp_path / "a.png").unique().tolist() == [seen]
