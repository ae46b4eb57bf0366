"""Sets of images against each other, with features that need no weights."""

import json
import warnings

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.description import statistics_file
from mhla_diffusers.evaluation.fid import FewSamplesWarning, measure_images
from mhla_diffusers.evaluation.images import UnreadableImageError, open_images, write_npz
from mhla_diffusers.evaluation.metrics import FeatureStatistics, frechet_distance
from mhla_diffusers.generation.record import write_video

from .pictures import blocks, mhla, write_pictures


def features_of(folder):
    return torch.cat([blocks(batch).pooled for batch in open_images(folder).batches(7)])


def measure(samples, reference, **options):
    return measure_images(samples, reference, blocks, name="blocks", batch_size=7, **options)


@pytest.fixture
def folders(tmp_path):
    return write_pictures(tmp_path / "made", 80), write_pictures(tmp_path / "real", 90, seed=1, brightness=140)


def test_scores_of_two_folders(folders):
    scores = measure(*folders)
    made, real = (features_of(folder) for folder in folders)
    assert (scores.samples, scores.reference) == (80, 90)
    assert scores.fid == pytest.approx(frechet_distance(made, real))
    assert scores.sfid == pytest.approx(frechet_distance(made[:, :4], real[:, :4]))
    assert 0 <= scores.recall <= 1
    assert scores.fid > 10 * measure(folders[1], folders[1]).fid
    assert scores.kid > 0
    assert scores.inception_score >= 1
    assert set(scores.measured()) == {
        *("samples", "reference", "fid", "sfid", "inception_score", "precision", "recall", "kid")
    }


def test_extractor_may_give_pooled_features_alone(folders):
    scores = measure_images(*folders, lambda images: blocks(images).pooled, name="pooled")
    assert scores.fid == pytest.approx(measure(*folders).fid)
    assert (scores.sfid, scores.inception_score) == (None, None)


def test_reference_statistics_lie_beside_the_data_and_are_used(folders):
    before = measure(*folders)
    file = statistics_file(folders[1], "blocks")
    assert file.parent == folders[1].parent

    def only_the_samples(images):
        assert not any(torch.equal(images[0], image) for batch in open_images(folders[1]).batches(9) for image in batch)
        return blocks(images)

    assert measure_images(*folders, only_the_samples, name="blocks").measured() == pytest.approx(before.measured())
    assert measure(folders[0], file).measured() == pytest.approx(before.measured())
    write_pictures(folders[1], 20, seed=5, brightness=20)
    assert measure(*folders).fid > 1.5 * before.fid
    with pytest.raises(ValueError, match="extractor 'blocks', not with 'adm'"):
        measure_images(folders[0], file, blocks, name="adm")


def test_reference_that_cannot_be_written_beside_may_be_a_link(folders, tmp_path):
    link = tmp_path / "elsewhere" / "real"
    link.parent.mkdir()
    link.symlink_to(folders[1])
    assert statistics_file(link, "blocks").parent == link.parent
    statistics_file(folders[1], "blocks").mkdir()
    with pytest.raises(OSError, match="cannot be kept at.*Link the reference"):
        measure(*folders)
    assert measure(folders[0], link).reference == 90


def test_published_statistics_are_read(folders, tmp_path):
    real = FeatureStatistics.of(features_of(folders[1])).normal()
    arrays = {"mu": real.mean.numpy(), "sigma": real.covariance.numpy()}
    numpy.savez(tmp_path / "published.npz", **arrays)
    published = measure(folders[0], tmp_path / "published.npz")
    assert published.fid == pytest.approx(measure(*folders).fid)
    assert (published.reference, published.precision) == (None, None)
    images = torch.cat(list(open_images(folders[1]).batches(90))).permute(0, 2, 3, 1).numpy()
    spatial = {"mu_s": arrays["mu"][:4], "sigma_s": arrays["sigma"][:4, :4]}
    numpy.savez(tmp_path / "adm.npz", arr_0=images, **arrays, **spatial)
    whole = measure(folders[0], tmp_path / "adm.npz").measured()
    assert whole == pytest.approx({k: v for k, v in measure(*folders).measured().items() if k != "reference"})


def test_few_samples_are_warned_of_with_their_number(folders):
    with pytest.warns(FewSamplesWarning, match="holds 20 images.*about 60 on"):
        measure(write_pictures(folders[0].with_name("few"), 20), folders[1])
    with pytest.warns(FewSamplesWarning, match="few-real holds 4 images.*about 60 on.*10000.*5000"):
        measure(folders[0], write_pictures(folders[0].with_name("few-real"), 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(*folders)


def test_folders_with_several_sizes_are_measured(folders):
    write_pictures(folders[0] / "larger", 4, size=16)
    assert measure(*folders).samples == 84


def test_npz_gives_the_scores_of_its_folder(folders, tmp_path):
    write_npz(open_images(folders[0]), tmp_path / "made.npz")
    assert measure(tmp_path / "made.npz", folders[1]).fid == pytest.approx(measure(*folders).fid)


def test_damaged_image_is_named(folders):
    (folders[0] / "0003.png").write_bytes((folders[0] / "0003.png").read_bytes()[:60])
    with pytest.raises(UnreadableImageError, match="0003.png is no readable image"):
        measure(*folders)


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

    scores = measure_images(*folders, movement, name="movement", batch_size=4)
    videos = [torch.cat([movement(batch) for batch in open_images(folder).batches(9)]) for folder in folders]
    assert scores.fid == pytest.approx(frechet_distance(*videos))
    (folders[0] / "3.mp4").write_bytes(b"no video")
    with pytest.raises(UnreadableImageError, match="3.mp4 is no readable video"):
        measure_images(*folders, movement, name="movement")


def test_command_reports_and_writes(folders, tmp_path):
    extractor = "tests.evaluation.pictures:blocks"
    ended = mhla("eval", "fid", *map(str, folders), "--extractor", extractor, "--output", str(tmp_path / "fid.json"))
    assert ended.exit_code == 0, ended.output
    written = json.loads((tmp_path / "fid.json").read_text())
    assert f"fid: {written['fid']:.4f}" in ended.output
    assert written["samples"] == 80
    with warnings.catch_warnings():  # also where PYTHONWARNINGS leaves none
        warnings.simplefilter("ignore")
        few = mhla("eval", "fid", write_pictures(tmp_path / "few", 20), folders[1], "--extractor", extractor)
    assert "Warning: " in few.stderr
    assert "holds 20 images" in few.stderr
    missing = mhla("eval", "fid", *map(str, folders))
    assert "download https://" in str(missing.exception)
