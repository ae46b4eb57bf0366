"""Clips of several lengths and places, their buckets, and data of several sources."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mhla_diffusers.training import train
from mhla_diffusers.training.data.batches import BatchOrder
from mhla_diffusers.training.data.cache import LatentCache
from mhla_diffusers.training.data.clips import Clips, auto_sizes
from mhla_diffusers.training.data.encode import encode_folder
from mhla_diffusers.training.data.media import ClipRead, Media, read_clips
from mhla_diffusers.training.data.model import DataModel
from mhla_diffusers.training.data.sources import read_sources
from mhla_diffusers.training.data.summary import summarize

from ...refusals import refused
from ..models import settings
from ..pipelines import wan_pipeline, write_image, write_video

CLIPS = Clips((1, 5), 8.0, ((32, 32),), stride=5)
OTHER_CLIP = "sources: [{path: a}]\nclip: {fps: 8, frames: 5, "


def _read(file: Path, clips: Clips) -> list[tuple[float, int, float]]:
    """Start, length and the grey level of the first frame of every clip."""
    read = [clip for clip in read_clips(_media(file), clips) if isinstance(clip, ClipRead)]
    found = [(clip.start, clip.bucket[0], clip.pixels[:, 0].float().mean()) for clip in read]
    return [(start, length, round(float(level) / 10)) for start, length, level in found]


def _media(file: Path) -> Media:
    return Media(file, file.name)


def test_clips_begin_where_the_settings_say_with_every_length_that_is_left(tmp_path: Path) -> None:
    """Frame i of the video has level 10 i."""
    write_video(tmp_path / "a.mp4", frames=12, fps=8)
    for clips, expected in (
        (replace(CLIPS, stride=None), [(0, 1), (0, 5)]),
        (CLIPS, [(0, 1), (0, 5), (5, 1), (5, 5), (10, 1)]),
        (replace(CLIPS, stride=4), [(0, 1), (0, 5), (4, 1), (4, 5), (8, 1)]),
        (replace(CLIPS, stride=7), [(0, 1), (0, 5), (7, 1), (7, 5)]),
    ):
        wanted = sorted((first / 8, length, first) for first, length in expected)
        assert sorted(_read(tmp_path / "a.mp4", clips)) == wanted
    assert _read(tmp_path / "a.mp4", replace(CLIPS, fps=4.0)) == [(0, 1, 0), (0, 5, 0), (1.25, 1, 10)]
    assert _read(tmp_path / "a.mp4", replace(CLIPS, frames=(13, 25))) == []


def test_automatic_sizes_have_one_area_and_sides_for_the_model() -> None:
    sizes = auto_sizes((480, 832), 16)
    assert sizes[:2] == ((480, 832), (832, 480))
    for height, width in sizes:
        assert height % 16 == width % 16 == 0 and 0.9 < height * width / (480 * 832) < 1.1
    aspects = [width / height for height, width in sizes]
    for shape in ((1080, 1920), (1920, 1080), (1000, 1000), (480, 640), (3000, 2000), (1080, 2560)):
        size = Clips(81, 16.0, sizes).size_for(*shape)
        assert size[1] / size[0] == pytest.approx(shape[1] / shape[0], rel=0.06) and size[1] / size[0] in aspects
    assert DataModel("tiny-wan").fitted(Clips(9, 6.0, "auto 32x64")).sizes[0] == (32, 64)
    assert DataModel("tiny-dit").fitted(Clips(1, 1.0, "auto")).sizes == ((64, 64),)
    with refused("auto"):
        Clips(1, 1.0, "auto").size_for(64, 64)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("sources: [{path: a, share: 1}, {path: b}]", "sources.*1.0, None"),
        ("sources: [{path: a}, {path: a}]", "sources.1.path"),
        ("sources: [{path: a, missing_captions: ignore}]", "'ignore'"),
        ("sources: [{path: a, share: 0}]", "sources.0.share=0"),
        (OTHER_CLIP + "sizes: automatic}", "sizes='automatic'"),
        (OTHER_CLIP.replace("5", "[1, 0]") + "sizes: [[32, 32]]}", "frames.1=0"),
        (OTHER_CLIP + "sizes: [[32, 32]], stride: 0}", "stride=0"),
    ],
)
def test_clips_and_sources_that_are_not_allowed_are_refused(settings, named, tmp_path):
    (tmp_path / "data.yaml").write_text(f"{settings}\n")
    with pytest.raises(ValueError, match=named):
        read_sources(tmp_path / "data.yaml")


def test_samples_are_drawn_by_their_weights() -> None:
    """The same samples in every step however the steps are reached, and every one at least once in an epoch."""
    shapes, weights = [(4, 8, 8)] * 8 + [(4, 4, 16)] * 4, [2.25] * 4 + [1.0] * 8
    order = BatchOrder(shapes, 1, 0, weights)
    epochs = [
        [order[order.batches_per_epoch * epoch + step][0] for step in range(order.batches_per_epoch)]
        for epoch in range(9)
    ]
    for epoch in epochs:
        counts = Counter(epoch)
        assert set(counts) == set(range(12)) and sum(counts[index] for index in range(4)) == 9
        assert all(counts[index] == 1 for index in range(4, 12))
    assert len({max(range(4), key=Counter(epoch).__getitem__) for epoch in epochs}) > 1
    assert BatchOrder(shapes, 1, 0, weights)[30] == order[30]
    equal = BatchOrder(shapes, 2, 0)
    assert [equal[step] for step in range(9)] == [BatchOrder(shapes, 2, 0, [1.0] * 12)[step] for step in range(9)]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two videos of 12 and 7 frames and one that is too small, beside three pictures, one of them without a caption."""
    for name, frames, size in (("long", 12, (40, 48)), ("short", 7, (64, 32)), ("small", 12, (16, 16))):
        write_video(tmp_path / "videos" / f"{name}.mp4", frames=frames, size=size)
        (tmp_path / "videos" / f"{name}.txt").write_text("a ball")
    for name in ("a", "b", "c"):
        write_image(tmp_path / "pictures" / f"{name}.png", (48, 48))
        if name != "c":
            (tmp_path / "pictures" / f"{name}.txt").write_text("a cube")
    file = tmp_path / "data.yaml"
    file.write_text(
        f"""clip: {{frames: [1, 5], fps: 8, sizes: [[32, 32], [64, 32]], stride: 5}}
sources:
  - {{path: {tmp_path / "videos"}, share: 3, prefix: "video: "}}
  - {{path: {tmp_path / "pictures"}, share: 1, missing_captions: empty, prefix: "art: "}}
"""
    )
    return file


