"""Features of images: against clean-fid and torch-fidelity where they can be imported, and callables of one's own."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from mhla_diffusers.evaluation.extractors import load_extractor
from mhla_diffusers.evaluation.fid import measure_images

from .pictures import mhla, write_pictures


@pytest.mark.parametrize(
    ("choice", "weights", "error", "message"),
    [
        ("adm", None, FileNotFoundError, "https://.*6726825d.pth"),
        ("clean", Path("inception-2015-12-05.pt"), FileNotFoundError, "https://.*inception-2015-12-05.pt"),
        ("vgg", None, ValueError, "'vgg'"),
        ("tests.evaluation.pictures:none", None, ValueError, "'none'"),
        ("tests.evaluation.pictures:blocks", Path("x"), ValueError, "x"),
    ],
)
def test_extractors_that_are_not_there_are_refused(choice, weights, error, message):
    with pytest.raises(error, match=message):
        load_extractor(choice, weights)


def require(*modules):
    """Import packages that need a torchvision which fits torch, or skip."""
    try:
        return [import_module(name) for name in modules]
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{modules[0]} cannot be imported here: {error}")


class Layers(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images, (32, 64)).mean(dim=1).flatten(1)


class ScriptedInception(torch.nn.Module):
    """Has what clean-fid uses of the real file."""

    def __init__(self):
        super().__init__()
        self.layers = Layers()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_clean_fid_agrees(tmp_path):
    fid, inception = require("cleanfid.fid", "cleanfid.inception_torchscript")
    torch.jit.save(torch.jit.script(ScriptedInception()), tmp_path / "inception-2015-12-05.pt")
    folders = write_pictures(tmp_path / "made", 80, size=20), write_pictures(tmp_path / "real", 90, 1, 140, size=24)
    model = inception.InceptionV3W(str(tmp_path), download=False)
    features = [
        fid.get_folder_features(str(x), model, num_workers=0, device="cpu", mode="clean", verbose=False)
        for x in folders
    ]
    expected = fid.fid_from_feats(*features)
    found = measure_images(*folders, load_extractor("clean", tmp_path / "inception-2015-12-05.pt"))
    assert found["fid"] == pytest.approx(expected, rel=1e-4)


def test_torch_fidelity_agrees(tmp_path, monkeypatch):
    """With an Inception of random weights."""
    (fidelity,) = require("torch_fidelity")
    file = tmp_path / "weights-inception-2015-12-05-6726825d.pth"
    torch.manual_seed(0)
    with monkeypatch.context() as context:
        context.setattr(torch, "load", lambda *given, **named: {})
        context.setattr(torch.nn.Module, "load_state_dict", lambda *given, **named: None)
        file.touch()
        model = fidelity.FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=str(file))
    torch.save(model.state_dict(), file)
    folders = write_pictures(tmp_path / "made", 12, size=32), write_pictures(tmp_path / "real", 12, 1, 60, size=32)
    expected = fidelity.calculate_metrics(
        **{"input1": str(folders[0]), "input2": str(folders[1]), "fid": True},
        **{"cuda": False, "verbose": False, "cache": False, "feature_extractor_weights_path": str(file)},
        **{"save_cpu_ram": True},
    )
    found = measure_images(*folders, load_extractor("adm", file))
    assert found["fid"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-4)


def test_callables_of_the_current_folder_are_found_and_take_mixed_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "features_here.py").write_text("def features(x):\n    return x.float().mean(dim=(2, 3))\n")
    folder = write_pictures(tmp_path / "pictures", 4)
    write_pictures(folder / "more", 2, size=12)
    asked = ("--extractor", "features_here:features", "--output", "fid.json")
    shown = mhla("eval", "fid", folder, folder, *asked).output
    written = json.loads((tmp_path / "fid.json").read_text())
    assert "samples: 6" in shown and f"fid: {written['fid']:.4f}" in shown
