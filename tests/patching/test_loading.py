"""What load_mhla refuses: damage of every kind, other formats, other models, and names."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mhla_diffusers import load_mhla, save_mhla
from mhla_diffusers.patching import PATCH_FILE

from .. import models
from ..refusals import refused
from .shared import assert_same_footprint, footprint
from .test_saving import adapted, shake

NAME = "transformer.blocks.1.attn1.mhla.mixing"


@pytest.fixture
def folder(tmp_path):
    """A saved patch with one adapted weight and bias of the model."""
    model = adapted("wan")
    shake(model.blocks[1].attn1.to_q)
    return save_mhla(model, tmp_path, weights="changed", base=models.wan())


def rewrite(folder, change=lambda tensors: None, record=lambda found: json.dumps(found)):
    """Change the saved tensors, and what is recorded beside them."""
    path = folder / PATCH_FILE
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        found = json.loads(file.metadata()["mhla"])
    change(tensors)
    save_file(tensors, path, metadata={"mhla": record(found)})


def change_record(folder, change):
    def record(found):
        change(found)
        return json.dumps(found)

    rewrite(folder, record=record)


def cut(folder):
    path = folder / PATCH_FILE
    path.write_bytes(path.read_bytes()[:-10])


def record(**entries):
    return lambda folder: change_record(folder, lambda found: found.update(entries))


def record_without(*path):
    def remove(found):
        for key in path[:-1]:
            found = found[key]
        found.pop(path[-1])

    return lambda folder: change_record(folder, remove)


def in_transformer(**entries):
    return lambda folder: change_record(folder, lambda found: found["transformers"]["transformer"].update(entries))


def settings(**entries):
    return lambda folder: change_record(
        folder, lambda found: found["transformers"]["transformer"]["patch"].update(entries)
    )


def tensors(change):
    return lambda folder: rewrite(folder, change)


def text(content):
    return lambda folder: rewrite(folder, record=lambda found: content)


DAMAGE = {
    # what is done to the folder, offending value
    "file cut": (cut, PATCH_FILE),
    "file gone": (lambda folder: (folder / PATCH_FILE).unlink(), "missing"),
    "tensor gone": (tensors(lambda found: found.pop(NAME)), "missing blocks.1.attn1.mhla.mixing"),
    "base weight gone": (
        tensors(lambda found: found.pop("transformer.blocks.1.attn1.to_q.bias")),
        "missing blocks.1.attn1.to_q.bias",
    ),
    "tensor more": (
        tensors(lambda found: found.update({"transformer.blocks.9.x": torch.ones(1)})),
        "unexpected blocks.9.x",
    ),
    "shape": (tensors(lambda found: found.update({NAME: torch.ones(2, 2)})), "(2, 2)...(2, 12, 12)"),
    "NaN": (tensors(lambda found: found[NAME].view(-1)[0].fill_(torch.nan)), NAME),
    "blocks": (settings(blocks=[4, 2, 3]), "(2, 12, 12)...(2, 24, 24)"),
    "other weights": (record(weights="mhla"), "unexpected blocks.1.attn1.to_q"),
    "base weights": (in_transformer(base_weights=["x"]), "missing x"),
    "an older version": (record(format_version=3), "format version 3 "),
    "a later version": (record(format_version=99), "format version 99 "),
    "key more": (record(more=1), "'more'"),
    "key gone": (record_without("base_model"), "base_model"),
    "weights": (record(weights="zzz"), "'zzz'"),
    "no transformers": (record(transformers={}), "transformers"),
    "no heads": (record_without("transformers", "transformer", "heads"), "transformers.transformer...heads"),
    "empty record": (text(""), PATCH_FILE),
    "record of a number": (text("3"), PATCH_FILE),
    "record cut": (text('{"a": '), PATCH_FILE),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_nothing_is_applied(case, folder):
    damage, value = DAMAGE[case]
    damage(folder)
    model = models.wan()
    before = footprint(model)
    with refused(value, error=FileNotFoundError if case == "file gone" else ValueError):
        load_mhla(model, folder)
    assert_same_footprint(model, before)


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(own, tmp_path):
    model, other = adapted("wan"), models.wan()
    attn = model.blocks[1].attn1
    save_mhla(model, tmp_path, weights="all")
    name = NAME if own else "transformer.blocks.1.attn1.to_q.weight"
    with torch.no_grad():
        (attn.mhla.mixing if own else attn.to_q.weight).view(-1)[:2] = torch.nan
    with refused(name, "2 of"):
        save_mhla(model, tmp_path, weights="all")
    rewrite(tmp_path, lambda found: found[name].view(-1)[:2].fill_(torch.inf))
    before = footprint(other)
    with refused(name, "2 of"):
        load_mhla(other, tmp_path)
    assert_same_footprint(other, before)


def test_wrong_models_are_refused_and_left_alone(folder):
    for model, words in [
        (models.wan_i2v(), "layers=4...3"),
        (models.wan_vace(), "'WanTransformer3DModel'...'WanVACETransformer3DModel'"),
        (models.sana(), "'WanTransformer3DModel'...'SanaTransformer2DModel'"),
        (models.patched("wan"), "already patched"),
    ]:
        before = footprint(model)
        with refused(words):
            load_mhla(model, folder)
        assert_same_footprint(model, before)


NAMES = [
    # what is asked for, the way out
    ("tiny-wan-mlha", FileNotFoundError, "tiny-wan-mlha...'tiny-wan-mhla'"),
    ("tiny-dit-mhla/", FileNotFoundError, "'tiny-dit-mhla'"),
    *((name, FileNotFoundError, name) for name in ("outputs/run/x", "/nowhere/patch", "some where/patch")),
    ("wan2.1-t2v-1.3b", ValueError, "apply_mhla(model, 'wan2.1-t2v-1.3b')"),
]


@pytest.mark.parametrize(("name", "error", "words"), NAMES, ids=lambda value: str(value)[:20])
def test_names_that_are_no_adapted_patch_are_answered_without_the_hub(name, error, words):
    with refused(words, error=error):
        load_mhla(models.wan(), name)


def test_a_relative_path_asks_no_hub(tmp_path, monkeypatch):
    """Where its folder is there; a revision says that the Hub is meant."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or "runs")
    with refused("runs has no first", "revision='main'", error=FileNotFoundError):
        load_mhla(models.wan(), "runs/first")
    assert not asked
    with refused(PATCH_FILE, error=FileNotFoundError):
        load_mhla(models.wan(), "runs/first", revision="main")
    assert asked == ["runs/first"]


@pytest.mark.parametrize(("came_from", "warns"), [("owner/another", True), ("owner/made-for", False), ("", False)])
def test_a_patch_of_another_checkpoint_warns(tmp_path, came_from, warns):
    """Other weights of the same shapes are not noticed, another name is."""
    save_mhla(adapted("wan"), tmp_path, base_model="owner/made-for")
    model = models.wan()
    model.register_to_config(_name_or_path=came_from)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_mhla(model, tmp_path)
    said = [str(one.message) for one in said if "made-for" in str(one.message)]
    assert bool(said) == warns and all("owner/another" in one for one in said)
