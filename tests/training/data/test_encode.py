import shutil
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXImageToVideoPipeline, WanImageToVideoPipeline
from torch.utils.data import DataLoader

from mhla_diffusers import apply_mhla
from mhla_diffusers.families import get_family
from mhla_diffusers.files import read_checked_json, write_checked_json
from mhla_diffusers.training import train
from mhla_diffusers.training.data.batches import NoisedBatches
from mhla_diffusers.training.data.cache import CacheIndex, CacheWriter, LatentCache
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.encode import encode_folder, model_header, synthesize
from mhla_diffusers.training.data.media import Media, read_clips
from mhla_diffusers.training.data.summary import summarize
from mhla_diffusers.training.finetune import NamedRun

from ...families.cases import case_of, wan_components
from ...models import wan_i2v
from ...pipelines import quiet
from ...refusals import refused
from ..models import settings, tiny_wan, wan_data
from ..pipelines import dit_pipeline, sana_pipeline, wan_pipeline, write_image, write_video

WAN_CLIP = Clips(frames=5, fps=8.0, sizes=((32, 32),))
IMAGE_CLIP = Clips(frames=1, fps=1.0, sizes=((16, 16),))
HEADER = {"family": "wan", "vae": "vae", "text_encoder": "text", "settings": {}}


def _saved(pipe: Any, folder: Path) -> tuple[Any, str]:
    pipe.save_pretrained(folder / "model")
    return pipe, str(folder / "model")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    return _saved(wan_pipeline(), tmp_path_factory.mktemp("wan"))


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for index in range(4):
        write_video(folder / f"{index}.mp4")
        (folder / f"{index}.txt").write_text("a red ball moves")
    (folder / "2.mp4").write_bytes(b"")
    return folder


def test_videos_become_samples_that_train(wan: tuple[Any, str], videos: Path, tmp_path: Path) -> None:
    """Their latents are those that the pipeline decodes, whoever reads the files, and however often it stops."""
    pipe, model = wan
    (videos / "3.mp4").rename(tmp_path / "3.mp4")
    encode_folder(pipe, model, videos, tmp_path / "cache-1", WAN_CLIP)
    (tmp_path / "3.mp4").rename(videos / "3.mp4")
    caches = []
    for workers in (1, 2):
        index = encode_folder(pipe, model, videos, tmp_path / f"cache-{workers}", WAN_CLIP, workers=workers)
        assert [sample.source for sample in index.samples] == ["0.mp4", "1.mp4", "3.mp4"]
        assert index.skipped.keys() == {"2.mp4"}
        caches.append(LatentCache(tmp_path / f"cache-{workers}"))
    alone, several = caches
    for index in range(3):
        assert torch.equal(alone[index]["latents"], several[index]["latents"])
    (clip,) = read_clips(Media(videos / "1.mp4", "1.mp4"), WAN_CLIP)
    pixels = clip.pixels[None].float() / 127.5 - 1
    with torch.no_grad():
        raw = pipe.vae.encode(pixels).latent_dist.mode()[0]
    assert torch.allclose(alone[1]["latents"] * 0.5 + 0.1, raw, atol=1e-5)
    assert alone.shapes == [(4, 2, 4, 4)] * 3
    assert alone[0]["encoder_hidden_states"].shape == (512, 8)
    assert train(wan_pipeline().transformer, alone, settings(tmp_path / "run", 2, prompt_dropout=0.5)).finished


