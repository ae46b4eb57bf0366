"""Features of images: Inception's weights, and callables of one's own."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Dinov2Config, Dinov2Model

from mhla_diffusers.evaluation.extractors import CleanInception, Extractor, load_extractor
from mhla_diffusers.evaluation.fid import measure_images
from mhla_diffusers.generation.record import write_video

from ..refusals import refused
from .pictures import blocks, mhla, write_pictures
from .test_compare import write_set


@pytest.mark.parametrize(
    ("choice", "weights", "error", "message"),
    [
        ("adm", None, FileNotFoundError, "https://.*6726825d.pth"),
        ("clean", Path("inception-2015-12-05.pt"), FileNotFoundError, "https://.*inception-2015-12-05.pt"),
        ("dinov2", None, FileNotFoundError, "facebook/dinov2-large"),
        ("vgg", None, ValueError, "'vgg'"),
        ("tests.evaluation.pictures:none", None, ValueError, "'none'"),
        ("tests.evaluation.pictures:blocks", Path("x"), ValueError, "x"),
    ],
)
def test_extractors_that_are_not_there_are_refused(choice, weights, error, message):
    with pytest.raises(error, match=message):
        load_extractor(choice, weights)


def one_number(*arguments):
    return 3


def one_row(*arguments):
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_number", "must return a tensor of .* rows for .* samples, got int"),
        ("one_row", r"must return a tensor of .* rows for .* samples, got \(1,\)"),
    ],
)
def test_callables_of_a_user_that_fail_are_named(tmp_path, name, message):
    plug = f"tests.evaluation.test_extractors:{name}"
    sets = [write_set(tmp_path / name, 128) for name in ("a", "b")]
    for command in (("fid", *sets, "--extractor", plug), ("compare", *sets, "--score", f"own={plug}")):
        ended = mhla("eval", *command)
        assert isinstance(ended.exception, ValueError), ended.exception
        assert re.search(message, str(ended.exception))


def test_extractor_of_digits_takes_mixed_sizes_and_folders_of_videos(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("av")
    mixed = write_pictures(tmp_path / "mixed", 4, size=64)
    (tmp_path / "videos").mkdir()
    write_pictures(mixed / "more", 2, size=48)
    for number in range(3):
        noise = torch.rand(5, 32, 32, 3, generator=torch.Generator().manual_seed(number))
        write_video(noise, tmp_path / "videos" / f"{number}.mp4", 6)
    for folder, count in ((mixed, 6), (tmp_path / "videos", 3)):
        shown = mhla("eval", "fid", folder, mixed, "--extractor", "mhla_diffusers.demo.judging:picture_features")
        assert shown.exit_code == 0, shown.exception
        assert f"samples: {count}" in shown.output


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
    images = torch.full((2, 3, 20, 30), 192, dtype=torch.uint8)
    assert torch.equal(CleanInception(scripted_weights)(images), torch.full((2, 2048), 0.5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_clean_fid_agrees(scripted_weights, tmp_path):
    try:
        from cleanfid import fid
    except ImportError as error:
        pytest.skip(f"clean-fid cannot be imported here: {error}")
    folders = write_pictures(tmp_path / "made", 80), write_pictures(tmp_path / "real", 90, seed=1, brightness=140)
    extractor = CleanInception(scripted_weights)
    theirs = fid.compute_fid(
        *map(str, folders),
        custom_feat_extractor=lambda x: blocks(x).pooled,
        num_workers=0,
        device=torch.device("cpu"),
        verbose=False,
    )

    def resized(images):
        bicubic = [torch.from_numpy(extractor.resize(image)) for image in images.permute(0, 2, 3, 1).numpy()]
        return blocks(torch.stack(bicubic).permute(0, 3, 1, 2)).pooled

    ours = measure_images(*folders, Extractor(resized, "resized", ""))
    assert ours["fid"] == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        (lambda x: {name: value for name, value in x.items() if name != "layernorm.bias"}, "lack layernorm.bias"),
        (lambda x: {**x, "encoder.layer.2.norm1.bias": torch.ones(32)}, "encoder.layer.2.norm1.bias"),
        (lambda x: {**x, "layernorm.bias": torch.ones(3)}, "shape of layernorm.bias"),
        (None, "damaged"),
    ],
)
def test_dinov2_with_other_weights_than_its_own_is_refused_and_so_are_videos(tmp_path, wrong, value):
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path)
    with refused("(1, 5, 3, 8, 8)"):
        load_extractor("dinov2", tmp_path).features(torch.zeros(1, 5, 3, 8, 8, dtype=torch.uint8))
    file = tmp_path / "model.safetensors"
    if wrong is None:
        file.write_bytes(file.read_bytes()[:-100])
    else:
        save_file(wrong(load_file(file)), file, {"format": "pt"})
    with pytest.raises(ValueError, match=value):
        load_extractor("dinov2", tmp_path)


def test_dinov2_names_its_size_and_takes_the_class_token_of_a_normalised_picture(tmp_path):
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14)
    model = Dinov2Model(config).eval()
    model.save_pretrained(tmp_path / "model")
    folder = write_pictures(tmp_path / "pictures", 3, size=64)
    shown = mhla("eval", "fid", folder, folder, "--extractor", "dinov2", "--weights", tmp_path / "model")
    assert shown.exit_code == 0, shown.exception
    assert "2 layers, 32 wide, patches of 14" in shown.output
    grey = torch.full((1, 3, 20, 30), 124, dtype=torch.uint8)
    pixels = (grey[:, :, :1, :1] / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    expected = model(pixels.expand(-1, -1, 224, 224)).last_hidden_state[:, 0]
    found = load_extractor("dinov2", tmp_path / "model").features(grey)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # float32, sums in another order


def test_callables_of_the_current_folder_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "features_here.py").write_text("def features(x):\n    return x.float().mean(dim=(2, 3))\n")
    folder = write_pictures(tmp_path / "pictures", 12)
    shown = mhla("eval", "fid", folder, folder, "--extractor", "features_here:features")
    assert shown.exit_code == 0, shown.exception


def test_statistics_of_a_reference_are_not_those_of_changed_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_pictures(tmp_path / "pictures", 12, size=16)
    code = tmp_path / "own_features.py"
    for factor in (1, 1000):
        code.write_text(f"def features(x):\n    return {factor} * x.float().mean(dim=(2, 3))\n")
        sys.modules.pop("own_features", None)
        importlib.invalidate_caches()
        shown = mhla("eval", "fid", folder, folder, "--extractor", "own_features:features")
        assert shown.exit_code == 0, shown.exception
        fid = float(re.search(r"fid: (\S+)", shown.output)[1])
        assert abs(fid) < 1e-3, f"{fid}: statistics of the code before"
