"""Sets of images against each other, with features that need no weights."""

import json

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.fid import measure_images
from mhla_diffusers.evaluation.images import Images
from mhla_diffusers.evaluation.metrics import frechet_distance, inception_score, moments, precision_recall
from mhla_diffusers.generation.record import Sample, write_sample_list, write_video

from ..refusals import refused
from .pictures import blocks, mhla, write_pictures


def features_of(folder):
    return torch.cat([blocks(batch).pooled for batch in Images(folder).batches(7)])


def measure(samples, reference, extractor=blocks):
    return measure_images(samples, reference, extractor, batch_size=7)


@pytest.fixture
def folders(tmp_path):
    return write_pictures(tmp_path / "made", 80), write_pictures(tmp_path / "real", 90, seed=1, brightness=140)


def test_scores_of_two_folders(folders):
    scores = measure(*folders)
    written = len(list(folders[1].parent.iterdir())), len(list(folders[1].iterdir()))
    assert written == (2, 90), "nothing beside a reference, which may be in a read-only folder"
    made, real = (features_of(folder) for folder in folders)
    assert scores["samples"] == 80
    assert scores["fid"] == pytest.approx(frechet_distance(made, real))
    assert scores["sfid"] == pytest.approx(frechet_distance(made[:, :4], real[:, :4]))
    assert (scores["precision"], scores["recall"]) == precision_recall(real, made)
    assert scores["inception_score"] == pytest.approx(inception_score(made[:, :3].softmax(dim=1)))
    assert scores["fid"] > 10 * measure(folders[1], folders[1])["fid"]
    pooled = measure(*folders, lambda images: blocks(images).pooled)
    assert pooled == pytest.approx({k: scores[k] for k in scores if k not in ("sfid", "inception_score")})


def test_published_statistics_are_read(folders, tmp_path):
    arrays = dict(zip(("mu", "sigma"), (x.numpy() for x in moments(features_of(folders[1]))), strict=True))
    numpy.savez(tmp_path / "published.npz", **arrays)
    scores = measure(*folders)
    published = measure(folders[0], tmp_path / "published.npz")
    assert published == pytest.approx({name: scores[name] for name in ("samples", "fid", "inception_score")})
    images = torch.cat(list(Images(folders[1]).batches(90))).permute(0, 2, 3, 1).numpy()
    spatial = {"mu_s": arrays["mu"][:4], "sigma_s": arrays["sigma"][:4, :4]}
    numpy.savez(tmp_path / "adm.npz", arr_0=images, **arrays, **spatial)
    assert measure(folders[0], tmp_path / "adm.npz") == pytest.approx(scores)


@pytest.mark.parametrize("wrong", ["mu", "objects", "flipped"])
def test_damaged_statistics_are_refused(folders, tmp_path, wrong):
    arrays, file = dict(zip(("mu", "sigma"), moments(features_of(folders[1])), strict=True)), tmp_path / "published.npz"
    arrays = {name: values.numpy() for name, values in arrays.items()}
    if wrong == "mu":
        arrays["mu"][1] = numpy.nan
    if wrong == "objects":
        arrays["mu"] = numpy.array([None, *arrays["mu"][1:]])
    numpy.savez(file, **arrays)
    if wrong == "flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 64
        file.write_bytes(content)
    with refused("published.npz"):
        measure(folders[0], file)


def nan_in(name):
    return lambda images: blocks(images)._replace(**{name: images[:, 0, 0] * numpy.nan})


@pytest.mark.parametrize(
    ("features", "named"),
    [
        *((nan_in(name), f"{name} .*finite") for name in ("pooled", "spatial", "probabilities")),
        (lambda images: blocks(images)._replace(probabilities=-blocks(images).probabilities), "inception_score .*nan"),
        (lambda images: torch.zeros(len(images), 2, 2), r"pooled.*\(7, 2, 2\)"),
        (lambda images: torch.zeros(1), r"pooled of 7 samples must .*\(7, D\), got \(1,\)"),
    ],
)
def test_features_that_are_not_finite_rows_are_refused_by_name(folders, features, named):
    with pytest.raises(ValueError, match=named):
        measure(*folders, features)