def test_what_has_changed_is_encoded_again_and_nothing_else(
    wan: tuple[Any, str], videos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A caption, a video, and a file that was skipped; of the sample that stays not a bit changes."""
    pipe, model = wan
    encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    before = LatentCache(tmp_path / "cache")
    kept, texts = before[2], [before[index]["encoder_hidden_states"] for index in range(3)]
    (videos / "0.txt").write_text("a blue ball")
    for name in ("1", "2"):
        write_video(videos / f"{name}.mp4", frames=6 + int(name), fps=4)
    index = encode_folder(pipe, model, videos, tmp_path / "cache", Clips(5, 8.0, ((32, 32),)))
    cache = LatentCache(tmp_path / "cache")
    found = {sample.source: (sample.caption, cache[place]) for place, sample in enumerate(index.samples)}
    assert found.keys() == {f"{name}.mp4" for name in range(4)} and not index.skipped
    assert torch.equal(found["3.mp4"][1]["latents"], kept["latents"])
    assert found["0.mp4"][0] == "a blue ball"
    assert not torch.equal(found["0.mp4"][1]["encoder_hidden_states"], texts[0])
    assert not torch.equal(found["1.mp4"][1]["latents"], kept["latents"])
    assert "3 files or captions have changed" in caplog.text
    encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    assert CacheIndex.read(tmp_path / "cache").samples == index.samples


def test_a_cache_notices_other_weights_and_removes_samples_that_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, model = _saved(wan_pipeline(), tmp_path)
    for prompts in (["a cube", "a ball"], ["a cube"]):
        synthesize(pipe, model, prompts, tmp_path / "cache", WAN_CLIP, steps=1)
    assert "1 files or captions are gone, and so are their samples, such as 1: a ball" in caplog.text
    assert [sample.caption for sample in LatentCache(tmp_path / "cache").samples] == ["a cube"]
    with refused("0: a cube", "another folder"):
        synthesize(pipe, model, ["a ball"], tmp_path / "cache", WAN_CLIP, steps=1)
    next(pipe.vae.parameters()).data.add_(1)
    pipe.save_pretrained(model)
    with refused("weights='", "', not '"):
        synthesize(pipe, model, ["a cube"], tmp_path / "cache", WAN_CLIP, steps=1)


def test_videos_become_samples_of_image_to_video_that_train(videos: Path, tmp_path: Path) -> None:
    """Every clip with its own first frame, which stays where the prompt is dropped."""
    pytest.importorskip("ftfy")
    components = wan_components(flow_shift=5.0, image_channels=8)
    pipe, model = _saved(quiet(WanImageToVideoPipeline(transformer=wan_i2v(), **components)), tmp_path)
    encode_folder(pipe, model, videos, tmp_path / "cache", replace(WAN_CLIP, extract="chunk"))
    cache = LatentCache(tmp_path / "cache")
    assert cache.shapes == [(36, 2, 4, 4)] * 6
    assert cache[0]["encoder_hidden_states_image"].shape == (5, 8)
    assert not torch.equal(cache[0]["encoder_hidden_states_image"], cache[1]["encoder_hidden_states_image"])
    assert cache.empty is not None and cache.empty.keys() == {"encoder_hidden_states"}
    assert train(pipe.transformer, cache, settings(tmp_path / "run", steps=2, prompt_dropout=0.5)).finished


@pytest.mark.parametrize(
    ("make", "clip", "shape"),
    [
        (wan_pipeline, WAN_CLIP, (4, 2, 4, 4)),
        (sana_pipeline, Clips(1, 1.0, ((32, 32),)), (4, 16, 16)),
        (dit_pipeline, Clips(1, 1.0, ((16, 16),)), (4, 8, 8)),
    ],
)
def test_synthesized_latents_train(
    make: Callable[[], Any], clip: Clips, shape: tuple[int, ...], tmp_path: Path
) -> None:
    pipe, model = _saved(make(), tmp_path)
    prompts = ["3", "dog"] if make is dit_pipeline else ["a red ball", "a blue ball moves"]
    for count in (1, 2):
        synthesize(pipe, model, prompts[:count], tmp_path / "cache", clip, steps=2)
    cache = LatentCache(tmp_path / "cache")
    assert cache.shapes == [shape] * 2
    assert all(cache[index]["latents"].isfinite().all() for index in range(2))
    assert train(pipe.transformer, cache, settings(tmp_path / "run", steps=2, prompt_dropout=0.5)).finished


@pytest.mark.parametrize("make", [sana_pipeline, dit_pipeline])
def test_images_become_samples(make: Callable[[], Any], tmp_path: Path) -> None:
    pipe, model = _saved(make(), tmp_path)
    (tmp_path / "images").mkdir()
    for name in ("a", "b"):
        write_image(tmp_path / "images" / f"{name}.png")
        (tmp_path / "images" / f"{name}.txt").write_text("3" if make is dit_pipeline else "a red ball")
    encode_folder(pipe, model, tmp_path / "images", tmp_path / "cache", IMAGE_CLIP)
    assert LatentCache(tmp_path / "cache").shapes == [(4, 8, 8)] * 2


def test_cache_of_another_model_or_clip_is_refused(wan: tuple[Any, str], videos: Path, tmp_path: Path) -> None:
    pipe, model = wan
    encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    cache, (other, name) = LatentCache(tmp_path / "cache"), _saved(wan_pipeline(latent_channels=8), tmp_path)
    copied = shutil.copytree(model, tmp_path / "copied")
    cache.check_made_for(str(copied), header := model_header(str(copied), get_family(other.transformer)))
    cache.check_cut_as(Clips(5, 8.0, ((64, 32), (32, 32))))
    nine, eight_channels = Clips(9, 8.0, ((32, 32),)), model_header(name, get_family(other.transformer))
    with refused("vae='", name):
        cache.check_made_for(name, eight_channels)
    with refused("frames=[5]", "frames=[9]"):
        cache.check_cut_as(nine)
    with refused("fps=8.0", "fps=16.0"):
        cache.check_cut_as(Clips(5, 16.0, ((32, 32),)))
    with refused("sizes=[[32, 32]]", "[[64, 32]]"):
        cache.check_cut_as(Clips(5, 8.0, ((64, 32),)))
    with refused("frames=[5]", "[9]"):
        encode_folder(pipe, model, videos, tmp_path / "cache", nine)
    for part in ("vae", "text_encoder"):
        _flipped(next((copied / part).glob("*.safetensors")))
        changed = model_header(str(copied), get_family(other.transformer))
        with refused(f"{part}_weights='", "mhla encode"):
            cache.check_made_for(str(copied), changed)
        cache.index.header[f"{part}_weights"] = None  # of the Hub
    cache.check_made_for(str(copied), header)


@pytest.mark.parametrize(
    ("make", "clip", "prompts", "guidance", "named"),
    [
        (wan_pipeline, Clips(5, 8.0, ((36, 32),)), ["dog"], 5.0, "36x32 .* 16; .* 32x32"),
        (wan_pipeline, Clips(6, 8.0, ((32, 32),)), ["dog"], 5.0, "frames=6 .* 4; .* 5"),
        (dit_pipeline, Clips(1, 1.0, ((16, 32),)), ["dog"], 5.0, "16x32"),
        (dit_pipeline, Clips(5, 8.0, ((16, 16),)), ["dog"], 5.0, "frames=5 .* 1"),
        (wan_pipeline, Clips(5, 8.0, ((32, 32), (32, 48))), ["dog"], 5.0, r"\(32, 48\)\)"),
        (wan_pipeline, WAN_CLIP, ["a ball", " "], 5.0, "number 1"),
        (wan_pipeline, WAN_CLIP, [], 5.0, "none given"),
        (lambda: apply_mhla(wan_pipeline(), blocks=(2, 2, 2)), WAN_CLIP, ["dog"], 5.0, "patched"),
        (dit_pipeline, WAN_CLIP, ["dog", "horse"], 5.0, "'horse'.*cat, dog, house cat"),
        *((dit_pipeline, IMAGE_CLIP, ["dog"], guidance, f"guidance={guidance}") for guidance in (inf, nan, -5.0)),
    ],
)
def test_what_cannot_be_synthesized_is_refused(make, clip, prompts, guidance, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        synthesize(make(), "unused", prompts, tmp_path / "cache", clip, guidance=guidance)
    assert not (tmp_path / "cache").exists()


def test_latents_that_are_not_finite_are_told_by_their_file_or_prompt(tmp_path, monkeypatch):
    pipe, model = _saved(dit_pipeline(), tmp_path)
    write_image(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "a.txt").write_text("dog")
    encoded = torch.full((1, 4, 8, 8), nan)
    monkeypatch.setattr(type(get_family(pipe.transformer).training), "encode_pixels", lambda *_: encoded)
    next(pipe.transformer.parameters()).data.fill_(nan)
    images, cache = tmp_path / "images", tmp_path / "cache"
    with refused("finite ", "'a.png'"):
        encode_folder(pipe, model, images, cache, IMAGE_CLIP)
    with refused("finite ", "'dog'"):
        synthesize(pipe, model, ["dog"], tmp_path / "made", IMAGE_CLIP, steps=1)


def test_captions_that_are_no_class_are_refused(tmp_path: Path) -> None:
    pipe, model = _saved(dit_pipeline(), tmp_path)
    for name, caption in (("a", "dog"), ("b", "horse")):
        write_image(tmp_path / "images" / f"{name}.png")
        (tmp_path / "images" / f"{name}.txt").write_text(caption)
    with refused("b.png ", "'horse'"):
        encode_folder(pipe, model, tmp_path / "images", tmp_path / "cache", IMAGE_CLIP)
    assert not (tmp_path / "cache").exists()


def test_text_and_image_to_video_of_one_transformer_are_encoded_to_folders_of_their_own(
    videos: Path, tmp_path: Path
) -> None:
    """The pipeline alone tells them apart; else a folder's samples would be kept as they were."""
    pipe, model = _saved(case_of("ltx").pipeline(), tmp_path)
    shown = quiet(LTXImageToVideoPipeline(**pipe.components))

    def encode(of: Any, folder: str, frames: int = 5) -> Any:
        return encode_folder(of, model, videos, tmp_path / folder, Clips(frames, 8.0, ((32, 32),)))

    encode(pipe, "text")
    encode(shown, "image")
    assert len(encode(shown, "image").samples) == 3
    shown.save_pretrained(tmp_path / "shown")
    config = settings(tmp_path, model=model, data=str(tmp_path / "text"))
    assert NamedRun(config).is_encoded
    with refused("begins_with_picture=None, ", "True"):
        encode(shown, "text")
    with refused("begins_with_picture=True, ", "None"):
        encode(pipe, "image")
    with refused("frames=1"):
        encode(shown, "picture", frames=1)
    with refused("image-to-video"):
        NamedRun(replace(config, data=str(tmp_path / "image")))
    with refused("text-to-video"):
        NamedRun(replace(config, model=str(tmp_path / "shown")))


def test_killed_writer_leaves_a_good_cache_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path, HEADER, shard_bytes=100)
    for index in range(3):
        writer.add(str(index), "caption", {"latents": torch.full((4, 4, 4), float(index))})
    writer.add("lost", "caption", {"latents": torch.zeros(2)})
    again = CacheWriter(tmp_path, HEADER, shard_bytes=100)
    assert [sample.source for sample in again.index.samples] == ["0", "1", "2"]
    again.add("3", "caption", {"latents": torch.full((4, 4, 4), 3.0)})
    again.flush()
    cache = LatentCache(tmp_path)
    assert [float(cache[index]["latents"][0, 0, 0]) for index in range(4)] == [0, 1, 2, 3]
    shard, index = tmp_path / "shard-00001.safetensors", tmp_path / "index.json"
    shard.unlink()
    with refused(shard.name, "mhla encode", error=FileNotFoundError):
        LatentCache(tmp_path)
    write_checked_json({**read_checked_json(index), "format_version": 9}, index)
    with refused("version 9"):
        LatentCache(tmp_path)
    index.unlink()
    with refused(index.name, error=FileNotFoundError):
        LatentCache(tmp_path)


