"""Clips of several lengths and places, their buckets, and data of several sources."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers.families import get_family
from mhla_diffusers.generation.pixels import UnreadableMediaError
from mhla_diffusers.training import train
from mhla_diffusers.training.data.batches import BatchOrder
from mhla_diffusers.training.data.cache import CacheIndex, LatentCache
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.encode import encode_folder
from mhla_diffusers.training.data.media import Media, read_clips
from mhla_diffusers.training.data.sources import Source, Sources, read_sources
from mhla_diffusers.training.data.summary import DataModel, summarize, summarize_cache

from ...models import wan
from ...refusals import refused
from ..models import settings, tiny_dit
from ..pipelines import wan_pipeline, write_image, write_video

CLIPS = Clips((1, 5), 8.0, ((32, 32),), "chunk")
OTHER_CLIP = "sources: [{path: a}]\nclip: {fps: 8, frames: 5, "


def _read(file: Path, clips: Clips) -> list[tuple[float, int, float]]:
    """Start, length and the grey level of the first frame of every clip."""
    found = [(clip.start, clip.bucket[0], clip.pixels[:, 0].float().mean()) for clip in read_clips(_media(file), clips)]
    return [(start, length, round(float(level) / 10)) for start, length, level in found]


def _media(file: Path) -> Media:
    return Media(file, file.name)


def test_clips_begin_where_the_settings_say_with_every_length_that_is_left(tmp_path: Path) -> None:
    """Frame i of the video has level 10 i."""
    write_video(tmp_path / "a.mp4", frames=12, fps=8)
    for clips, expected in (
        (replace(CLIPS, extract="head"), [(0, 1), (0, 5)]),
        (CLIPS, [(0, 1), (0, 5), (5, 1), (5, 5), (10, 1)]),
        (replace(CLIPS, extract="all", stride=4), [(0, 1), (0, 5), (4, 1), (4, 5), (8, 1)]),
        (replace(CLIPS, extract="all", stride=7), [(0, 1), (0, 5), (7, 1), (7, 5)]),
        (replace(CLIPS, extract="uniform", count=3), [(0, 1), (0, 5), (6, 1), (4, 5), (11, 1), (7, 5)]),
    ):
        wanted = sorted((first / 8, length, first) for first, length in expected)
        assert sorted(_read(tmp_path / "a.mp4", clips)) == wanted
    assert _read(tmp_path / "a.mp4", replace(CLIPS, fps=4.0)) == [(0, 1, 0), (0, 5, 0), (1.25, 1, 10)]
    with pytest.raises(UnreadableMediaError):
        _read(tmp_path / "a.mp4", replace(CLIPS, frames=(13, 25)))


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "mpg"])
@pytest.mark.parametrize(("rate", "fps"), [(25, 8.0), (24, 24.0), (30, 16.0)])
def test_even_clips_reach_the_end_whatever_the_container(suffix: str, rate: int, fps: float, tmp_path: Path) -> None:
    write_video(tmp_path / f"a.{suffix}", frames=25, fps=rate)
    clips = list(read_clips(_media(tmp_path / f"a.{suffix}"), Clips(3, fps, ((32, 32),), "uniform", count=3)))
    whole = sum(1 for _ in read_clips(_media(tmp_path / f"a.{suffix}"), Clips(1, fps, ((32, 32),), "chunk")))
    assert [clip.start for clip in clips][:1] == [0.0] and len(clips) == 3
    assert whole - 2 <= clips[-1].start * fps + 3 <= whole


def test_automatic_sizes_have_one_area_and_sides_for_the_model() -> None:
    model = wan(num_layers=1)
    strides = {"scale_factor_temporal": 4, "scale_factor_spatial": 8}
    clips = Clips(81, 16.0, "auto").fitted(get_family(model), model, strides, False)
    assert clips.sizes[:2] == ((480, 832), (832, 480))
    for height, width in clips.sizes:
        assert height % 16 == width % 16 == 0 and 0.9 < height * width / (480 * 832) < 1.1
    aspects = [width / height for height, width in clips.sizes]
    for shape in ((1080, 1920), (1920, 1080), (1000, 1000), (480, 640), (3000, 2000), (1080, 2560)):
        size = clips.size_for(*shape)
        assert size[1] / size[0] == pytest.approx(shape[1] / shape[0], rel=0.06) and size[1] / size[0] in aspects
    small = Clips(81, 16.0, "auto 240x416").fitted(get_family(model), model, strides, False)
    assert small.sizes[0] == (240, 416)
    square = Clips(1, 1.0, "auto").fitted(get_family(tiny_dit()), tiny_dit(), {"scale_factor_spatial": 8}, False)
    assert square.sizes == ((256, 256),)
    with refused("auto"):
        Clips(1, 1.0, "auto").size_for(64, 64)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("sources: [{path: a, share: 1}, {path: b}]", "sources.*1.0, None"),
        ("sources: [{path: a}, {path: a}]", "sources.1.path"),
        ("sources: [{path: a, share: 1, repeats: 2}]", "share=1.0 .* repeats=2"),
        ("sources: [{path: a, missing_captions: ignore}]", "'ignore'"),
        ("sources: [{path: a, share: 0}]", "sources.0.share=0"),
        (OTHER_CLIP + "sizes: automatic}", "sizes='automatic'"),
        (OTHER_CLIP.replace("5", "[1, 0]") + "sizes: [[32, 32]]}", "frames.1=0"),
        (OTHER_CLIP + "sizes: [[32, 32]], extract: uniform}", "count=None"),
        (OTHER_CLIP + "sizes: [[32, 32]], stride: 4}", "stride=4"),
        (OTHER_CLIP + "sizes: [[32, 32]], extract: chunks}", "'chunks'.*'chunk'"),
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
        f"""clip: {{frames: [1, 5], fps: 8, sizes: [[32, 32], [64, 32]], extract: chunk}}
