"""What classifiers are trained on and judged on: pictures of two digits, folders of classes, and soft labels."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, interpolate

from mhla_diffusers.generation.pixels import UnreadableMediaError

from ..refusals import refused
from ..scripts import script

classify = script("classify")
View, ImageFolder, SumsOfDigits, SIZE = classify.View, classify.ImageFolder, classify.SumsOfDigits, classify.SIZE

RED = (255, 0, 0)
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def write_folder(folder: Path, counts: dict[str, int]) -> Path:
    """Red pictures of 16 x 16 pixels, so many of every class."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (16, 16), RED).save(folder / name / f"{index}.png")
    return folder


def shows(picture, place, digits):
    """Whether one of the digits is what the picture has there."""
    top, left, label = place
    found = (picture[0, top : top + SIZE, left : left + SIZE] + 1) / 2
    drawn = interpolate(digits.images[digits.labels == label][:, None], size=(SIZE, SIZE), mode="bilinear")[:, 0]
    return bool((drawn - found).abs().amax(dim=(1, 2)).min() < 1e-6)  # of the way to [-1, 1] and back


def test_a_picture_s_class_is_the_sum_of_the_digits_it_shows_and_splits_share_none():
    parts = {split: SumsOfDigits(split, 12, 64, seed=3) for split in ("train", "held-out")}
    for split, other in (("train", "held-out"), ("held-out", "train")):
        for index in range(12):
            sample, places = parts[split][index], parts[split].places(index)
            assert int(sample["labels"]) == sum(label for _, _, label in places)
            assert sample["pixel_values"].shape == (3, 64, 64)
            for place in places:
                assert shows(sample["pixel_values"], place, parts[split].digits)
                assert not shows(sample["pixel_values"], place, parts[other].digits)
    first, again, other = (SumsOfDigits("train", 3, 64, seed=seed)[2]["pixel_values"] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_digits_do_not_overlap_and_lie_in_the_picture():
    data = SumsOfDigits("train", 300, 64, seed=0)
    pairs = [data.places(index) for index in range(len(data))]
    for pair in pairs:
        covered = torch.zeros(64, 64)
        for top, left, _ in pair:
            covered[top : top + SIZE, left : left + SIZE] += 1
            assert top % classify.STEP == left % classify.STEP == 0
        assert covered.max() == 1 and covered.sum() == 2 * SIZE**2
    assert {one[2] + other[2] for one, other in pairs} == set(range(classify.SUMS))


def test_labels_are_the_order_of_the_subfolders_or_of_the_classes_that_are_given(tmp_path):
    folder = write_folder(tmp_path, {"b": 2, "a": 1, "c": 1})
    data = ImageFolder(folder, View(4, **PLAIN))
    assert [int(data[index]["labels"]) for index in range(len(data))] == [0, 1, 1, 2]
    torch.testing.assert_close(data[3]["pixel_values"][:, 0, 0], torch.tensor(RED) / 255)
    data = ImageFolder(folder, View(4), ["c", "b", "a"])
    assert [int(data[index]["labels"]) for index in range(len(data))] == [0, 1, 1, 2]
    with refused("a, d"):
        ImageFolder(folder, View(4), ["b", "c", "d"])


def test_a_picture_of_a_folder_costs_few_bytes(tmp_path):
    """ImageNet has 1,281,167 of them, in every process that reads."""
    (tmp_path / "class").mkdir()
    for index in range(300):
        (tmp_path / "class" / f"n01440764_{index:05}.png").touch()
    tracemalloc.start()
    data = ImageFolder(tmp_path, View(4))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(data) == 300 and held / 300 < 60


def test_the_middle_of_a_picture_is_what_is_judged():
    """The middle of 12 x 8 pixels is 8 x 8, and half of it 4 x 4: rows 2 to 5, columns 4 to 7."""
    picture = Image.new("RGB", (12, 8))
    picture.paste(RED, (4, 2, 8, 6))
    whole, half = (View(4, crop, **PLAIN)(picture) for crop in (1.0, 0.5))
    assert half[0].min() > 0.99 and half[1:].max() < 0.01
    assert whole[0, 0].max() < 0.2 and whole[0, 1:3, 1:3].min() > 0.5
    normalised = View(4, 0.5, (0.5, 0.5, 0.5), (0.25, 0.5, 0.5))(picture)
    torch.testing.assert_close(normalised[:, 0, 0], torch.tensor([2.0, -1.0, -1.0]), atol=0.02, rtol=0)


def test_a_random_view_is_a_part_of_the_picture_that_follows_from_torch_s_seed():
    """Every view of a ramp from left to right is a ramp, and some are turned."""
    picture = Image.linear_gradient("L").rotate(90).convert("RGB")
    torch.manual_seed(0)
    views = torch.stack([View(8, None, **PLAIN)(picture) for _ in range(20)])
    slopes = views[:, 0, 4, -1] - views[:, 0, 4, 0]
    assert slopes.min() < -0.1 and slopes.max() > 0.1
    assert slopes.abs().std() > 0.05  # of different widths
    torch.manual_seed(0)
    assert torch.equal(View(8, None, **PLAIN)(picture), views[0])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder: View(4, 1.5), ValueError, "crop=1.5"),
        (lambda folder: View(4, float("nan")), ValueError, "crop=nan"),
        (lambda folder: SumsOfDigits("train", 1, 40, seed=0), ValueError, "size=40 .* 48"),
        (lambda folder: ImageFolder(folder, View(4))[1], UnreadableMediaError, "broken.png"),
        (lambda folder: ImageFolder(folder, View(4))[0], UnreadableMediaError, "0.png .*bomb"),
        (lambda folder: ImageFolder(folder / "a", View(4)), FileNotFoundError, "a has"),
        (lambda folder: ImageFolder(folder / "no", View(4)), FileNotFoundError, "no;"),
    ],
)
def test_what_is_refused_of_pictures(tmp_path, monkeypatch, make, error, words):
    folder = write_folder(tmp_path, {"a": 1})
    (folder / "a" / "broken.png").write_bytes(b"no picture")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # of 256, more than twice as many
    with pytest.raises(error, match=words):
        make(folder)


