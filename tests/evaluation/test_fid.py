"""Sets of images against each other, with features that need no weights."""

import json
import warnings

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.extractors import CleanInception, load_extractor
from mhla_diffusers.evaluation.fid import FewSamplesWarning, measure_images
from mhla_diffusers.evaluation.images import UnreadableImageError, open_images
from mhla_diffusers.evaluation.metrics import FeatureStatistics, frechet_distance
from mhla_diffusers.evaluation.npz import write_array
from mhla_diffusers.evaluation.reference import statistics_file
from mhla_diffusers.generation.generate import write_video

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


def test_npz_holds_the_same_images_and_openai_can_read_it(folders, tmp_path):
    images = open_images(folders[0])
    write_array(images.batches(7), len(images), tmp_path / "made.npz")
    array = numpy.load(tmp_path / "made.npz")["arr_0"]
    assert array.shape == (80, 8, 8, 3)
    assert array.dtype == numpy.uint8
    assert torch.equal(torch.from_numpy(array).permute(0, 3, 1, 2), torch.cat(list(images.batches(100))))
    assert measure(tmp_path / "made.npz", folders[1]).fid == pytest.approx(measure(*folders).fid)
    numpy.savez_compressed(tmp_path / "packed.npz", array)
    assert torch.equal(
        torch.cat(list(open_images(tmp_path / "packed.npz").batches(33))), torch.cat(list(images.batches(9)))
    )


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
    statistics_file(folders[1], "blocks").with_name(f".{statistics_file(folders[1], 'blocks').name}").mkdir()
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(*folders)


def test_damaged_image_is_named(folders):
    (folders[0] / "0003.png").write_bytes((folders[0] / "0003.png").read_bytes()[:60])
    with pytest.raises(UnreadableImageError, match="0003.png is no readable image"):
        measure(*folders)


def test_folders_with_several_sizes_hold_for_fid_but_not_for_npz(folders, tmp_path):
    write_pictures(folders[0] / "larger", 4, size=16)
    images = open_images(folders[0])
    assert [tuple(batch.shape) for batch in images.batches(50)] == [(50, 3, 8, 8), (30, 3, 8, 8), (4, 3, 16, 16)]
    assert measure(*folders).samples == 84
    with pytest.raises(ValueError, match="8x8 and 16x16"):
        write_array(images.batches(50), len(images), tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()


def test_what_holds_no_images_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("no zip")
    numpy.savez(tmp_path / "floats.npz", numpy.zeros((2, 4, 4, 3)))
    numpy.savez(tmp_path / "other.npz", images=numpy.zeros(3))
    for name, error, message in (
        ("absent", FileNotFoundError, "no images at"),
        ("empty", FileNotFoundError, "holds no images"),
        ("text.npz", ValueError, "no npz file"),
        ("floats.npz", ValueError, r"float64 \(2, 4, 4, 3\)"),
        ("other.npz", ValueError, "no array arr_0, only images.npy"),
    ):
        with pytest.raises(error, match=message):
            open_images(tmp_path / name)


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


@pytest.mark.parametrize(("choice", "file"), [("adm", "6726825d.pth"), ("clean", "inception-2015-12-05.pt")])
def test_missing_weights_are_named_with_their_source(choice, file, tmp_path):
    for weights in (None, tmp_path / file):
        with pytest.raises(FileNotFoundError, match=f"https://.*{file} and give its path with --weights"):
            load_extractor(choice, weights)


def test_unknown_extractors_are_refused(tmp_path):
    with pytest.raises(ValueError, match="allowed: adm, clean, or package.module:callable"):
        load_extractor("vgg")
    with pytest.raises(ValueError, match="no callable named 'none'"):
        load_extractor("mhla_diffusers.demo.judging:none")
    with pytest.raises(ValueError, match="brings its own"):
        load_extractor("mhla_diffusers.demo.judging:picture_features", tmp_path)


class Backbone(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images, (32, 64)).mean(dim=1).flatten(1)


class ScriptedInception(torch.nn.Module):
    """Has what clean-fid uses of the real file."""

    def __init__(self):
        super().__init__()
        self.layers = Backbone()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


@pytest.fixture
def scripted_weights(tmp_path):
    pytest.importorskip("cleanfid.inception_torchscript", reason="clean-fid is not installed")
    file = tmp_path / "inception-2015-12-05.pt"
    torch.jit.save(torch.jit.script(ScriptedInception()), file)
    return file


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_clean_inception_gets_resized_images_of_the_range_that_it_was_trained_with(scripted_weights):
    extractor = CleanInception(scripted_weights)
    images = torch.full((2, 3, 20, 30), 192, dtype=torch.uint8)
    assert torch.equal(extractor(images), torch.full((2, 2048), 0.5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_clean_fid_agrees(scripted_weights, folders):
    try:
        from cleanfid import fid
    except ImportError as error:
        pytest.skip(f"clean-fid cannot be imported here: {error}")
    extractor = CleanInception(scripted_weights)
    theirs = fid.compute_fid(
        *map(str, folders),
        custom_feat_extractor=lambda x: blocks(x).pooled,
        num_workers=0,
        device=torch.device("cpu"),
        verbose=False,
    )

    def resized(images):
        return blocks(
            torch.stack([torch.from_numpy(extractor.resize(i)) for i in images.permute(0, 2, 3, 1).numpy()]).permute(
                0, 3, 1, 2
            )
        ).pooled

    ours = measure_images(*folders, resized, name="resized")
    assert ours.fid == pytest.approx(theirs, rel=1e-4)


def test_command_reports_and_writes(folders, tmp_path):
    extractor = "tests.evaluation.pictures:blocks"
    ended = mhla("eval", "fid", *map(str, folders), "--extractor", extractor, "--output", str(tmp_path / "fid.json"))
    assert ended.exit_code == 0, ended.output
    written = json.loads((tmp_path / "fid.json").read_text())
    assert f"fid: {written['fid']:.4f}" in ended.output
    assert written["samples"] == 80
    few = mhla("eval", "fid", write_pictures(tmp_path / "few", 20), folders[1], "--extractor", extractor)
    assert "Warning: " in few.stderr
    assert "holds 20 images" in few.stderr
    missing = mhla("eval", "fid", *map(str, folders))
    assert "download https://" in str(missing.exception)
