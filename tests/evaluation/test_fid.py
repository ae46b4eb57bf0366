"""Sets of images against each other, with features that need no weights."""

import json
import os
import warnings
from pathlib import Path

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.extractors import Extractor
from mhla_diffusers.evaluation.fid import extract_features, measure_images, statistics_file
from mhla_diffusers.evaluation.images import Images, write_npz
from mhla_diffusers.evaluation.metrics import frechet_distance, kernel_distance, moments, precision_recall
from mhla_diffusers.generation.pixels import UnreadableMediaError
from mhla_diffusers.generation.record import Sample, write_sample_list, write_video

from ..refusals import refused
from .pictures import blocks, mhla, write_pictures


def features_of(folder):
    return torch.cat([blocks(batch).pooled for batch in Images(folder).batches(7)])


def measure(samples, reference, **options):
    return measure_images(samples, reference, Extractor(blocks, "blocks", ""), batch_size=7, **options)


@pytest.fixture
def folders(tmp_path):
    return write_pictures(tmp_path / "made", 80), write_pictures(tmp_path / "real", 90, seed=1, brightness=140)


def test_scores_of_two_folders(folders):
    scores = measure(*folders)
    made, real = (features_of(folder) for folder in folders)
    assert (scores["samples"], scores["reference"]) == (80, 90)
    assert scores["fid"] == pytest.approx(frechet_distance(made, real))
    assert scores["sfid"] == pytest.approx(frechet_distance(made[:, :4], real[:, :4]))
    assert scores["kid"] == pytest.approx(kernel_distance(real, made))
    assert (scores["precision"], scores["recall"]) == precision_recall(real, made)
    assert scores["fid"] > 10 * measure(folders[1], folders[1])["fid"]
    assert scores["inception_score"] >= 1
    pooled = measure_images(*folders, Extractor(lambda images: blocks(images).pooled, "pooled", ""))
    assert pooled == pytest.approx({k: scores[k] for k in scores if k not in ("sfid", "inception_score")})


def test_the_file_of_scores_says_that_the_sets_are_small(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mhla_diffusers.evaluation.extractors.load_extractor", lambda *given: Extractor(blocks, "blocks", "")
    )
    write_pictures(tmp_path / "few", 20)
    ended = mhla("eval", "fid", tmp_path / "few", folders[1], "--output", tmp_path / "fid.json")
    assert "remarks: " in ended.output
    remarks = json.loads((tmp_path / "fid.json").read_text())["remarks"]
    assert remarks[0].startswith(f"{tmp_path / 'few'} holds 20 images.")


def test_reference_statistics_lie_beside_the_data_and_are_used(folders):
    before = measure(*folders)
    file = statistics_file(folders[1], "blocks")
    assert file.parent == folders[1].parent

    def only_the_samples(images):
        assert not any(torch.equal(images[0], image) for batch in Images(folders[1]).batches(9) for image in batch)
        return blocks(images)

    assert measure_images(*folders, Extractor(only_the_samples, "blocks", "")) == pytest.approx(before)
    first, second, *_ = sorted(folders[1].iterdir())
    times = {path: path.stat() for path in (first, second)}
    assert times[first].st_size == times[second].st_size
    first.write_bytes(second.read_bytes())  # as tar writes it, with the time of before
    os.utime(first, ns=(times[first].st_atime_ns, times[first].st_mtime_ns))
    assert measure(*folders)["fid"] != before["fid"]
    write_pictures(folders[1], 20, seed=5, brightness=20)
    assert measure(*folders)["fid"] > 1.5 * before["fid"]


def test_reference_that_cannot_be_written_beside_may_be_a_link(folders, tmp_path):
    link = tmp_path / "elsewhere" / "real"
    link.parent.mkdir()
    link.symlink_to(folders[1])
    assert statistics_file(link, "blocks").parent == link.parent
    statistics_file(folders[1], "blocks").mkdir()
    with refused(str(folders[1].parent), error=OSError):
        measure(*folders)
    assert measure(folders[0], link)["reference"] == 90


def test_published_statistics_are_read(folders, tmp_path):
    arrays = dict(zip(("mu", "sigma"), (x.numpy() for x in moments(features_of(folders[1]))), strict=True))
    numpy.savez(tmp_path / "published.npz", **arrays)
    published = measure(folders[0], tmp_path / "published.npz")
    scores = measure(*folders)
    assert published == pytest.approx({name: scores[name] for name in ("samples", "fid", "inception_score")})
    images = torch.cat(list(Images(folders[1]).batches(90))).permute(0, 2, 3, 1).numpy()
    spatial = {"mu_s": arrays["mu"][:4], "sigma_s": arrays["sigma"][:4, :4]}
    numpy.savez(tmp_path / "adm.npz", arr_0=images, **arrays, **spatial)
    whole = measure(folders[0], tmp_path / "adm.npz")
    assert whole == pytest.approx({name: scores[name] for name in scores if name != "reference"})


@pytest.mark.parametrize("place", [3, 0.5])
def test_a_flipped_byte_of_stored_statistics_is_noticed(folders, place):
    before, file = measure(*folders), statistics_file(folders[1], "blocks")
    content = bytearray(file.read_bytes())
    content[int(place * len(content)) if isinstance(place, float) else place] ^= 64
    file.write_bytes(content)
    assert measure(*folders) == before


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)


