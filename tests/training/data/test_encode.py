"""Latents of files and prompts: made, resumed, renewed, refused where they do not fit, and told where damaged."""

import shutil
from collections.abc import Callable
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXImageToVideoPipeline, WanImageToVideoPipeline

from mhla_diffusers.families import get_family
from mhla_diffusers.training import train
from mhla_diffusers.training.data.batches import NoisedBatches, batches_from
from mhla_diffusers.training.data.cache import CacheWriter, LatentCache, SourceFile, read_index
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.encode import encode_files, synthesize
from mhla_diffusers.training.data.media import find_media, read_clips
from mhla_diffusers.training.data.model import DataModel
from mhla_diffusers.training.finetune import NamedRun

from ...families.cases import case_of, wan_components
from ...models import wan_i2v
from ...pipelines import quiet
from ...refusals import refused
from ..conftest import Saved
from ..models import settings, tiny_wan, wan_data
from ..pipelines import dit_pipeline, wan_pipeline, write_image, write_video

WAN_CLIP = Clips(frames=(5,), fps=8.0, sizes=((32, 32),))
IMAGE_CLIP = Clips(frames=(1,), fps=1.0, sizes=((16, 16),))


def _saved(pipe: Any, folder: Path) -> Saved:
    pipe.save_pretrained(folder)
    return pipe, DataModel(str(folder))


def _encode(saved: Saved, source: Path, output: Path, clips: Clips = WAN_CLIP) -> list[SourceFile]:
    return encode_files(*saved, source, find_media(source), output, clips)


def _synthesize(saved: Saved, prompts: list[str], output: Path, clips: Clips = WAN_CLIP) -> None:
    files = [SourceFile(f"{number}: {prompt}", prompt) for number, prompt in enumerate(prompts)]
    synthesize(*saved, files, output, clips, steps=1, guidance=5.0, seed=0)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for index in range(4):
        write_video(folder / f"{index}.mp4")
        (folder / f"{index}.txt").write_text("a red ball moves")
    (folder / "2.mp4").write_bytes(b"")
    return folder


def test_videos_become_samples_that_train(wan: Saved, videos: Path, tmp_path: Path) -> None:
    """Their latents are those that the pipeline decodes, however often it stops; an attempt in vain does not count."""
    with refused(" 4 ", "2.mp4: the file is empty"):
        _encode(wan, videos, tmp_path / "cache", Clips(frames=(49,), fps=8.0, sizes=((32, 32),)))
    with refused(str(tmp_path), "no clips", "mhla encode", "resume"):
        LatentCache(tmp_path / "cache")
    (videos / "3.mp4").rename(tmp_path / "3.mp4")
    _encode(wan, videos, tmp_path / "cache")
    (tmp_path / "3.mp4").rename(videos / "3.mp4")
    files = _encode(wan, videos, tmp_path / "cache")
    assert [file.name for file in files if file.clips] == ["0.mp4", "1.mp4", "3.mp4"]
    assert [file.name for file in files if file.problem] == ["2.mp4"]
    cache = LatentCache(tmp_path / "cache")
    (pixels,) = read_clips(videos / "1.mp4", WAN_CLIP)
    with torch.no_grad():
        raw = wan[0].vae.encode(pixels[None].float() / 127.5 - 1).latent_dist.mode()[0]
    assert torch.allclose(cache[1]["latents"] * 0.5 + 0.1, raw, atol=1e-5)
    assert cache.headers[tmp_path / "cache"]["frames"] == [5] and cache.shapes == [(4, 2, 4, 4)] * 3
    assert cache[0]["encoder_hidden_states"].shape == (512, 8)
    assert train(wan_pipeline().transformer, cache, settings(tmp_path / "run", 2, prompt_dropout=0.5)).finished


