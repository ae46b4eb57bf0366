"""Patches are saved: which weights, with nothing private, and read again as they were."""

import os

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from mhla_diffusers import apply_mhla, load_mhla, mhla_layers, save_mhla
from mhla_diffusers.patching import PATCH_FILE, read_record

from .. import models, pipelines
from ..refusals import refused
from .shared import EVERYTHING, lora, shake

TRAINED = [f"blocks.1.attn1.to_q.{kind}" for kind in ("weight", "bias")]


def adapted():
    """A patched Wan whose MHLA weights and one projection are no longer the initial ones."""
    model = models.patched("wan", layers="2/3", mixing_per_head=True, **EVERYTHING)
    shake(*mhla_layers(model).values(), model.blocks[1].attn1.to_q)
    return model


@pytest.mark.parametrize("weights", [TRAINED, "all"], ids=str)
def test_weights_of_the_model_go_along_with_mhlas(weights, tmp_path):
    """And are saved again with a patch that was loaded with them."""
    model = adapted()
    saved = set(load_file(save_mhla(model, tmp_path / "first", weights=weights) / PATCH_FILE))
    chosen = model.state_dict() if weights == "all" else {*weights, *(x for x in model.state_dict() if ".mhla." in x)}
    assert saved == {f"transformer.{name}" for name in chosen}
    again = save_mhla(load_mhla(models.wan(), tmp_path / "first"), tmp_path / "again")
    assert read_record(again).transformers["transformer"].base_weights == sorted(TRAINED)
    expected = models.output(model, models.inputs("wan"))
    for folder in (tmp_path / "first", again):
        assert torch.equal(models.output(load_mhla(models.wan(), folder), models.inputs("wan")), expected)


@pytest.mark.parametrize("patched", [["transformer", "transformer_2"], ["transformer"], ["transformer_2"]], ids=str)
def test_both_or_one_of_two_transformers(patched, tmp_path):
    pipe = pipelines.wan22_pipeline()
    for component in patched:
        apply_mhla(getattr(pipe, component), blocks=(3, 2, 1))
    shake(*mhla_layers(pipe).values())
    save_mhla(pipe, tmp_path)
    other = load_mhla(pipelines.wan22_pipeline(), tmp_path)
    assert mhla_layers(other).keys() == mhla_layers(pipe).keys()
    for name, layer in mhla_layers(pipe).items():
        assert torch.equal(mhla_layers(other)[name].mixing, layer.mixing)
    with refused(", ".join(patched), "has transformer."):
        load_mhla(pipelines.wan_pipeline(), tmp_path)


def test_saving_replaces_the_old_patch_and_no_other_file(tmp_path):
    """With the rights of any new file."""
    model, kept = adapted(), tmp_path / "mhla-my-experiment-7.safetensors"
    save_file({"a": torch.ones(1)}, kept)
    first = (save_mhla(model, tmp_path) / PATCH_FILE).read_bytes()
    shake(model)
    before = os.umask(0o027)
    try:
        save_mhla(model, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / PATCH_FILE).read_bytes() != first
    assert {path.name for path in tmp_path.iterdir()} == {PATCH_FILE, kept.name}
    assert (tmp_path / PATCH_FILE).stat().st_mode & 0o777 == 0o640


def test_saving_refuses_what_it_cannot_save(tmp_path):
    model, folder = models.patched("wan"), tmp_path / "patch"
    for one, weights, value in (
        (models.wan(), "mhla", "not patched"),
        (model, "changed", "'changed'...'mhla'...'all'"),
    ):
        with refused(value):
            save_mhla(one, folder, weights=weights)
    with refused("blocks.9", "names of its own"):
        save_mhla(model, folder, weights=["blocks.9"])
    assert not folder.exists()
    model.add_adapter(lora("to_q"))  # which stays out
    assert not any("lora" in name for name in load_file(save_mhla(model, folder, weights="all") / PATCH_FILE))
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["mhla"]), "copies")
    with refused("copy of an MHLA layer"):
        save_mhla(model, folder)


def test_no_path_of_the_machine_is_saved_or_published(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--base.v1" / "snapshots" / "0123abcd"
    for folder in (tmp_path / "private" / "tiny", snapshot):
        pipelines.wan_pipeline().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    pipe = apply_mhla(pipelines.wan_pipeline(), blocks=(3, 2, 1))
    for source, expected in {
        str(tmp_path / "private" / "tiny"): "tiny",
        "private/tiny": "tiny",
        str(tmp_path / "private" / "removed") + "/": "removed",
        str(snapshot): "someone/base.v1",
        "someone/base.v1": "someone/base.v1",
    }.items():
        pipe.register_to_config(_name_or_path=source)
        for given in (None, source):
            save_mhla(pipe, tmp_path / "patch", base_model=given)
            assert read_record(tmp_path / "patch").base_model == expected
            content = (tmp_path / "patch" / PATCH_FILE).read_bytes()
            assert str(tmp_path).encode() not in content and b"private" not in content