def soft(classes, samples, **settings):
    config = type("Config", (), {"smoothing": 0.0, "mixup": 0.0, "cutmix": 0.0} | settings)
    return classify.make_batch(config, classes, {}, samples)


def halves():
    """Pictures that are all 0 or all 1, of the classes 0 and 1."""
    return [{"pixel_values": torch.full((3, 8, 8), float(i)), "labels": torch.tensor(i)} for i in range(2)]


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_smoothed_and_shared_as_pixels_are(kind):
    labels = soft(5, halves(), smoothing=0.1)["labels"]
    torch.testing.assert_close(labels, torch.tensor([[0.92, *[0.02] * 4], [0.02, 0.92, *[0.02] * 3]]))
    torch.manual_seed(0)
    shares = []
    for _ in range(10):
        batch = soft(2, halves(), **{kind: 1.0})
        own = 1 - batch["pixel_values"][0].mean()
        torch.testing.assert_close(batch["labels"], torch.tensor([[own, 1 - own], [1 - own, own]]))
        if kind == "cutmix":
            assert set(batch["pixel_values"].unique().tolist()) <= {0.0, 1.0}
        shares.append(float(own))
    assert min(shares) < 0.4 and max(shares) > 0.6


def test_the_loss_is_the_mean_over_the_pictures_of_a_step():
    """However many batches it has; Trainer counts every class of a label."""
    logits, labels = torch.randn(6, 4), torch.rand(6, 4).softmax(dim=-1)

    def loss(part, count):
        outputs = type("Outputs", (), {"logits": logits[part]})
        return classify.soft_cross_entropy(outputs, labels[part], count)

    expected = cross_entropy(logits, labels)
    torch.testing.assert_close(loss(slice(None), None), expected)
    torch.testing.assert_close(loss(slice(0, 4), torch.tensor(24)) + loss(slice(4, 6), torch.tensor(24)), expected)
