"""Sets of images against each other, and the Fréchet distance of their features, which need no weights."""

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.fid import extract_features, measure_images
from mhla_diffusers.evaluation.metrics import frechet_distance, moments
from mhla_diffusers.generation.record import write_video

from ..refusals import refused
from .pictures import blocks, write_pictures, write_set


def measure(samples, reference, extractor=blocks):
    return measure_images(samples, reference, extractor, batch_size=7)


@pytest.fixture
def folders(tmp_path):
    return write_pictures(tmp_path / "made", 80), write_pictures(tmp_path / "real", 90, seed=1, brightness=140)


def test_scores_of_two_folders(folders):
    scores = measure(*folders)
    written = len(list(folders[1].parent.iterdir())), len(list(folders[1].iterdir()))
    assert written == (2, 90), "nothing beside a reference, which may be in a read-only folder"
    assert scores == {
        "samples": 80,
        "fid": pytest.approx(frechet_distance(*(extract_features(x, blocks) for x in folders))),
    }
    assert scores["fid"] > 10 * abs(measure(folders[1], folders[1])["fid"])


def test_published_statistics_are_read_and_damaged_ones_refused(folders, tmp_path):
    file = tmp_path / "published.npz"
    mean, covariance = (x.numpy() for x in moments(extract_features(folders[1], blocks)))
    numpy.savez(file, mu=mean, sigma=covariance)
    assert measure(folders[0], file) == pytest.approx(measure(*folders))
    for content in ({"mu": mean * numpy.nan, "sigma": covariance}, {"arr_0": mean}):
        numpy.savez(file, **content)
        with refused("published.npz"):
            measure(folders[0], file)
    file.write_bytes(file.read_bytes()[:-60])
    with refused("published.npz"):
        measure(folders[0], file)


@pytest.mark.parametrize(
    ("features", "named"),
    [
        (lambda images: blocks(images) * numpy.nan, "7 samples must be finite"),
        (lambda images: torch.zeros(len(images), 2, 2), r"\(7, D\), got \(7, 2, 2\)"),
        (lambda images: torch.zeros(1), r"\(7, D\), got \(1,\)"),
    ],
)
def test_features_that_are_not_finite_rows_are_refused(folders, features, named):
    with pytest.raises(ValueError, match=named):
        measure(*folders, features)


def test_a_folder_is_what_its_list_names_or_all_sizes_and_damage_is_named(folders):
    before = measure(*folders)
    write_pictures(folders[0] / "larger", 4, size=16)
    assert measure(*folders)["samples"] == 84
    assert measure(write_set(folders[0], ["a"] * 80), folders[1]) == before
    (folders[0] / "0003.png").write_bytes((folders[0] / "0003.png").read_bytes()[:60])
    with refused("0003.png"):
        measure(*folders)


def test_videos_go_through_the_same_extractor(tmp_path):
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

    features = [extract_features(folder, movement, 9) for folder in folders]
    assert measure(*folders, movement)["fid"] == pytest.approx(frechet_distance(*features))


def test_folders_that_have_no_covariance_or_no_images_are_refused(tmp_path, folders):
    with refused("(1, 12)", "at least 2"):
        measure(write_pictures(tmp_path / "one", 1), folders[1])
    with refused("4 and 5 channels"):
        frechet_distance(torch.zeros(5, 4), torch.zeros(5, 5))
    for absent in ("absent", "."):
        with refused("no images in", error=FileNotFoundError):
            measure(folders[0] / "0000.png" / absent, folders[1])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_frechet_distance_of_known_normals():
    zero, one = (torch.zeros(3), torch.eye(3)), (torch.ones(3), 4 * torch.eye(3))
    assert frechet_distance(zero, one) == frechet_distance(one, zero) == pytest.approx(6.0, rel=1e-12)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(torch.zeros(4, 2), torch.ones(4, 2)) == pytest.approx(2)


@pytest.mark.parametrize(("dimensions", "samples"), [(64, 1000), (256, 100)])
def test_frechet_distance_agrees_with_the_matrix_square_root(dimensions, samples):
    linalg = pytest.importorskip("scipy.linalg")
    scale = torch.linspace(0.1, 2, dimensions, dtype=torch.float64)
    first, second = normal(samples, dimensions) * scale, 0.5 + normal(samples, dimensions, seed=1)
    (mean, covariance), (other_mean, other_covariance) = moments(first), moments(second)
    root = linalg.sqrtm((covariance @ other_covariance).numpy())
    shift = float((mean - other_mean).square().sum())
    expected = shift + float(covariance.trace() + other_covariance.trace()) - 2 * numpy.trace(root).real
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-6)
