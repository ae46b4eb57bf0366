"""Sets of images: folders and npz files."""

import numpy
import pytest
import torch

from mhla_diffusers.evaluation.images import Images

from .pictures import write_pictures


def test_npz_holds_the_same_images(tmp_path):
    images = torch.cat(list(Images(write_pictures(tmp_path / "made", 80)).batches(9)))
    numpy.savez_compressed(tmp_path / "packed.npz", images.permute(0, 2, 3, 1).numpy())
    assert torch.equal(torch.cat(list(Images(tmp_path / "packed.npz").batches(33))), images)


def test_sizes_are_not_mixed_in_a_batch(tmp_path):
    folder = write_pictures(tmp_path / "made", 80)
    write_pictures(folder / "larger", 4, size=16)
    images = Images(folder)
    assert [tuple(batch.shape) for batch in images.batches(50)] == [(50, 3, 8, 8), (30, 3, 8, 8), (4, 3, 16, 16)]


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
