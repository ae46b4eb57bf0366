import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXImageToVideoPipeline, WanImageToVideoPipeline

from mhla_diffusers import apply_mhla, remove_mhla
from mhla_diffusers.families import get_family
from mhla_diffusers.training import train
from mhla_diffusers.training.data.batches import NoisedBatches
from mhla_diffusers.training.data.cache import CachedFile, CacheWriter, LatentCache, read_index
from mhla_diffusers.training.data.clips import Clips
from mhla_diffusers.training.data.encode import encode_folder, synthesize
from mhla_diffusers.training.data.media import ClipRead, Media, read_clips
from mhla_diffusers.training.finetune import NamedRun

from ...families.cases import case_of, wan_components
from ...models import wan_i2v
from ...pipelines import quiet
from ...refusals import refused
from ..models import settings, tiny_wan, wan_data
from ..pipelines import dit_pipeline, sana_pipeline, wan_pipeline, write_image, write_video

WAN_CLIP = Clips(frames=5, fps=8.0, sizes=((32, 32),))
IMAGE_CLIP = Clips(frames=1, fps=1.0, sizes=((16, 16),))


def _saved(pipe: Any, folder: Path) -> tuple[Any, str]:
    pipe.save_pretrained(folder / "model")
    if hasattr(pipe, "labels"):  # which the pipeline of the Hub has in its index, and diffusers does not save
        index = folder / "model/model_index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "id2label": {"3": "cat, house cat", "5": "dog"}}))
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
    """Their latents are those that the pipeline decodes, however often it stops."""
    pipe, model = wan
    (videos / "3.mp4").rename(tmp_path / "3.mp4")
    encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    (tmp_path / "3.mp4").rename(videos / "3.mp4")
    files = encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    assert [file.name for file in files if file.clips] == ["0.mp4", "1.mp4", "3.mp4"]
    assert [file.name for file in files if file.problem] == ["2.mp4"]
    alone = LatentCache(tmp_path / "cache")
    (clip,) = read_clips(Media(videos / "1.mp4", "1.mp4"), WAN_CLIP)
    assert isinstance(clip, ClipRead)
    pixels = clip.pixels[None].float() / 127.5 - 1
    with torch.no_grad():
        raw = pipe.vae.encode(pixels).latent_dist.mode()[0]
    assert torch.allclose(alone[1]["latents"] * 0.5 + 0.1, raw, atol=1e-5)
    assert alone.shapes == [(4, 2, 4, 4)] * 3
    assert alone[0]["encoder_hidden_states"].shape == (512, 8)
    assert train(wan_pipeline().transformer, alone, settings(tmp_path / "run", 2, prompt_dropout=0.5)).finished


def test_of_several_captions_training_draws_one_each_time(wan: tuple[Any, str], videos: Path, tmp_path: Path) -> None:
    """From the seed and the step; the first is validated with."""
    pipe, model = wan
    (videos / "0.txt").write_text("a red ball\n\na blue cube moves\n")
    for name in ("1", "2", "3"):
        (videos / f"{name}.mp4").unlink()
        (videos / f"{name}.txt").unlink()
    encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    process = get_family(pipe.transformer).training.process(pipe.transformer, 3.0)

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
    files = encode_folder(pipe, model, videos, tmp_path / "cache", Clips(5, 8.0, ((32, 32),)))
    cache = LatentCache(tmp_path / "cache")
    found = {file.name: (file.caption, cache[place]) for place, (file, _) in enumerate(cache.clips)}
    assert found.keys() == {f"{name}.mp4" for name in range(4)} and not any(file.problem for file in files)
    assert len(list((tmp_path / "cache/clips").iterdir())) == 4
    assert torch.equal(found["3.mp4"][1]["latents"], kept["latents"])
    assert found["0.mp4"][0] == "a blue ball"
    assert not torch.equal(found["0.mp4"][1]["encoder_hidden_states"], texts[0])
    assert not torch.equal(found["1.mp4"][1]["latents"], kept["latents"])
    assert "3 files or captions have changed" in caplog.text
    assert encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP) == files


