"""Pictures of two digits, folders of classes, and soft labels."""

import tracemalloc

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, interpolate

from mhla_diffusers.training.classify.blending import SoftLabels, soft_cross_entropy
from mhla_diffusers.training.classify.digits import SIZE, STEP, SUMS, SumsOfDigits
from mhla_diffusers.training.classify.folders import (
    CentreView,
    ImageFolder,
    Normalised,
    RandomView,
    UnreadablePictureError,
)

from .folders import RED, write_folder

PLAIN = Normalised((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def _shows(picture: torch.Tensor, place, digits) -> bool:
    """Whether one of the digits is what the picture has there."""
    found = (picture[0, place.top : place.top + SIZE, place.left : place.left + SIZE] + 1) / 2
    images = digits.images[digits.labels == place.label][:, None]
    drawn = interpolate(images, size=(SIZE, SIZE), mode="bilinear")[:, 0]
    return bool((drawn - found).abs().amax(dim=(1, 2)).min() < 1e-6)  # of the way to [-1, 1] and back


def test_a_picture_s_class_is_the_sum_of_the_digits_it_shows_and_splits_share_none():
    parts = {split: SumsOfDigits(split, 12, 64, seed=3) for split in ("train", "held-out")}
    for split, other in (("train", "held-out"), ("held-out", "train")):
        for index in range(12):
            sample, places = parts[split][index], parts[split].places(index)
            assert int(sample["labels"]) == sum(place.label for place in places)
            assert sample["pixel_values"].shape == (3, 64, 64)
            for place in places:
                assert _shows(sample["pixel_values"], place, parts[split].digits)
                assert not _shows(sample["pixel_values"], place, parts[other].digits)


def test_digits_do_not_overlap_and_lie_in_the_picture():
    data = SumsOfDigits("train", 300, 64, seed=0)
    places = [data.places(index) for index in range(len(data))]
    for pair in places:
        covered = torch.zeros(64, 64)
        for place in pair:
            covered[place.top : place.top + SIZE, place.left : place.left + SIZE] += 1
        assert covered.max() == 1 and covered.sum() == 2 * SIZE**2
    assert {sum(place.label for place in pair) for pair in places} == set(range(SUMS))
    assert not any(side % STEP for pair in places for place in pair for side in (place.top, place.left))


def test_the_same_seed_gives_the_same_pictures():
    first, again, other = (SumsOfDigits("train", 3, 64, seed=seed)[2]["pixel_values"] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    with pytest.raises(ValueError, match="size=40 is too small for two digits at any places"):
        SumsOfDigits("train", 1, 40, seed=0)


def test_classes_of_a_folder_are_its_subfolders_in_order(tmp_path):
    data = ImageFolder(write_folder(tmp_path, {"b": 2, "a": 1, "c": 1}), CentreView(4, pixels=PLAIN))
    assert data.classes == ["a", "b", "c"]
    assert [int(data[index]["labels"]) for index in range(len(data))] == [0, 1, 1, 2]
    torch.testing.assert_close(data[3]["pixel_values"][:, 0, 0], torch.tensor(RED) / 255)


def test_labels_follow_the_classes_that_are_given(tmp_path):
    folder = write_folder(tmp_path, {"b": 2, "c": 1})
    data = ImageFolder(folder, CentreView(4), ["c", "b"])
    assert [int(data[index]["labels"]) for index in range(len(data))] == [0, 1, 1]
    with pytest.raises(ValueError, match="a, d are in one of the two alone"):
        ImageFolder(write_folder(tmp_path / "other", {"b": 1, "c": 1, "d": 1}), CentreView(4), ["a", "b", "c"])


def test_a_picture_of_a_folder_costs_few_bytes(tmp_path):
    """ImageNet has 1,281,167 of them, in every process that reads."""
    (tmp_path / "class").mkdir()
    for index in range(300):
        (tmp_path / "class" / f"n01440764_{index:05}.png").touch()
    tracemalloc.start()
    data = ImageFolder(tmp_path, CentreView(4))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(data) == 300 and held / 300 < 60


def test_the_middle_of_a_picture_is_what_is_judged():
    """Of 12 x 8 pixels the middle 8 x 8, of which the half is 4 x 4: rows 2 to 5, columns 4 to 7."""
    picture = Image.new("RGB", (12, 8))
    picture.paste(RED, (4, 2, 8, 6))
    whole, half = (CentreView(4, crop, PLAIN)(picture) for crop in (1.0, 0.5))
    assert half[0].min() > 0.99 and half[1:].max() < 0.01
    assert whole[0, 0].max() < 0.2 and whole[0, 1:3, 1:3].min() > 0.5
    mean = CentreView(4, 0.5, Normalised((0.5, 0.5, 0.5), (0.25, 0.5, 0.5)))(picture)
    torch.testing.assert_close(mean[:, 0, 0], torch.tensor([2.0, -1.0, -1.0]), atol=0.02, rtol=0)


def test_a_random_view_is_a_part_of_the_picture_that_follows_from_torch_s_seed():
    """Of a ramp from left to right every view is a ramp, and some are turned."""
    picture = Image.linear_gradient("L").rotate(90).convert("RGB")
    torch.manual_seed(0)
    views = torch.stack([RandomView(8, PLAIN)(picture) for _ in range(20)])
    slopes = views[:, 0, 4, -1] - views[:, 0, 4, 0]
    assert slopes.min() < -0.1 and slopes.max() > 0.1
    assert slopes.abs().std() > 0.05  # of different widths
    torch.manual_seed(0)
    assert torch.equal(RandomView(8, PLAIN)(picture), views[0])


@pytest.mark.parametrize("crop", [0, -0.5, 1.5, float("nan")])
def test_a_crop_that_is_no_part_of_a_picture(crop):
    with pytest.raises(ValueError, match=f"crop={crop} must be above 0 and at most 1"):
        CentreView(4, crop)


def test_a_damaged_picture_and_a_folder_without_any_are_named(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, {"a": 1})
    (folder / "a" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(UnreadablePictureError, match="broken.png cannot be read as a picture"):
        ImageFolder(folder, CentreView(4))[1]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # of 256, more than twice as many
    with pytest.raises(UnreadablePictureError, match=r"0.png cannot be read as a picture: .*bomb"):
        ImageFolder(folder, CentreView(4))[0]
    with pytest.raises(FileNotFoundError, match="has no subfolder per class with pictures"):
        ImageFolder(folder / "a", CentreView(4))
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        ImageFolder(folder / "no", CentreView(4))


def _halves(count: int = 2):
    """Pictures that are all 0 or all 1, of the classes 0 and 1."""
    return [{"pixel_values": torch.full((3, 8, 8), float(i)), "labels": torch.tensor(i)} for i in range(count)]


def test_smoothed_labels():
    labels = SoftLabels(5, smoothing=0.1)(_halves())["labels"]
    torch.testing.assert_close(labels, torch.tensor([[0.92, *[0.02] * 4], [0.02, 0.92, *[0.02] * 3]]))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_shared_as_pixels_are(kind):
    torch.manual_seed(0)
    shares = []
    for _ in range(10):
        batch = SoftLabels(2, **{kind: 1.0})(_halves())
        own = 1 - batch["pixel_values"][0].mean()
        torch.testing.assert_close(
            batch["labels"], torch.stack([torch.stack([own, 1 - own]), torch.stack([1 - own, own])])
        )
        if kind == "cutmix":
            assert set(batch["pixel_values"].unique().tolist()) <= {0.0, 1.0}
        shares.append(float(own))
    assert min(shares) < 0.4 and max(shares) > 0.6


def test_the_loss_is_the_mean_over_the_pictures_of_a_step():
    """However many batches it has; Trainer counts every class of a label."""
    logits, labels = torch.randn(6, 4), torch.rand(6, 4).softmax(dim=-1)

    def loss(part, count):
        return soft_cross_entropy(type("Outputs", (), {"logits": logits[part]}), labels[part], count)

    expected = cross_entropy(logits, labels)
    torch.testing.assert_close(loss(slice(None), None), expected)
    torch.testing.assert_close(loss(slice(0, 4), torch.tensor(24)) + loss(slice(4, 6), torch.tensor(24)), expected)