def test_sources_make_one_cache(sources: Path, tmp_path: Path) -> None:
    pipe, model = wan_pipeline(), str(tmp_path / "model")
    pipe.save_pretrained(model)
    files = encode_folder(pipe, model, sources, tmp_path / "cache")
    videos, pictures = tmp_path / "videos", tmp_path / "pictures"
    clips = [(file, clip) for file in files for clip in file.clips]
    assert [(Path(file.name).name, clip.bucket, clip.start, file.caption) for file, clip in clips] == [
        ("long.mp4", (1, 32, 32), 0.0, "video: a ball"),
        ("long.mp4", (5, 32, 32), 0.0, "video: a ball"),
        ("long.mp4", (1, 32, 32), 0.625, "video: a ball"),
        ("long.mp4", (5, 32, 32), 0.625, "video: a ball"),
        ("long.mp4", (1, 32, 32), 1.25, "video: a ball"),
        ("short.mp4", (1, 64, 32), 0.0, "video: a ball"),
        ("short.mp4", (5, 64, 32), 0.0, "video: a ball"),
        ("short.mp4", (1, 64, 32), 0.625, "video: a ball"),
        *(
            (f"{name}.png", (1, 32, 32), 0.0, caption)
            for name, caption in (("a", "art: a cube"), ("b", "art: a cube"), ("c", "art:"))
        ),
    ]
    problems = {file.name: file.problem for file in files if file.problem}
    assert list(problems) == [f"{videos}/small.mp4"] and "enlarged 2 times" in problems[f"{videos}/small.mp4"]

    tables = [str(summarize(place, model=model)).split("\n\n", 1)[1] for place in (sources, tmp_path / "cache")]
    assert tables[0] == tables[1]
    for line in ("32x32 5 2 ", "videos 8 75%", "pictures 3 25%"):
        assert line in " ".join(tables[0].split())
    assert "5 of 6 files are used, as 11 clips" in str(summarize(tmp_path / "cache"))

    # shares of 3 to 1 from eight clips and three pictures; the last samples, which are held out, are of both
    cache = LatentCache(tmp_path / "cache")
    order = BatchOrder(cache.shapes, 1, 0, cache.weights)
    drawn = Counter(cache.clips[order[step][0]][0].origin for step in range(order.batches_per_epoch))
    assert drawn[str(videos)] / drawn[str(pictures)] == pytest.approx(3, rel=0.15)
    assert {file.origin for file, _ in cache.clips[-3:]} == {str(videos), str(pictures)}
    assert train(wan_pipeline().transformer, cache, settings(tmp_path / "run", 6, batch_size=2)).finished

    # another share needs no encoding
    sources.write_text(sources.read_text().replace("share: 3", "share: 1"))
    encode_folder(pipe, model, sources, tmp_path / "cache")
    assert LatentCache(tmp_path / "cache").weights == pytest.approx(
        [1.0 if "videos" in file.origin else 8 / 3 for file, _ in cache.clips]
    )
