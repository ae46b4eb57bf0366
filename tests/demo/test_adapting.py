"""How the adapted patches that ship were made, with a few updates in place of hundreds."""

import json
import shutil

import pytest
import torch

from mhla_diffusers import config, load_mhla, mhla_layers
from mhla_diffusers.demo import adapting
from mhla_diffusers.demo import variants as settings
from mhla_diffusers.demo.adapting import RECORD, Adapting
from mhla_diffusers.tiny import TINY, load_tiny, loading


@pytest.fixture
def quick(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "TRANSFER_STEPS", 1)
    monkeypatch.setattr(settings, "END_TO_END_STEPS", 1)
    monkeypatch.setattr(adapting, "HELD_OUT", 2)
    return Adapting(TINY["dit"], tmp_path / "run", seed=3, samples=16)


def test_a_patch_is_made_recorded_kept_and_installed(quick, tmp_path, monkeypatch):
    control, *_, exact = settings.variants(TINY["dit"])
    made = {variant.short: quick.make(variant) for variant in (control, exact)}
    record = json.loads((made["exact"] / RECORD).read_text())
    assert [step for step, _ in record["held-out loss by update"]] == [0, 2]
    assert record["held-out loss"] == pytest.approx(record["held-out loss by update"][-1][1], rel=1e-5)
    assert record["held-out loss in half precision, as it ships"] == pytest.approx(record["held-out loss"], rel=1e-2)
    assert "--seed 3" in record["command"]
    # what is finished is taken from the folder
    monkeypatch.setattr(quick.adaptation.__class__, "adapt", None)
    assert quick.make(exact) == made["exact"]

    shipped, assets = tmp_path / "patches", tmp_path / "assets"
    shipped.mkdir()
    assets.mkdir()
    monkeypatch.setattr(adapting, "patch_folder", lambda: shipped)
    monkeypatch.setattr(config, "patch_folder", lambda: shipped)
    whole = loading.ASSET_FOLDER
    monkeypatch.setattr(loading, "ASSET_FOLDER", assets)
    monkeypatch.setattr(loading, "CHECKSUM_FILE", assets / "checksums.json")
    shutil.copytree(whole / "tiny-dit", assets / "tiny-dit")
    adapting.install("dit", tmp_path / "run")
    assert config.adapted_patch_names() == ["tiny-dit-exact"]
    pipe = load_mhla(load_tiny("dit"), "tiny-dit-exact")
    assert len(mhla_layers(pipe)) == 4
    control, before = (load_tiny("dit", control=wanted).transformer.state_dict() for wanted in (True, False))
    changed = {name for name, tensor in control.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".attn1." in name for name in changed)
    (assets / "tiny-dit-control.safetensors").write_bytes(b"x")
    with pytest.raises(loading.DamagedAssetError, match=r"tiny-dit-control.safetensors \(damaged\)"):
        load_tiny("dit", control=True)


def test_unknown_variants_are_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["adapting", "dit", "--only", "best", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        adapting.main()
    assert "--only best: allowed: control, linear, mhla, hybrid, exact" in capsys.readouterr().err
