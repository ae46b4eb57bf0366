"""The presets and patch files."""

import pytest

from mhla_diffusers import apply_mhla, mhla_layers, patch_names
from mhla_diffusers.config import load_patch
from mhla_diffusers.families import families

from . import models


def test_the_promised_patches_are_there():
    assert set(patch_names()) >= {
        "wan2.1-t2v-1.3b",
        "wan2.1-t2v-1.3b-hybrid",
        "wan2.1-t2v-14b",
        "wan2.1-i2v-14b-480p",
        "wan2.2-t2v-a14b",
        "sana-0.6b",
        "sana-1.6b",
        "dit-xl-2-256",
        "dit-xl-2-512",
        "flux.1-dev",
        "sd3.5-large",
        "qwen-image",
        "hunyuanvideo",
        "cogvideox-5b",
        "ltx-video",
        "sana-video-2b",
    }


@pytest.mark.parametrize("name", patch_names())
def test_every_patch_opens_and_fits_its_family(name):
    patch = load_patch(name)
    family = next(family for family in families() if family.name == patch.family)
    assert len(patch.config.blocks) == family.axes
    assert patch.base_model.count("/") == 1


def test_a_patch_by_name_and_by_path(tmp_path):
    model = apply_mhla(models.wan(), "wan2.1-t2v-1.3b-hybrid")
    assert list(mhla_layers(model)) == ["blocks.1.attn1.mhla", "blocks.2.attn1.mhla"]
    path = tmp_path / "own.yaml"
    path.write_text(
        "family: wan\nbase_model: me/mine\ndescription: own\nmhla: {blocks: [2, 2, 2], layers: [0], eps: 1e-5}\n"
    )
    model = apply_mhla(models.wan(), path)
    assert list(mhla_layers(model)) == ["blocks.0.attn1.mhla"]
    assert mhla_layers(model)["blocks.0.attn1.mhla"].config.eps == 1e-5


def test_settings_replace_those_of_a_patch():
    model = apply_mhla(models.wan(), "wan2.1-t2v-1.3b-hybrid", sparse="none", blocks=(1, 2, 2), layers="all")
    assert {layer.config.blocks for layer in mhla_layers(model).values()} == {(1, 2, 2)}
    assert len(mhla_layers(model)) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("family: wan\n", "missing: base_model, description, mhla"),
        ("family: wan\nbase_model: a\ndescription: b\nmhla: {blocks: [1]}\nextra: 1\n", "unknown: extra"),
        ("family: wan\nbase_model: a\ndescription: b\nmhla: {block: [1]}\n", "'block'; did you mean 'blocks'"),
        ("family: wan\nbase_model: a\ndescription: b\nmhla: 3\n", "mhla must hold settings"),
        ("- 1\n", "missing: base_model"),
        ("{", "own.yaml"),
    ],
)
def test_bad_files_are_named(tmp_path, text, words):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_patch(path)


def test_unknown_patches_give_the_nearest_names(tmp_path):
    with pytest.raises(ValueError, match=r"Unknown patch 'zzz'\. Presets: cogvideox-5b, dit-xl-2-256, "):
        load_patch("zzz")
    with pytest.raises(ValueError, match="is a folder; open a saved patch with load_mhla"):
        load_patch(str(tmp_path))
    with pytest.raises(ValueError, match=r"Unknown patch 'wan2.1-t2v-1.3'; did you mean 'wan2.1-t2v-1.3b'"):
        load_patch("wan2.1-t2v-1.3")
    with pytest.raises(ValueError, match=r"Unknown patch 'tiny-wan-exakt'; did you mean 'tiny-wan-exact'"):
        load_patch("tiny-wan-exakt")
    with pytest.raises(FileNotFoundError, match="nowhere.yaml does not exist"):
        load_patch(tmp_path / "nowhere.yaml")


def test_a_patch_of_another_family_is_refused():
    model = models.wan()
    with pytest.raises(ValueError, match="patch is for the 'sana' family .* but the model belongs to 'wan'"):
        apply_mhla(model, "sana-0.6b")
    assert not mhla_layers(model)