sources:
  - {{path: {tmp_path / "videos"}, share: 3, prefix: "video: "}}
  - {{path: {tmp_path / "pictures"}, share: 1, missing_captions: empty, prefix: "art: "}}
"""
    )
    return file


def test_sources_make_one_cache_that_is_gone_on_with_in_the_middle_of_a_video(sources: Path, tmp_path: Path) -> None:
    pipe, model = wan_pipeline(), str(tmp_path / "model")
    pipe.save_pretrained(model)
    for workers in (1, 2):
        encode_folder(pipe, model, sources, tmp_path / f"cache-{workers}", workers=workers)
    index = CacheIndex.read(tmp_path / "cache-1")
    assert CacheIndex.read(tmp_path / "cache-2").samples == index.samples
    videos, pictures = tmp_path / "videos", tmp_path / "pictures"
    found = [(Path(one.source).name, one.bucket, one.start, one.caption) for one in index.samples]
    assert found == [
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
    assert list(index.skipped) == [f"{videos}/small.mp4"] and "enlarged 2 times" in index.skipped[f"{videos}/small.mp4"]

    before, after = summarize(sources, model=model), summarize_cache(index, DataModel(model))
    tables = [str(summary).split("\n\n", 1)[1] for summary in (before, after)]
    assert tables[0] == tables[1]
    for line in ("32x32 5 1 2 ", "videos 8 75%", "pictures 3 25%"):
        assert line in " ".join(tables[0].split())
    assert "5 of 6 files are used, as 11 clips" in str(after) and "4 files share theirs" in str(after)

    # shares of 3 to 1 from eight clips and three pictures; the last samples, which are held out, are of both
    cache = LatentCache(tmp_path / "cache-1")
    order = BatchOrder(cache.shapes, 1, 0, cache.weights)
    drawn = Counter(cache.samples[order[step][0]].origin for step in range(order.batches_per_epoch))
    assert drawn[str(videos)] / drawn[str(pictures)] == pytest.approx(3, rel=0.15)
    assert {sample.origin for sample in cache.samples[-3:]} == {str(videos), str(pictures)}
    assert train(wan_pipeline().transformer, cache, settings(tmp_path / "run", 6, batch_size=2)).finished

    # stopped after the third clip of a video; what is there is kept
    training, count = type(get_family(pipe.transformer).training), 0
    encode = training.encode_pixels

    def encode_three(*arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return encode(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "encode_pixels", encode_three)
        with pytest.raises(KeyboardInterrupt):
            encode_folder(pipe, model, sources, tmp_path / "stopped")
        assert len(CacheIndex.read(tmp_path / "stopped").samples) == 3
        encode_folder(pipe, model, sources, tmp_path / "stopped")
        assert count == 4 + len(index.samples) - 3
    again = LatentCache(tmp_path / "stopped")
    key = [(one.source, one.bucket, one.start, one.caption) for one in again.samples]
    assert key == [(one.source, one.bucket, one.start, one.caption) for one in cache.samples]
    assert all(torch.equal(again[place]["latents"], cache[place]["latents"]) for place in range(len(cache)))

    # another share needs no encoding
    sources.write_text(sources.read_text().replace("share: 3", "share: 1"))
    encode_folder(pipe, model, sources, tmp_path / "cache-1")
    assert LatentCache(tmp_path / "cache-1").weights == pytest.approx(
        [1.0 if "videos" in one.origin else 8 / 3 for one in cache.samples]
    )


def test_a_missing_caption_raises_is_left_out_or_encoded_empty(sources: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "pictures")
    sources_with_error = Sources((Source(folder),))
    with refused("1 of 3 ", " c.png"):
        sources_with_error.check_captions(sources_with_error.media())
    left_out = Sources((Source(folder, missing_captions="skip", prefix="art: "),)).media()
    assert [(item.caption, bool(item.problem)) for item in left_out] == [
        ("art: a cube", False),
        ("art: a cube", False),
        ("", True),
    ]
    empty = Sources((Source(folder, missing_captions="empty", prefix="art: "),)).media()
    assert (empty[2].caption, empty[2].problem) == ("art:", None)
