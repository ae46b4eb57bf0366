"""Videos and images: found with their captions in folders and shards, and read."""

import io
import json
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusers.evaluation.images import read_sample
from mhla_diffusers.generation.pixels import UnreadableMediaError
from mhla_diffusers.training.data.cache import LatentCache
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.encode import encode_folder
from mhla_diffusers.training.data.media import Media, find_media, read_clips

from ..pipelines import wan_pipeline, write_frames, write_image, write_video

CLIP = Clips(frames=5, fps=8.0, sizes=((32, 32),))
IMAGE = Clips(1, 1.0, ((32, 32),))


def _read(file: Path, clip: Clips = CLIP) -> torch.Tensor:
    return next(read_clips(Media(file, file.name), clip)).pixels


@pytest.fixture
def video(tmp_path: Path) -> bytes:
    write_video(tmp_path / "video.mp4")
    return (tmp_path / "video.mp4").read_bytes()


def test_frames_are_taken_at_the_asked_rate(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", frames=12, fps=8)
    for fps, expected in ((8.0, [0, 10, 20, 30, 40]), (4.0, [0, 20, 40, 60, 80])):
        levels = _read(tmp_path / "a.mp4", Clips(5, fps, ((32, 32),))).float().mean(dim=(0, 2, 3))
        assert levels.tolist() == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("size", [(40, 48), (50, 34), (64, 128), (18, 22)])
def test_any_size_is_resized_and_cropped(tmp_path: Path, size: tuple[int, int]) -> None:
    write_video(tmp_path / "a.mp4", size=size)
    assert _read(tmp_path / "a.mp4", replace(CLIP, upscale=True)).shape == (3, 5, 32, 32)
    write_image(tmp_path / "a.png", (size[0] + 1, size[1] - 1), level=77)
    image = _read(tmp_path / "a.png", Clips(1, 1.0, ((16, 32),), upscale=True))
    assert image.shape == (3, 1, 16, 32)
    assert image.min() == image.max() == 77


def test_nearest_bucket() -> None:
    clip = Clips(1, 1.0, ((480, 832), (832, 480), (640, 640)))
    for size, bucket in (((720, 1280), (480, 832)), ((1920, 1080), (832, 480)), ((500, 512), (640, 640))):
        assert clip.size_for(*size) == bucket


def test_unreadable_files_say_why(tmp_path: Path, video: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an image of too many pixels, rather than the end of an encoding of thousands of files."""
    write_image(tmp_path / "huge.png")
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    write_video(tmp_path / "short.mp4", frames=3)
    for name, content, clip, reason in (
        ("empty.mp4", b"", CLIP, "empty"),
        ("truncated.mp4", video[: len(video) // 3], CLIP, "not a readable video"),
        ("text.mp4", b"no video at all", CLIP, "not a readable video"),
        ("broken.png", b"no image at all", IMAGE, "not a readable image"),
        ("image.png", b"x", CLIP, "5 frames"),
        ("huge.png", None, IMAGE, "not a readable image"),
        ("short.mp4", None, CLIP, "0.25 s .* 0.50 s"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UnreadableMediaError, match=reason):
            _read(tmp_path / name, clip)


def _write_shard(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _places(shard: Path) -> dict[str, int]:
    with tarfile.open(shard) as archive:
        return {member.name: member.offset_data for member in archive}


def _captions(source: object) -> dict[str, str]:
    return {media.name: media.problem or media.caption for media in find_media(str(source))}


def test_members_of_one_name_are_one_sample(tmp_path: Path, video: bytes) -> None:
    members = {
        "a/000.mp4": video,
        "a/000.txt": b"a red ball\n",
        "a/000.json": b'{"text": "not this"}',
        "000.jpg": b"a thumbnail",
        "000.MP4": video,
        "000.json": json.dumps({"fps": 8, "caption": "a blue ball"}).encode(),
        "._000.mp4": b"of another system",
        "notes.txt": b"no picture",
    }
    shard = _write_shard(tmp_path / "shards" / "0.tar", members)
    assert _captions(shard) == {"0.tar/a/000.mp4": "a red ball", "0.tar/000.mp4": "a blue ball"}
    for media in find_media(shard):
        assert torch.equal(next(read_clips(media, CLIP)).pixels, _read(tmp_path / "video.mp4"))


def test_folder_and_pattern_mean_the_same_shards(tmp_path: Path) -> None:
    write_image(tmp_path / "image.png")
    image = (tmp_path / "image.png").read_bytes()
    for number in range(3):
        _write_shard(tmp_path / "shards" / f"{number}.tar", {"x.png": image, "x.txt": f"{number}".encode()})
    everything = {f"{number}.tar/x.png": f"{number}" for number in range(3)}
    assert _captions(tmp_path / "shards") == _captions(tmp_path / "shards" / "*.tar") == everything
    assert list(_captions(tmp_path / "shards" / "[01].tar")) == ["0.tar/x.png", "1.tar/x.png"]
    assert next(read_clips(find_media(tmp_path / "shards")[0], IMAGE)).pixels.shape == (3, 1, 32, 32)


def test_shards_come_with_their_problems(tmp_path: Path) -> None:
    captions = {"none.png": None, "empty.txt": b" \n", "list.json": b"[1]", "json.json": b"{", "bytes.txt": b"\xff"}
    members = {f"{name.split('.')[0]}.png": b"x" for name in captions}
    members |= {name: content for name, content in captions.items() if content is not None}
    found = _captions(_write_shard(tmp_path / "0.tar", members))
    assert [name for name, problem in found.items() if "no caption" in problem] == [
        f"0.tar/{name}.png" for name in ("none", "empty", "list")
    ]
    assert all("cannot be read" in found[f"0.tar/{name}.png"] for name in ("json", "bytes"))
    _write_shard(tmp_path / "0.tar", {})
    assert "no videos or images" in _captions(tmp_path)["0.tar"]
    (tmp_path / "0.tar").write_bytes(b"no archive" * 1000)
    assert "no complete tar archive" in _captions(tmp_path)["0.tar"]


@pytest.mark.parametrize("cut", ["in the second video", "after the second video", "in its caption", "at the end"])
def test_shard_that_is_cut_off_gives_what_it_holds(cut: str, tmp_path: Path, video: bytes) -> None:
    shard = _write_shard(tmp_path / "0.tar", {"a.mp4": video, "a.txt": b"red", "b.mp4": video, "b.txt": b"blue"})
    places = _places(shard)
    length = {
        "in the second video": places["b.mp4"] + 100,
        "after the second video": places["b.txt"] - tarfile.BLOCKSIZE,
        "in its caption": places["b.txt"] + 2,
        "at the end": places["b.txt"] + tarfile.BLOCKSIZE,
    }[cut]
    shard.write_bytes(shard.read_bytes()[:length])
    captions = _captions(shard)
    assert captions["0.tar/a.mp4"] == "red"
    assert (captions["0.tar/b.mp4"] == "blue") == (cut == "at the end")
    assert "2 samples were found before" in captions["0.tar"]


def test_shards_are_encoded_and_gone_on_with(tmp_path: Path, video: bytes) -> None:
    pipe = wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    shards = tmp_path / "shards"
    first = {"a.mp4": video, "a.txt": b"a red ball", "b.mp4": video, "c.mp4": b"", "c.txt": b"a ball"}
    _write_shard(shards / "0.tar", first)
    cut = _write_shard(shards / "1.tar", {"a.mp4": video, "a.txt": b"a blue ball", "b.txt": b"red", "b.mp4": video})
    cut.write_bytes(cut.read_bytes()[: _places(cut)["b.mp4"] + 100])
    index = encode_folder(pipe, str(tmp_path / "model"), shards, tmp_path / "cache", CLIP)
    assert [sample.source for sample in index.samples] == ["0.tar/a.mp4", "1.tar/a.mp4"]
    assert sorted(index.skipped) == ["0.tar/b.mp4", "0.tar/c.mp4", "1.tar", "1.tar/b.mp4"]
    assert "empty" in index.skipped["0.tar/c.mp4"] and "1.tar ends" in index.skipped["1.tar/b.mp4"]
    _write_shard(shards / "2.tar", {"a.mp4": video, "a.json": b'{"text": "a ball"}'})
    encode_folder(pipe, str(tmp_path / "model"), shards, tmp_path / "cache", CLIP, workers=1)
    cache = LatentCache(tmp_path / "cache")
    assert [sample.caption for sample in cache.index.samples] == ["a red ball", "a blue ball", "a ball"]
    assert torch.equal(cache[2]["latents"], cache[0]["latents"])


def test_captions_from_text_files_jsonl_and_csv(tmp_path: Path) -> None:
    """Unusual line separators stay, and a byte order mark goes."""
    (tmp_path / "deep").mkdir()
    for name in ("a.png", "deep/b.png"):
        write_image(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(f"caption of {name}\n")
    assert _captions(tmp_path) == {"a.png": "caption of a.png", "deep/b.png": "caption of deep/b.png"}
    (tmp_path / "metadata.csv").write_text('file_name,caption\na.png,"from, csv"\n', encoding="utf-8-sig")
    assert _captions(tmp_path) == {"a.png": "from, csv"}
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "./deep/b.png", "text": "from\u2028jsonl"}\n\n', "utf-8")
    assert _captions(tmp_path) == {"deep/b.png": "from\u2028jsonl"}


def test_links_are_followed_but_not_in_a_circle(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    for folder, name, target in ((source, "up", tmp_path), (source, "sub", other), (other, "back", source)):
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)
    write_image(other / "a.png")
    (other / "a.txt").write_text("a")
    assert _captions(source) == {"sub/a.png": "a"}


def test_hidden_files_are_passed_over_and_unlisted_ones_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("a.png", "b.png", "._a.png", ".ipynb_checkpoints/a-checkpoint.png"):
        write_image(tmp_path / name)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert _captions(tmp_path) == {"a.png": "a", "b.png": "b"}
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "label": 3}\n')
    assert _captions(tmp_path) == {"a.png": "3"}
    assert "1 files in" in caplog.text and "such as b.png" in caplog.text


@pytest.mark.parametrize(
    ("files", "source", "error", "words"),
    [
        ({}, "*.tar", FileNotFoundError, r"\*.tar"),
        ({}, "none.tar", FileNotFoundError, "none.tar"),
        ({}, "none", FileNotFoundError, "none"),
        ({}, ".", FileNotFoundError, "no videos or images"),
        ({"0.tar": b"", "loose.png": b""}, ".", ValueError, "0.tar.*loose.png"),
        ({"b.txt": b" \n", "b.png": b""}, ".", ValueError, "2 of 2 .* a.png, b.png"),
        ({"metadata.jsonl": b'{"file_name": "c.png", "text": "x"}\n'}, ".", FileNotFoundError, "c.png"),
        ({"metadata.jsonl": b'{"file": "c.png", "text": "x"}\n'}, ".", ValueError, "file_name .* file, text"),
        ({"metadata.jsonl": b'{"file_name": "a.png", "text": "x"}\n[1]\n'}, ".", ValueError, r"\[1\]"),
        ({"metadata.jsonl": b'{"file_name": "a.png", "text": "x"}\n{"f\n'}, ".", ValueError, "Line 2 of .*jsonl"),
        ({"metadata.jsonl": b"\n"}, ".", ValueError, "metadata.jsonl .*empty"),
        ({"metadata.jsonl": b'{"file_name": "", "text": "x"}\n'}, ".", ValueError, "Row 1 of .*file_name=''"),
        ({"metadata.csv": b"text,file_name\nx\n"}, ".", ValueError, "Row 1 of .*file_name=None"),
        ({"metadata.jsonl": b'{"file_name": "a.png", "text": "x\\ud800"}\n'}, ".", ValueError, "Line 1 .*ud800"),
        ({"metadata.csv": b"file_name,text\na.png,a, b\n"}, ".", ValueError, "Row 1 of .*3 .* 2 "),
        ({"metadata.csv": b"file_name,text,text\na.png,a,b\n"}, ".", ValueError, "metadata.csv.*'text'"),
        ({"metadata.csv": b"file_name,text\na.png,a\nb/../a.png,b\n"}, ".", ValueError, "Row 2 of .* a.png"),
        ({"metadata.jsonl": b'{"file_name": "a.png", "text": "x", "text": "y"}\n'}, ".", ValueError, "Line 1.*'text'"),
        ({"metadata.jsonl": b"\xff"}, ".", ValueError, "metadata.jsonl .*UTF-8"),
        ({"metadata.csv": b"file_name,text\na.png,a\na.png,b\n"}, ".", ValueError, "Row 2 of .* a.png"),
        ({"metadata.jsonl": b'{"file_name": "a.png", "text": ["x"]}\n'}, ".", ValueError, r"Row 1 of .*text=\['x'\]"),
        ({"metadata.jsonl": b'{"file_name": "a.png", "text": NaN}\n'}, ".", ValueError, "Row 1 of .*text=nan"),
        ({"metadata.jsonl": b"{}\n", "metadata.csv": b"a\n"}, ".", ValueError, "metadata.jsonl and metadata.csv"),
        # quotation marks that nothing closes, and a field that the reader does not take
        *(
            ({"metadata.csv": b"file_name,text\n" + rows, "b.png": b""}, ".", ValueError, "metadata.csv .*line 2")
            for rows in (b'a.png,"a cat\nb.png,a dog\n', b'a.png,"a cat\nb.png,"a dog"\n', b"a.png," + b"a" * 200_000)
        ),
    ],
)
def test_what_is_refused(files, source, error, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if files and "0.tar" not in files:
        write_image(tmp_path / "a.png")
    with pytest.raises(error, match=words):
        find_media(tmp_path / source)


def test_frames_of_a_phone_on_its_side_are_turned_as_they_are_shown(tmp_path: Path) -> None:
    exe = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    left_half = torch.zeros(8, 3, 32, 64, dtype=torch.uint8)
    left_half[..., :32] = 200
    write_frames(tmp_path / "lying.mp4", left_half.permute(0, 2, 3, 1).numpy())
    for degrees, bright in ((90, "bottom"), (270, "top"), (180, "right")):
        file = tmp_path / f"{degrees}.mp4"
        command = [exe, "-loglevel", "error", "-display_rotation", str(degrees), "-i", tmp_path / "lying.mp4"]
        subprocess.run(list(map(str, [*command, "-c", "copy", file])), check=True)
        size = (32, 64) if degrees == 180 else (64, 32)
        frame = _read(file, Clips(5, 8.0, (size,)))[:, 0].float().mean(dim=0)
        levels = {"top": frame[:16], "bottom": frame[-16:], "left": frame[:, :16], "right": frame[:, -16:]}
        assert max(levels, key=lambda side: float(levels[side].mean())) == bright
        assert levels[bright].mean() == pytest.approx(200, abs=8)  # MPEG-4 is lossy
        assert read_sample(file).shape[-2:] == size


_CONTAINERS = [("mp4", "mpeg4"), ("mkv", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")]


@pytest.mark.parametrize(("kind", "codec"), _CONTAINERS)
@pytest.mark.parametrize("rates", ["16:16", "24:24", "24000/1001:24", "30000/1001:30", "30:16", "25:16", "8:24"])
@pytest.mark.parametrize("offset", [0, 0.37])
def test_the_same_frames_as_with_ffmpeg(kind: str, codec: str, rates: str, offset: float, tmp_path: Path) -> None:
    exe = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    given, wanted = rates.split(":")
    levels = "color=gray:s=32x32:d=1,geq=lum='16+8*N':cb=128:cr=128,format=yuv420p"
    file = tmp_path / f"a.{kind}"
    made = [exe, "-loglevel", "error", "-f", "lavfi", "-i", levels.replace(":d=1", f":r={given}:d=1"), "-c:v", codec]
    made += ["-b:v", "2M", "-output_ts_offset", str(offset), str(file)]
    subprocess.run(made, check=True)
    start = ["-i", str(file), "-vf", f"setpts=PTS-STARTPTS,fps={wanted}", "-frames:v", "12"]
    shown = [exe, "-loglevel", "error", *start, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(shown, check=True, capture_output=True).stdout
    expected = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 32 * 32 * 3).float().mean(dim=1)
    found = _read(file, Clips(12, float(wanted), ((32, 32),))).float().mean(dim=(0, 2, 3))
    assert found.tolist() == pytest.approx(expected.tolist(), abs=3)  # one frame is 9 levels


def test_what_is_made_up_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, fps, size in (("slow", 4, (40, 48)), ("small", 8, (16, 48)), ("good", 8, (40, 48))):
        write_video(tmp_path / "a" / f"{name}.mp4", fps=fps, size=size)
        (tmp_path / "a" / f"{name}.txt").write_text("a ball")
    pipe = wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    encode_folder(pipe, str(tmp_path / "model"), tmp_path / "a", tmp_path / "cache", replace(CLIP, upscale=True))
    assert "1 of 3 files have too few frames; some are repeated" in caplog.text
    assert "1 of 3 files have too few pixels; they are enlarged" in caplog.text


@pytest.mark.parametrize("flag", ["hflip", "vflip"])
def test_mirrored_frames_and_pixels_that_are_not_square_are_as_they_are_shown(flag: str, tmp_path: Path) -> None:
    exe = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    top_left = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    top_left[:, :, :16, :16] = 200
    write_frames(tmp_path / "stored.mp4", top_left.permute(0, 2, 3, 1).numpy())
    command = [exe, "-loglevel", "error", f"-display_{flag}", "-i", tmp_path / "stored.mp4", "-c", "copy"]
    command += ["-aspect", "2:1", tmp_path / "shown.mp4"]
    subprocess.run(list(map(str, command)), check=True)
    for frame in (
        _read(tmp_path / "shown.mp4", Clips(5, 8.0, ((32, 64), (64, 32), (32, 32))))[:, 0],
        read_sample(tmp_path / "shown.mp4")[0],
    ):
        assert frame.shape == (3, 32, 64)
        bright = frame[:, :16, 32:] if flag == "hflip" else frame[:, 16:, :32]
        assert bright.float().mean() == pytest.approx(200, abs=8)
        assert frame.float().mean() == pytest.approx(50, abs=8)


def test_captioned_media_that_is_left_out_is_told(
    tmp_path: Path, video: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for suffix in (".m4v", ".ts", ".MPG", ".wmv", ".flv", ".rm"):
        (folder / f"a{suffix[1:]}{suffix}").write_bytes(video)
        (folder / f"a{suffix[1:]}.txt").write_text("a ball")
    assert set(_captions(folder)) == {"am4v.m4v", "ats.ts", "aMPG.MPG", "awmv.wmv", "aflv.flv"}
    assert "1 captions in" in caplog.text and "such as arm.txt" in caplog.text
    shard = _write_shard(tmp_path / "0.tar", {"a.mp4": video, "a.txt": b"red", "clip.0001.mp4": video})
    with tarfile.open(shard, "a") as archive:
        archive.addfile(tarfile.TarInfo("a.mp4"))
    found = _captions(shard)
    assert found.pop("0.tar/a.mp4") == "red"
    assert [problem.split(" a dot")[0] for problem in found.values()] == [
        "its name has",
        "an earlier member has the same name",
    ]


def test_grey_of_16_bits_keeps_its_level(tmp_path: Path) -> None:
    Image.fromarray(np.full((32, 32), 127 * 257, dtype=np.uint16)).save(tmp_path / "grey.png")
    assert _read(tmp_path / "grey.png", IMAGE).unique().tolist() == [127]
    assert read_sample(tmp_path / "grey.png").unique().tolist() == [127]


def test_what_is_transparent_is_laid_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (32, 32), (200, 0, 0, 0)).save(tmp_path / "clear.png")
    assert _read(tmp_path / "clear.png", IMAGE).unique().tolist() == [255]
    assert read_sample(tmp_path / "clear.png").unique().tolist() == [255]
