"""The presets and patch files."""

import pytest

from mhla_diffusers import SparseConfig, apply_mhla, mhla_layers
from mhla_diffusers.benchmark.cases import choose_cases
from mhla_diffusers.config import load_patch, patch_names
from mhla_diffusers.families import families

from . import models
from .refusals import refused


@pytest.mark.parametrize("name", patch_names())
def test_every_patch_opens_and_fits_its_family(name):
    patch = load_patch(name)
    family = next(family for family in families() if family.name == patch.family)
    assert patch.base_model.count("/") == 1
    if isinstance(patch.patch, SparseConfig):
        assert family.computes == "softmax"
        return
    assert len(patch.patch.blocks) == family.axes
    assert f"{name}-sparse" in patch_names() or family.computes != "softmax", "the other choice"


def test_a_patch_by_name_and_by_path(tmp_path):
    model = apply_mhla(models.wan(), "wan2.1-t2v-1.3b-hybrid", blocks=(1, 2, 2))  # a setting replaces the patch's
    assert list(mhla_layers(model)) == ["blocks.1.attn1.mhla", "blocks.2.attn1.mhla"]
    assert {layer.config.blocks for layer in mhla_layers(model).values()} == {(1, 2, 2)}
    path = tmp_path / "own.yaml"
    path.write_text(
        "family: wan\nbase_model: me/mine\ndescription: own\npatch: {blocks: [2, 2, 2], layers: [0], eps: 1e-5}\n"
    )
    model = apply_mhla(models.wan(), path)
    assert list(mhla_layers(model)) == ["blocks.0.attn1.mhla"]
    assert mhla_layers(model)["blocks.0.attn1.mhla"].config.eps == 1e-5


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ("", "description, patch"),
        ("patch: {block: [1]}", "'block'; .*'blocks'"),
        ("{", "YAML"),
    ],
)
def test_bad_files_are_named(tmp_path, patch, named):
    path = tmp_path / "own.yaml"
    path.write_text(f"family: wan\nbase_model: a\n{'description: b' if patch else ''}\n{patch}\n")
    with pytest.raises(ValueError, match=f"(?s)own.yaml.*{named}"):
        load_patch(path)


def test_unknown_patches_give_the_nearest_names_and_what_else_is_allowed(tmp_path):
    for name, words in (
        ("zzz", "'zzz'; ...`mhla info`"),
        ("faithfull", "'faithfull'; ...'faithful'"),
        (str(tmp_path), f"{tmp_path}...load_mhla"),
        ("wan2.1-t2v-1.3", "'wan2.1-t2v-1.3'; ...'wan2.1-t2v-1.3b'"),
        ("tiny-wan-mlha", "'tiny-wan-mlha'; ...'tiny-wan-mhla'"),
    ):
        with refused(words):
            load_patch(name)
    with refused("wan2.1") as raised:
        load_patch("wan2.1-t2v")
    assert len([one for one in patch_names() if repr(one) in str(raised.value)]) == 3
    with refused("`mhla info` lists all"):
        choose_cases("zzz")
    with refused("runs/first/result", "does not exist"):
        load_patch("runs/first/result")
    with refused("nowhere.yaml", error=FileNotFoundError):
        load_patch(tmp_path / "nowhere.yaml")
