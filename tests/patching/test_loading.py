"""What load_mhla refuses: damage of every kind, other formats, other models, and names."""

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mhla_diffusers import load_mhla, save_mhla
from mhla_diffusers.patching import PATCH_FILE

from .. import models
from ..families.cases import footprint
from ..refusals import refused
from .shared import CAUSAL
from .test_saving import TRAINED, adapted

NAME = "transformer.blocks.1.attn1.mhla.mixing"


@pytest.fixture
def folder(tmp_path):
    """A saved patch with one adapted weight and bias of the model."""
    return save_mhla(adapted(), tmp_path, weights=TRAINED)


def rewrite(folder, change=lambda tensors, record: None, text=None):
    """Change the saved tensors, and what is recorded beside them."""
    path = folder / PATCH_FILE
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["mhla"])
    change(tensors, record)
    save_file(tensors, path, metadata={"mhla": json.dumps(record) if text is None else text})


def cut(folder):
    path = folder / PATCH_FILE
    path.write_bytes(path.read_bytes()[:-10])


def changed(change):
    return lambda folder: rewrite(folder, change)


def of_transformer(change):
    return changed(lambda tensors, record: change(record["transformers"]["transformer"]))


DAMAGE = {
    # what is done to the folder, offending value
    "file cut": (cut, PATCH_FILE),
    "file gone": (lambda folder: (folder / PATCH_FILE).unlink(), "missing"),
    "tensor gone": (changed(lambda tensors, _: tensors.pop(NAME)), "missing blocks.1.attn1.mhla.mixing"),
    "base weight gone": (
        changed(lambda tensors, _: tensors.pop("transformer.blocks.1.attn1.to_q.bias")),
        "missing blocks.1.attn1.to_q.bias",
    ),
    "tensor more": (
        changed(lambda tensors, _: tensors.update({"transformer.blocks.9.x": torch.ones(1)})),
        "unexpected blocks.9.x",
    ),
    "shape": (changed(lambda tensors, _: tensors.update({NAME: torch.ones(2, 2)})), "(2, 2)...(2, 12, 12)"),
    "integers": (changed(lambda tensors, _: tensors.update({NAME: tensors[NAME].long()})), "int64...float32"),
    "blocks": (of_transformer(lambda part: part["patch"].update(blocks=[4, 2, 3])), "(2, 12, 12)...(2, 24, 24)"),
    "other weights": (of_transformer(lambda part: part["base_weights"].pop()), "unexpected blocks.1.attn1.to_q"),
    "base weights": (of_transformer(lambda part: part["base_weights"].append("x")), "missing x"),
    "another version": (changed(lambda _, record: record.update(format_version=99)), "format_version"),
    "key more": (changed(lambda _, record: record.update(more=1)), "'more'"),
    "key gone": (of_transformer(lambda part: part.pop("heads")), "transformers.transformer...heads"),
    "no transformers": (changed(lambda _, record: record.update(transformers={})), "transformers"),
    "no record": (lambda folder: rewrite(folder, text=""), PATCH_FILE),
    "record of a number": (lambda folder: rewrite(folder, text="3"), PATCH_FILE),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_nothing_is_applied(case, folder):
    damage, value = DAMAGE[case]
    damage(folder)
    model = models.wan()
    before = footprint(model)
    with refused(value, error=FileNotFoundError if case == "file gone" else ValueError):
        load_mhla(model, folder)
    assert footprint(model) == before


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(own, tmp_path):
    model, other = adapted(), models.wan()
    attn = model.blocks[1].attn1
    save_mhla(model, tmp_path, weights="all")
    name = NAME if own else "transformer.blocks.1.attn1.to_q.weight"
    with torch.no_grad():
        (attn.mhla.mixing if own else attn.to_q.weight).view(-1)[:2] = torch.nan
    with refused(name, "2 of"):
        save_mhla(model, tmp_path, weights="all")
    rewrite(tmp_path, lambda tensors, _: tensors[name].view(-1)[:2].fill_(torch.inf))
    before = footprint(other)
    with refused(name, "2 of"):
        load_mhla(other, tmp_path)
    assert footprint(other) == before


def test_a_causal_patch_keeps_its_blocks(tmp_path):
    save_mhla(models.patched("wan", **CAUSAL), tmp_path)
    with refused("blocks=(3, 2, 3)", "beyond='relative'"):
        load_mhla(models.wan(), tmp_path, blocks=(3, 2, 3))


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
        assert footprint(model) == before


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


@pytest.mark.parametrize(("came_from", "warns"), [("owner/another", True), ("owner/made-for", False), ("", False)])
def test_a_patch_of_another_checkpoint_warns(tmp_path, came_from, warns):
    """Other weights of the same shapes are not noticed, another name is."""
    save_mhla(adapted(), tmp_path, base_model="owner/made-for")
    model = models.wan()
    model.register_to_config(_name_or_path=came_from)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_mhla(model, tmp_path)
    said = [str(one.message) for one in said if "made-for" in str(one.message)]
    assert bool(said) == warns and all("owner/another" in one for one in said)
