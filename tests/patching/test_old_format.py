"""Patches that were saved before all blocks of the sparse branch were uniform."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_diffusers import apply_mhla, load_mhla, mhla_layers, save_mhla
from mhla_diffusers.files import file_hash

from .. import models

THEN = {"sparse": "exact", "density": "exact_share", "pooled": "tile_means", "fit_pooled_bias": "fit_mean_bias"}
TENSORS = {".linear_log_weight": ".far_field_log_weight", ".pooled_bias": ".mean_bias"}


def saved_then(folder, version=2, settings=None, old=None):
    """A model whose layers have learned something, and its patch in the old format with further old settings."""
    config = {"blocks": (2, 2, 3), "sparse": "content", "fit_pooled_bias": False, "block_size": 64}
    model = apply_mhla(models.wan(), **(config if settings is None else settings))
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            for parameter in layer.parameters():
                parameter.add_(0.1)
    save_mhla(model, folder)
    path = folder / "mhla_config.json"
    record = json.loads(path.read_text()) | {"format_version": version}
    part = record["transformers"]["transformer"]
    then = {THEN.get(name, name): value for name, value in part["mhla"].items()} | {"exact_tiles": None}
    del then["block_size"]
    part["mhla"] = then | (old or {})
    tensors = load_file(folder / record["file"])
    for now, before in TENSORS.items():
        tensors = {name.replace(now, before): tensor for name, tensor in tensors.items()}
    told = {name: record[name] for name in ("weights", "transformers", "unpatched")}
    save_file(tensors, folder / record["file"], {"mhla": json.dumps(told)} if version > 1 else {"format": "pt"})
    record["sha256"] = file_hash(folder / record["file"])
    path.write_text(json.dumps(record))
    return model


@pytest.mark.parametrize("version", [1, 2])
def test_boxes_by_content_open_as_uniform_blocks_with_a_note(version, tmp_path):
    model = saved_then(tmp_path, version, old={"exact_tiles": [4, 4, 6]})
    with pytest.warns(
        UserWarning,
        match="opens with uniform blocks, which it was not trained with: of 64",
    ):
        opened = load_mhla(models.wan(), tmp_path)
    (config,) = {layer.config for layer in mhla_layers(opened).values()}
    assert (config.sparse, config.block_size, config.fits_pooled_bias) == ("content", 64, False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    with pytest.warns(UserWarning, match="trained with boxes"):
        smaller = load_mhla(models.wan(), tmp_path, block_size=8)
    assert {layer.config.block_size for layer in mhla_layers(smaller).values()} == {8}


CAUSAL = {"blocks": (2, 2, 3), "causal": "block", "block_length": 2, "sparse": "own"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("settings", "old"),
    [
        ({"blocks": (2, 2, 3)}, {}),
        (CAUSAL, {}),
        ({"blocks": (2, 2, 3), "sparse": "content", "block_size": 8, "density": 0.2}, {"block_size": 8}),
    ],
    ids=["MHLA alone", "causal", "along a curve"],
)
def test_what_means_the_same_now_opens_without_a_note(settings, old, tmp_path):
    settings = {"sparse": "none"} | settings
    model = saved_then(tmp_path, settings=settings, old=old)
    opened = load_mhla(models.wan(), tmp_path)
    assert {layer.config for layer in mhla_layers(opened).values()} == {
        layer.config for layer in mhla_layers(model).values()
    }
    arguments = models.inputs("wan")
    assert torch.equal(models.output(opened, arguments), models.output(model, arguments))


@pytest.mark.parametrize(
    "old", [{"exact": "calibrated"}, {"exact": "own"}, {"near_field": "softmax"}], ids=["calibrated", "own", "near"]
)
def test_lists_that_are_no_more_are_refused_with_the_way_out(old, tmp_path):
    saved_then(tmp_path, version=1 if "near_field" in old else 2, old=old)
    with pytest.raises(ValueError, match=r"not supported any more.*apply_mhla\(model, blocks=\(2, 2, 3\)"):
        load_mhla(models.wan(), tmp_path)


def test_settings_of_an_old_patch_that_were_changed_by_hand_are_noticed(tmp_path):
    saved_then(tmp_path, settings={"blocks": (2, 2, 3), "sparse": "none"})
    path = tmp_path / "mhla_config.json"
    path.write_text(path.read_text().replace('"eps": 1e-06', '"eps": 1e-05'))
    with pytest.raises(ValueError, match=r"changed after saving: transformers.transformer.mhla.eps is 1e-05"):
        load_mhla(models.wan(), tmp_path)