def test_a_cache_notices_other_weights_and_removes_samples_that_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, model = _saved(wan_pipeline(), tmp_path)
    for prompts in (["a cube", "a ball"], ["a cube"]):
        synthesize(pipe, model, prompts, tmp_path / "cache", WAN_CLIP, steps=1)
    assert "1 files or captions are gone, and so are their clips, such as 1: a ball" in caplog.text
    assert [file.caption for file, _ in LatentCache(tmp_path / "cache").clips] == ["a cube"]
    with refused("0: a cube", "another folder"):
        synthesize(pipe, model, ["a ball"], tmp_path / "cache", WAN_CLIP, steps=1)
    next(pipe.vae.parameters()).data.add_(1)
    pipe.save_pretrained(model)
    with refused("vae_weights='", "', not '"):
        synthesize(pipe, model, ["a cube"], tmp_path / "cache", WAN_CLIP, steps=1)


def test_videos_become_samples_of_image_to_video_that_train(videos: Path, tmp_path: Path) -> None:
    """Every clip with its own first frame, which stays where the prompt is dropped."""
    pytest.importorskip("ftfy")
    components = wan_components(flow_shift=5.0, image_channels=8)
    pipe, model = _saved(quiet(WanImageToVideoPipeline(transformer=wan_i2v(), **components)), tmp_path)
    encode_folder(pipe, model, videos, tmp_path / "cache", replace(WAN_CLIP, stride=5))
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
    _, other = _saved(wan_pipeline(latent_channels=8), tmp_path)
    copied = shutil.copytree(model, tmp_path / "copied")

    def data_for(name: object) -> LatentCache:
        return NamedRun(settings(tmp_path, model=str(name), data=str(tmp_path / "cache"))).open_data()

    assert len(data_for(copied)) == 3
    with refused("vae='", other):
        data_for(other)
    with refused("frames=[5]", "[9]"):
        encode_folder(pipe, model, videos, tmp_path / "cache", Clips(9, 8.0, ((32, 32),)))
    for part in ("vae", "text_encoder"):
        file = next((copied / part).glob("*.safetensors"))
        _flipped(file)
        with refused(f"{part}_weights='", "mhla encode"):
            data_for(copied)
        shutil.copy(Path(model, part, file.name), file)
    assert len(data_for(copied)) == 3


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
        (dit_pipeline, WAN_CLIP, ["dog", "horse"], 5.0, "'horse'.*cat, dog, house cat"),
        *((dit_pipeline, IMAGE_CLIP, ["dog"], guidance, f"guidance={guidance}") for guidance in (inf, nan, -5.0)),
    ],
)
def test_what_cannot_be_synthesized_is_refused(make, clip, prompts, guidance, named, tmp_path):
    pipe, model = _saved(make(), tmp_path)
    with pytest.raises(ValueError, match=named):
        synthesize(pipe, model, prompts, tmp_path / "cache", clip, guidance=guidance)
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


def test_latents_of_a_patched_pipeline_are_refused(wan: tuple[Any, str], tmp_path: Path) -> None:
    pipe, model = wan
    apply_mhla(pipe, blocks=(2, 2, 2))
    with refused("patched"):
        synthesize(pipe, model, ["dog"], tmp_path / "cache", WAN_CLIP)
    remove_mhla(pipe)