def test_a_set_is_scored_without_what_its_list_does_not_name(folders):
    before = measure(*folders)
    write_sample_list([Sample(f"{number:04d}.png", "a") for number in range(80)], folders[0])
    write_pictures(folders[0] / "others", 3, seed=9)
    assert measure(*folders) == before


def test_npz_and_folders_of_several_sizes_are_measured_and_damage_is_named(folders, tmp_path):
    images = torch.cat(list(Images(folders[0]).batches(80))).permute(0, 2, 3, 1).numpy()
    numpy.savez(tmp_path / "made.npz", images)
    assert measure(tmp_path / "made.npz", folders[1])["fid"] == pytest.approx(measure(*folders)["fid"])
    write_pictures(folders[0] / "larger", 4, size=16)
    assert measure(*folders)["samples"] == 84
    (folders[0] / "0003.png").write_bytes((folders[0] / "0003.png").read_bytes()[:60])
    with refused("0003.png"):
        measure(*folders)


def test_videos_go_through_the_same_extractor(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("av")
    folders = [tmp_path / "made", tmp_path / "real"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        for number in range(6):
            frames = torch.rand(5, 1, 1, 3, generator=torch.Generator().manual_seed(10 * seed + number))
            write_video(frames.expand(5, 32, 32, 3), folder / f"{number}.mp4", 6)

    def movement(videos):
        assert videos.shape[1:] == (5, 3, 32, 32) and videos.dtype == torch.uint8
        means = videos.float().mean(dim=(2, 3, 4)) / 255
        return torch.stack([means.mean(dim=1), means.diff(dim=1).abs().mean(dim=1)], dim=1)

    videos = [torch.cat([movement(batch) for batch in Images(folder).batches(9)]) for folder in folders]
    assert measure(*folders, movement)["fid"] == pytest.approx(frechet_distance(*videos))


def test_command_reports_and_writes(folders, tmp_path):
    extractor = "tests.evaluation.pictures:blocks"
    ended = mhla("eval", "fid", *folders, "--extractor", extractor, "--output", tmp_path / "fid.json")
    assert ended.exit_code == 0, ended.output
    written = json.loads((tmp_path / "fid.json").read_text())
    assert f"fid: {written['fid']:.4f}" in ended.output
    assert written["samples"] == 80
    assert mhla("eval", "fid", *folders, "--batch-size", 0).exit_code == 2


@pytest.mark.parametrize("single", [0, 1])
def test_a_set_of_one_image_has_no_covariance(tmp_path, folders, single):
    pair = list(folders)
    pair[single] = write_pictures(tmp_path / "one", 1)
    with refused("(1, 12)", "at least 2"):
        measure(*pair)


def test_what_holds_no_images_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("no zip")
    numpy.savez(tmp_path / "floats.npz", numpy.zeros((2, 4, 4, 3)))
    numpy.savez(tmp_path / "objects.npz", numpy.array([None]))
    numpy.savez(tmp_path / "other.npz", images=numpy.zeros(3))
    numpy.savez(tmp_path / "none.npz", numpy.zeros((0, 4, 4, 3), numpy.uint8))
    numpy.savez(tmp_path / "flat.npz", numpy.zeros((2, 0, 4, 3), numpy.uint8))
    for name, error, message in (
        ("absent", FileNotFoundError, "absent"),
        ("empty", FileNotFoundError, "empty"),
        ("text.npz", ValueError, r"text\.npz"),
        ("objects.npz", ValueError, r"objects\.npz"),
        ("floats.npz", ValueError, r"float64 \(2, 4, 4, 3\)"),
        ("none.npz", ValueError, r"uint8 \(0, 4, 4, 3\)"),
        ("flat.npz", ValueError, r"uint8 \(2, 0, 4, 3\)"),
        ("other.npz", ValueError, r"arr_0 .*float64 \(0,\)"),
    ):
        with pytest.raises(error, match=message):
            Images(tmp_path / name)