@pytest.mark.parametrize("wrong", ["mu", "objects", "flipped", "negative", "skew", "complex"])
def test_published_statistics_that_are_none_are_refused(folders, tmp_path, wrong):
    arrays = dict(zip(("mu", "sigma", "mu_s", "sigma_s"), 2 * moments(features_of(folders[1])), strict=True))
    arrays, file = {name: values.numpy() for name, values in arrays.items()}, tmp_path / "published.npz"
    if wrong in arrays:
        arrays[wrong].flat[1] = numpy.nan
    if wrong == "objects":
        arrays["mu"] = numpy.array([None, *arrays["mu"][1:]])
    changed = {"negative": lambda x: -x, "skew": numpy.tril, "complex": lambda x: x + 1j * x}
    arrays["sigma"] = changed.get(wrong, numpy.array)(arrays["sigma"])
    numpy.savez(file, **arrays)
    if wrong == "flipped":
        flipped(file)
    with pytest.raises(ValueError, match="published.npz"):
        measure(folders[0], file)


def nan_in(name):
    return lambda images: blocks(images)._replace(**{name: images[:, 0, 0] * numpy.nan})


@pytest.mark.parametrize(
    ("features", "named"),
    [
        *((nan_in(name), f"{name} .*finite") for name in ("pooled", "spatial", "probabilities")),
        (lambda images: blocks(images)._replace(probabilities=-blocks(images).probabilities), "inception_score .*nan"),
        (lambda images: torch.zeros(len(images)), "pooled.*7"),
        (lambda images: torch.zeros(len(images), 2, 2), "pooled.*7"),
    ],
)
def test_features_that_are_no_finite_rows_are_refused_by_name(folders, features, named):
    with pytest.raises(ValueError, match=named):
        measure_images(*folders, Extractor(features, "odd", ""), batch_size=7)


def test_a_set_is_scored_without_what_its_list_does_not_name(folders):
    before = [measure(*folders), measure(*folders[::-1])]
    write_sample_list([Sample(f"{number:04d}.png", "a") for number in range(80)], folders[0])
    write_pictures(folders[0] / "others", 3, seed=9)
    for sets, scores in zip((folders, folders[::-1]), before, strict=True):
        with pytest.warns(UserWarning, match="others/0000.png, others/0001.png"):
            assert measure(*sets) == scores


def test_features_of_all_images_take_no_memory(folders):
    """They lie in files that are removed and only mapped."""
    features = extract_features(Images(folders[0]), blocks, 7)
    expected = features_of(folders[0])
    assert torch.equal(features.pooled, expected) and features.spatial.shape == (80, 4)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "mhla-features-" in line]
    assert len(mapped) >= 3 and all("(deleted)" in line for line in mapped)


def test_few_samples_are_warned_of_with_their_number(folders):
    few = write_pictures(folders[0].with_name("few"), 20)
    for samples, reference in ((few, folders[1]), (folders[0], few)):
        with pytest.warns(UserWarning, match="few holds 20 .* 60 "):
            measure(samples, reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(*folders)


def test_npz_and_folders_of_several_sizes_are_measured_and_damage_is_named(folders, tmp_path):
    write_npz(Images(folders[0]), tmp_path / "made.npz")
    assert measure(tmp_path / "made.npz", folders[1])["fid"] == pytest.approx(measure(*folders)["fid"])
    write_pictures(folders[0] / "larger", 4, size=16)
    assert measure(*folders)["samples"] == 84
    (folders[0] / "0003.png").write_bytes((folders[0] / "0003.png").read_bytes()[:60])
    flipped(tmp_path / "made.npz")
    with refused("0003.png", error=UnreadableMediaError):
        measure(*folders)
    with refused("made.npz"):
        measure(tmp_path / "made.npz", folders[1])


def test_videos_go_through_the_same_plug(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("av")
    folders = [tmp_path / "made", tmp_path / "real"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        for number in range(6):
            frames = torch.rand(5, 1, 1, 3, generator=torch.Generator().manual_seed(10 * seed + number))
            write_video(frames.expand(5, 32, 32, 3), folder / f"{number}.mp4", 6)

    def movement(videos):
        assert videos.shape[1:] == (5, 3, 32, 32)
        assert videos.dtype == torch.uint8
        means = videos.float().mean(dim=(2, 3, 4)) / 255
        return torch.stack([means.mean(dim=1), means.diff(dim=1).abs().mean(dim=1)], dim=1)

    scores = measure_images(*folders, Extractor(movement, "movement", ""), batch_size=4)
    videos = [torch.cat([movement(batch) for batch in Images(folder).batches(9)]) for folder in folders]
    assert scores["fid"] == pytest.approx(frechet_distance(*videos))
    (folders[0] / "3.mp4").write_bytes(b"no video")
    with pytest.raises(UnreadableMediaError):
        measure_images(*folders, Extractor(movement, "movement", ""))


def test_command_reports_and_writes(folders, tmp_path):
    extractor = "tests.evaluation.pictures:blocks"
    ended = mhla("eval", "fid", *map(str, folders), "--extractor", extractor, "--output", str(tmp_path / "fid.json"))
    assert ended.exit_code == 0, ended.output
    written = json.loads((tmp_path / "fid.json").read_text())
    assert f"fid: {written['fid']:.4f}" in ended.output
    assert written["samples"] == 80
    missing = mhla("eval", "fid", *map(str, folders))
    assert "download https://" in str(missing.exception)


@pytest.mark.parametrize("single", [0, 1])
def test_a_set_of_one_image_is_named(tmp_path, folders, single):
    pair = list(folders)
    pair[single] = write_pictures(tmp_path / "one", 1)
    with refused(f"{tmp_path}/one ", " 1 "):
        measure(*pair)