def test_text_and_image_to_video_of_one_transformer_are_encoded_to_folders_of_their_own(
    videos: Path, tmp_path: Path
) -> None:
    """The pipeline alone tells them apart; else a folder's samples would be kept as they were."""
    pipe, model = _saved(case_of("ltx").pipeline(), tmp_path)
    shown = quiet(LTXImageToVideoPipeline(**pipe.components))
    shown.save_pretrained(tmp_path / "shown")
    places = {"text": (pipe, model), "image": (shown, str(tmp_path / "shown"))}

    def encode(kind: str, folder: str, frames: int = 5) -> Any:
        return encode_folder(*places[kind], videos, tmp_path / folder, Clips(frames, 8.0, ((32, 32),)))

    def open_data(kind: str, folder: str) -> LatentCache:
        return NamedRun(settings(tmp_path, model=places[kind][1], data=str(tmp_path / folder))).open_data()

    for kind, other in (("text", "image"), ("image", "text")):
        encode(kind, kind)
        assert len(encode(kind, kind)) == 4 and len(open_data(kind, kind)) == 3
        with refused("begins_with_picture="):
            encode(other, kind)
        with refused("begins_with_picture="):
            open_data(other, kind)
    with refused("frames=1"):
        encode("image", "picture", frames=1)


def _written(folder: Path, count: int, lost: int = 0) -> None:
    """A cache of small samples, or one that goes on, the last ones of which no line of the index names."""
    data = wan_data(count + lost)
    assert data.empty is not None
    contents = dict.fromkeys(map(str, range(count)), "")
    writer = CacheWriter(folder, {"family": "wan"}, contents, data.empty, {})
    kept = {file.name for file in writer.files}
    for number in range(count + lost):
        if str(number) not in kept:
            clip = writer.write(data[number], (5, 32, 32))
            if number < count:
                writer.add(CachedFile(str(number), "caption", clips=(clip,)))


def test_killed_writer_leaves_a_good_cache_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    _written(tmp_path, 3, lost=1)
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes() + b'{"name": "half a')
    assert len(LatentCache(tmp_path)) == 3
    _written(tmp_path, 4)
    cache = LatentCache(tmp_path)
    assert [file.name for file, _ in cache.clips] == list("0123") and len(list((tmp_path / "clips").iterdir())) == 4
    assert all(torch.equal(cache[place]["latents"], wan_data(5)[place]["latents"]) for place in range(4))
    (tmp_path / "clips/00000001.safetensors").unlink()
    with refused("00000001.safetensors", "mhla encode", error=FileNotFoundError):
        LatentCache(tmp_path)
    for harmed in (index.read_text().replace('"format_version": 5', '"format_version": 4'), "{\n", "", "[]\n"):
        index.write_text(harmed)
        with refused(index, "damaged"):
            LatentCache(tmp_path)
    index.unlink()
    with refused(index.name, error=FileNotFoundError):
        LatentCache(tmp_path)


def test_a_first_attempt_that_made_no_clip_binds_nobody(wan: tuple[Any, str], videos: Path, tmp_path: Path) -> None:
    pipe, model = wan
    with refused(" 4 ", "2.mp4: the file is empty"):
        encode_folder(pipe, model, videos, tmp_path / "cache", Clips(49, 8.0, ((32, 32),)))
    with refused(str(tmp_path), "no clips", "mhla encode", "goes on"):
        LatentCache(tmp_path / "cache")
    encode_folder(pipe, model, videos, tmp_path / "cache", WAN_CLIP)
    assert read_index(tmp_path / "cache")[0]["frames"] == [5] and len(LatentCache(tmp_path / "cache")) == 3


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["clips/00000000.safetensors", "empty.safetensors"])
@pytest.mark.parametrize("harm", [_flipped, lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_damage_of_a_cache_is_named(harm: Callable[[Path], object], name: str, workers: int, tmp_path: Path) -> None:
    """Also where another process reads."""
    _written(tmp_path, 2)

    def batch() -> object:
        config, process = settings(tmp_path, workers=workers), get_family(tiny_wan()).training.process(tiny_wan(), 3.0)
        return next(NoisedBatches(LatentCache(tmp_path), process, config, torch.device("cpu")).from_step(0))

    batch()
    harm(tmp_path / name)
    with refused(f"{tmp_path / name} ", f"{tmp_path} ", "mhla encode"):
        batch()
    _written(tmp_path, 2)  # writes an empty prompt that was damaged anew
    if name == "empty.safetensors":
        batch()