def test_of_several_captions_training_draws_one_each_time(wan: Saved, videos: Path, tmp_path: Path) -> None:
    """From the seed and the step; the first is validated with."""
    for name in ("1", "2", "3"):
        (videos / f"{name}.mp4").unlink()
    (videos / "0.txt").write_text("a red ball\n\na blue cube moves\n")
    _encode(wan, videos, tmp_path / "cache")
    process = get_family(wan[0].transformer).training.process(wan[0].transformer, 3.0)

    def texts(step: int, **changes: Any) -> list[torch.Tensor]:
        config = settings(tmp_path, batch_size=1, **changes)
        batches = NoisedBatches(LatentCache(tmp_path / "cache"), process, config, torch.device("cpu"))
        return [batch.conditioning["encoder_hidden_states"] for batch in islice(batches.from_step(step), 16)]

    drawn = texts(0)
    assert len({float(text.sum()) for text in drawn}) == 2
    again = texts(8, workers=1)
    assert all(torch.equal(text, other) for text, other in zip(drawn[8:], again, strict=False))
    sample = LatentCache(tmp_path / "cache")[0]
    assert sample.keys() == {"latents", "encoder_hidden_states", "caption-1/encoder_hidden_states"}


def test_what_has_changed_is_encoded_again_and_nothing_else(
    wan: Saved, videos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A caption, a video, and a file that was skipped; of the sample that stays not a bit changes."""
    _encode(wan, videos, tmp_path / "cache")
    before = LatentCache(tmp_path / "cache")
    kept, texts = before[2], [before[index]["encoder_hidden_states"] for index in range(3)]
    (videos / "0.txt").write_text("a blue ball")
    for name in ("1", "2"):
        write_video(videos / f"{name}.mp4", frames=6 + int(name), fps=4)
    files = _encode(wan, videos, tmp_path / "cache")
    cache = LatentCache(tmp_path / "cache")
    captions = {file.name: file.caption for file in files}
    found = dict(zip(captions, (cache[index] for index in range(4)), strict=True))
    assert sorted(found) == [f"{name}.mp4" for name in range(4)] and not any(file.problem for file in files)
    assert len(list((tmp_path / "cache/clips").iterdir())) == 4
    assert torch.equal(found["3.mp4"]["latents"], kept["latents"])
    assert captions["0.mp4"] == "a blue ball"
    assert not torch.equal(found["0.mp4"]["encoder_hidden_states"], texts[0])
    assert not torch.equal(found["1.mp4"]["latents"], kept["latents"])
    assert "3 files or captions have changed" in caplog.text
    assert "4 frames per second, so at 8 some are repeated" in caplog.text
    assert _encode(wan, videos, tmp_path / "cache") == files
    (videos / "0.mp4").unlink()
    assert _encode(wan, videos, tmp_path / "cache") == [file for file in files if file.name != "0.mp4"]
    assert "1 files or captions are gone, and so are their clips, such as 0.mp4" in caplog.text


def test_videos_become_samples_of_image_to_video_that_train(videos: Path, tmp_path: Path) -> None:
    """Every clip with its own first frame, which stays where the prompt is dropped."""
    pytest.importorskip("ftfy")
    components = wan_components(flow_shift=5.0, image_channels=8)
    saved = _saved(quiet(WanImageToVideoPipeline(transformer=wan_i2v(), **components)), tmp_path / "model")
    _encode(saved, videos, tmp_path / "cache", Clips(frames=(5,), fps=8.0, sizes=((32, 32),), stride=5))
    cache = LatentCache(tmp_path / "cache")
    assert cache.shapes == [(36, 2, 4, 4)] * 6
    assert cache[0]["encoder_hidden_states_image"].shape == (5, 8)
    assert not torch.equal(cache[0]["encoder_hidden_states_image"], cache[1]["encoder_hidden_states_image"])
    assert cache.empty is not None and cache.empty.keys() == {"encoder_hidden_states"}
    assert train(saved[0].transformer, cache, settings(tmp_path / "run", steps=2, prompt_dropout=0.5)).finished


@pytest.mark.parametrize(
    ("family", "clip", "shape"),
    [
        ("wan", WAN_CLIP, (4, 2, 4, 4)),
        ("sana", Clips(frames=(1,), fps=1.0, sizes=((32, 32),)), (4, 16, 16)),
        ("dit", IMAGE_CLIP, (4, 8, 8)),
    ],
)
def test_prompts_and_pictures_become_samples_that_train(
    family: str, clip: Clips, shape: tuple[int, ...], saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    pipe, cache = saved(family)[0], tmp_path / "cache"
    prompts = ["3", "dog"] if family == "dit" else ["a red ball", "a blue ball moves"]
    for count in (1, 2):
        _synthesize(saved(family), prompts[:count], cache, clip)
    assert LatentCache(cache).shapes == [shape] * 2
    copy = type(pipe.transformer).from_pretrained(saved(family)[1].name, subfolder="transformer")
    assert train(copy, LatentCache(cache), settings(tmp_path / "run", steps=2, prompt_dropout=0.5)).finished
    if family != "wan":
        write_image(tmp_path / "images" / "a.png")
        (tmp_path / "images/a.txt").write_text(prompts[0])
        _encode(saved(family), tmp_path / "images", tmp_path / "encoded", clip)
        assert LatentCache(tmp_path / "encoded").shapes == [shape]


def test_cache_of_another_model_or_clip_is_refused(wan: Saved, videos: Path, tmp_path: Path) -> None:
    _encode(wan, videos, tmp_path / "cache")
    _, other = _saved(wan_pipeline(latent_channels=8), tmp_path / "model")
    copied = shutil.copytree(wan[1].name, tmp_path / "copied")

    def data_for(name: object) -> LatentCache:
        return NamedRun(settings(tmp_path, model=str(name), data=str(tmp_path / "cache"))).open_data()

    assert len(data_for(copied)) == 3
    with refused("vae='", "', not '"):
        data_for(other.name)
    with refused("frames=[5]", "[9]"):
        _encode(wan, videos, tmp_path / "cache", Clips(frames=(9,), fps=8.0, sizes=((32, 32),)))
    for part in ("vae", "text_encoder"):
        file = next((copied / part).glob("*.safetensors"))
        _flipped(file)
        with refused(f"{part}_weights='", "mhla encode"):
            data_for(copied)
        shutil.copy(Path(wan[1].name, part, file.name), file)
    assert len(data_for(copied)) == 3


@pytest.mark.parametrize(
    ("family", "asked", "named"),
    [
        ("wan", {"sizes": ["36x32"]}, "36x32 .* 16; .* 32x32"),
        ("wan", {"frames": [6]}, "frames=6 .* 4; .* 5"),
        ("wan", {"stride": 0}, "stride=0"),
        ("dit", {"frames": [5]}, "frames=5.* 1"),
    ],
)
def test_clips_that_a_model_cannot_take_are_refused(
    family: str, asked: dict[str, Any], named: str, saved: Callable[[str], Saved]
) -> None:
    with pytest.raises(ValueError, match=named):
        saved(family)[1].clips(**asked)


def test_latents_that_are_not_finite_are_told_by_their_file(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    pipe = dit_pipeline()
    pipe.vae.quant_conv.bias.data.fill_(nan)
    write_image(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "a.txt").write_text("dog")
    with refused("'a.png'", "finite"):
        _encode((pipe, saved("dit")[1]), tmp_path / "images", tmp_path / "cache", IMAGE_CLIP)


def test_text_and_image_to_video_of_one_transformer_are_told_apart(tmp_path: Path) -> None:
    """The pipeline alone tells; else a folder's samples would be kept as they were."""
    pipe, text = _saved(case_of("ltx").pipeline(), tmp_path / "text")
    _, image = _saved(quiet(LTXImageToVideoPipeline(**pipe.components)), tmp_path / "image")
    one, other = text.header({}), image.header({})
    assert [name for name in one if one[name] != other[name]] == ["begins_with_picture"]
    with refused("frames=1"):
        image.clips(frames=[1])


@pytest.mark.parametrize("shares", [(3, 1), (2, 3)])
def test_shares_hold_whatever_the_folders_hold(shares: tuple[float, float], tmp_path: Path) -> None:
    """In one epoch within the noise of drawing; no clip is left out, and those held out are of all folders."""
    caches = []
    for value, counts in enumerate(((60, 30, 20, 10), (10, 30))):  # by number of frames
        writer = CacheWriter(tmp_path / str(value), {"family": "wan"}, [], {"labels": torch.zeros(1)})
        for frames, number in enumerate(counts, start=1):
            sample = {"latents": torch.full((1, frames, 1, 1), float(value))}
            clips = tuple(writer.write(sample, (frames, 16, 16)) for _ in range(number))
            writer.add(SourceFile(str(frames), clips=clips))
        caches.append(str(writer.folder))
    data = LatentCache(dict(zip(caches, shares, strict=True)))
    is_second = [bool(data[index]["latents"].any()) for index in range(len(data))]
    assert sum(is_second) == 40 and sum(is_second[-8:]) == 2
    epoch = islice(batches_from(0, data.shapes, 2, 0, data.weights), int(sum(data.weights) / 2))
    drawn = [index for batch in epoch for index in batch]
    assert sum(is_second[index] for index in drawn) / len(drawn) == pytest.approx(shares[1] / sum(shares), abs=0.02)
    assert len({*drawn}) >= len(data) - 4  # a batch begun of every shape


def _written(folder: Path, count: int, lost: int = 0) -> None:
    """A cache of small samples, or one that goes on, the last ones of which no line of the index names."""
    data = wan_data(count + lost)
    assert data.empty is not None
    files = [SourceFile(str(number)) for number in range(count)]
    writer = CacheWriter(folder, {"family": "wan"}, files, data.empty)
    for file in writer.left:
        clip = writer.write(data[int(file.name)], (5, 32, 32))
        writer.add(SourceFile(file.name, clips=(clip,)))
    for number in range(count, count + lost):
        writer.write(data[number], (5, 32, 32))


def test_killed_writer_leaves_a_good_cache_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    _written(tmp_path, 3, lost=1)
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes() + b'{"name": "half a')
    assert len(LatentCache(tmp_path)) == 3
    with refused("other files", "'0'", "another folder"):
        CacheWriter(tmp_path, {"family": "wan"}, [SourceFile("x")], {})
    _written(tmp_path, 4)
    cache = LatentCache(tmp_path)
    assert [file.name for file in read_index(tmp_path)[1]] == list("0123")
    assert len(list((tmp_path / "clips").iterdir())) == 4
    assert all(torch.equal(cache[place]["latents"], wan_data(5)[place]["latents"]) for place in range(4))
    (tmp_path / "clips/00000001.safetensors").unlink()
    with refused("00000001.safetensors", "mhla encode", error=FileNotFoundError):
        LatentCache(tmp_path)
    version = '"format_version": '
    for harmed in (index.read_text().replace(version, f"{version}1"), "{\n", "", "[]\n"):
        index.write_text(harmed)
        with refused(index, "damaged"):
            LatentCache(tmp_path)
    index.unlink()
    with refused(str(tmp_path), "mhla encode", error=FileNotFoundError):
        LatentCache(tmp_path)


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["clips/00000000.safetensors", "empty.safetensors"])
def test_damage_of_a_cache_is_named(name: str, tmp_path: Path) -> None:
    """Also where another process reads, without its traceback."""
    _written(tmp_path, 2)

    def batch() -> object:
        config, process = settings(tmp_path, workers=1), get_family(tiny_wan()).training.process(tiny_wan(), 3.0)
        return next(NoisedBatches(LatentCache(tmp_path), process, config, torch.device("cpu")).from_step(0))

    batch()
    _flipped(tmp_path / name)
    with refused(f"{tmp_path / name} ", f"{tmp_path} ", "mhla encode") as damaged:
        batch()
    assert "Traceback" not in str(damaged.value)