def test_a_first_attempt_that_made_no_sample_binds_nobody(wan: tuple[Any, str], videos: Path, tmp_path: Path) -> None:
    pipe, model = wan
    with refused(" 4 "):
        encode_folder(pipe, model, videos, tmp_path / "cache", Clips(49, 8.0, ((32, 32),)))
    index = encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    assert len(index.samples) == 3 and index.header["settings"]["frames"] == [5]
    assert len(LatentCache(tmp_path / "cache")) == 3


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_an_encoding_that_was_stopped_before_its_first_samples_is_told(tmp_path: Path) -> None:
    _small_cache(tmp_path, 0)
    for read in (LatentCache, summarize):
        with pytest.raises(ValueError, match=rf"{tmp_path} holds no samples.* mhla encode .* goes on"):
            read(tmp_path)


def _small_cache(folder: Path, count: int) -> None:
    writer, data = CacheWriter(folder, HEADER), wan_data(count)
    assert data.empty is not None
    writer.set_empty(data.empty)
    for number in range(count):
        writer.add(str(number), "caption", data[number])
    if count:
        writer.flush()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["shard-00000.safetensors", "empty.safetensors"])
@pytest.mark.parametrize("harm", [_flipped, lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_damage_of_a_cache_is_named(harm: Callable[[Path], object], name: str, workers: int, tmp_path: Path) -> None:
    """Also where another process reads."""
    _small_cache(tmp_path, 2)

    def batch() -> object:
        config, process = settings(tmp_path, workers=workers), get_family(tiny_wan()).training.process(tiny_wan(), 3.0)
        return next(NoisedBatches(LatentCache(tmp_path), process, config, torch.device("cpu")).from_step(0))

    batch()
    harm(tmp_path / name)
    with refused(f"{tmp_path / name} ", f"{tmp_path} ", "mhla encode"):
        batch()
    _small_cache(tmp_path, 2)  # writes an empty prompt that was damaged anew
    if name == "empty.safetensors":
        batch()


def test_a_shard_is_hashed_once_however_many_processes_read_it(tmp_path: Path) -> None:
    _small_cache(tmp_path, 3)
    cache = LatentCache(tmp_path)
    list(DataLoader(cache, batch_size=None, num_workers=1))  # type: ignore[arg-type]
    _flipped(tmp_path / "shard-00000.safetensors")
    cache[0]  # was compared in the worker
