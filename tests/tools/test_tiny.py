"""How the tiny pipelines and their adapted patches are made, with a few steps in place of thousands."""

import json
import random
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusers import config, load_mhla
from mhla_diffusers.patching import find_patched
from mhla_diffusers.tiny import load_tiny, loading
from mhla_diffusers.training import TrainingConfig
from studies.adaptation import adaptation
from studies.adaptation.digits import TINY, load_digits
from studies.adaptation.judging import generate_scenes, load_classifier

from ..scripts import CONFIGS, load_script, run_script


@pytest.fixture
def making(monkeypatch):
    script = load_script("tools/make_tiny.py", monkeypatch)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    return script


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """An empty asset folder."""
    folder = tmp_path / "assets"
    folder.mkdir()
    monkeypatch.setattr(loading, "ASSET_FOLDER", folder)
    return folder


def quick(making, family, scenes, *phases):
    class Quick(type(making.RECIPES[family])):
        autoencoder_steps = 2
        training_scenes = scenes
        training_settings = {}  # one process has one precision

    Quick.phases = phases
    return Quick()


def test_a_pipeline_is_made_kept_and_installed(making, tmp_path, monkeypatch, assets):
    recipe = quick(making, "dit", 8, making.Phase("whole", 2, 4, 1e-3))
    made = making.train_pipeline(recipe, tmp_path / "run")
    # what is finished is taken from the folder, so that nothing of it changes
    monkeypatch.setattr(making, "train_autoencoder", None)
    monkeypatch.setattr(making, "train", None)
    again = making.train_pipeline(recipe, tmp_path / "run")
    for name in ("transformer", "vae"):
        for key, value in getattr(made, name).state_dict().items():
            assert torch.equal(value, getattr(again, name).state_dict()[key])
    making.install_pipeline("dit", tmp_path / "run")
    assert not [file for file in assets.glob("*/*/config.json") if "_name_or_path" in file.read_text()]
    pipe, tiny = load_tiny("dit"), TINY["dit"]
    (picture,) = generate_scenes(pipe, tiny, [tiny.random_scene(random.Random(0))], seed=0, num_inference_steps=2)
    assert picture.shape == (1, 64, 64)


def settings(part):
    learned = {"scaling_factor", "latents_mean", "latents_std"}
    found = json.loads(part.to_json_string())
    return {key: value for key, value in found.items() if not key.startswith("_") and key not in learned}


def shapes(part):
    return {key: value.shape for key, value in part.state_dict().items()}


def test_the_long_pipeline_is_the_short_one_trained_on(making, tmp_path):
    pipe = making.train_pipeline(quick(making, "wan-long", 1, making.Phase("single", 1, 2, 1e-3, frames=1)), tmp_path)
    for name in ("transformer", "vae", "text_encoder"):
        own, short = (getattr(x, name).state_dict() for x in (pipe, load_tiny("wan")))
        changed = {key for key, value in own.items() if not torch.equal(value, short[key])}
        assert bool(changed) == (name == "transformer")


@pytest.mark.parametrize("family", TINY)
def test_a_recipe_builds_what_is_shipped(making, family):
    recipe, pipe = making.RECIPES[family], load_tiny(family)
    for built, shipped in ((recipe.build_transformer(), pipe.transformer), (recipe.build_autoencoder(), pipe.vae)):
        assert settings(built) == settings(shipped)
        assert shapes(built) == shapes(shipped)
    assert settings(recipe.build_scheduler()) == settings(pipe.scheduler)
    assert type(pipe).__bases__ == (type(recipe.assemble(pipe.components)),)
    if not recipe.text_marks:
        return
    assert shapes(recipe.build_text_encoder(pipe.tokenizer)) == shapes(pipe.text_encoder)
    tokenizer, captions = making.build_tokenizer(recipe), [s.caption for s in making.all_scenes(recipe.tiny)]
    assert max(map(len, tokenizer(captions).input_ids)) <= recipe.tiny.call_settings["max_sequence_length"]
    assert tokenizer(captions).input_ids == pipe.tokenizer(captions).input_ids
    assert tokenizer.decode(tokenizer("zwölf 🙂").input_ids, skip_special_tokens=True).strip() == "zwölf 🙂"


def test_the_classifier_that_ships_reaches_its_target(making):
    crops, labels = making.real_crops(load_digits("held-out"), seed=1)
    with torch.no_grad():
        accuracy = (load_classifier()(crops).argmax(dim=1) == labels).float().mean()
    assert accuracy >= 0.97


def test_a_patch_is_adapted_recorded_kept_and_installed(tmp_path, monkeypatch, assets):
    script = load_script("tools/adapt_tiny.py", monkeypatch)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    monkeypatch.setattr(script, "SAMPLES", 16)
    for name in ("TRANSFER_STEPS", "END_TO_END_STEPS"):
        monkeypatch.setattr(adaptation, name, 1)
    shipped, control = tmp_path / "patches", tmp_path / "control.safetensors"
    shipped.mkdir()
    monkeypatch.setattr(script, "control_file", lambda _: control)
    monkeypatch.setattr(script, "patch_folder", lambda: shipped)
    monkeypatch.setattr(config, "patch_folder", lambda: shipped)
    shutil.copytree(Path(loading.__file__).parent / "assets" / "tiny-dit", assets / "tiny-dit")
    asked = ("dit", "--seed", 3, "--only", "control", "sparse", "--output", tmp_path / "run")
    run_script(script, monkeypatch, *asked)
    folder = tmp_path / "run" / "patches" / "tiny-dit-sparse"
    record = json.loads((folder / adaptation.ADAPTED_RECORD).read_text())
    assert [step for step, _ in record["held-out loss by update"]] == [0, 1, 2]
    assert record["held-out loss"] == pytest.approx(record["held-out loss by update"][-1][1], rel=1e-5)
    assert record["held-out loss in half precision, as it ships"] == pytest.approx(record["held-out loss"], rel=1e-2)
    assert "--seed 3" in record["command"]
    # what is finished is taken from the folder
    monkeypatch.setattr(script.Adaptation, "adapt", None)
    run_script(script, monkeypatch, *asked, "--install")
    assert list(config.adapted_patches()) == ["tiny-dit-sparse"]
    (patched,) = find_patched(load_mhla(load_tiny("dit"), "tiny-dit-sparse")).values()
    assert len(patched.chosen) == 4
    before = load_tiny("dit").transformer.state_dict()
    changed = {name for name, tensor in load_file(control).items() if not torch.equal(tensor, before[name])}
    assert changed and all(".attn1." in name for name in changed)


def test_the_causal_patch_ships_adapted_by_the_configuration_that_ships(monkeypatch):
    script, tiny = load_script("tools/adapt_tiny.py", monkeypatch), TINY["wan"]
    variant, (settings,) = script.variants_that_ship(tiny)["causal"]
    shipped = TrainingConfig.from_yaml(CONFIGS / "tiny-wan-causal.yaml")
    assert variant.patch == shipped.patch
    assert settings == {name: getattr(shipped, name) for name in settings}
    held_out = adaptation.Adaptation(tiny, 1, 4, seed=3)
    pipes = adaptation.load_variant(tiny, variant), held_out.patched(variant.patch)
    adapted, fresh = (fmean(held_out.held_out_losses(pipe)) for pipe in pipes)
    assert adapted < fresh
