"""What load_mhla opens and what it refuses: damage of every kind, other models, names, patches of older formats."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mhla_diffusers import apply_mhla, load_mhla, mhla_layers, save_mhla
from mhla_diffusers.files import file_hash
from mhla_diffusers.patching.record import CONFIG_NAME, read_record

from .. import models
from .shared import assert_same_footprint, footprint
from .test_saving import adapted, shake

NAME = "transformer.blocks.1.attn1.mhla.mixing"


@pytest.fixture
def folder(tmp_path):
    """Of a patch with one adapted weight and bias of the model."""
    model = adapted("wan")
    shake(model.blocks[1].attn1.to_q)
    return save_mhla(model, tmp_path, weights="changed", base=models.wan())


def rewrite(folder, change, metadata=None):
    """Change the saved tensors and make the hash fit again; the metadata stays unless it is given."""
    path = folder / read_record(folder).file
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = metadata or file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    change_record(folder, lambda record: record.update(sha256=file_hash(path)))


def change_record(folder, change):
    record = json.loads((folder / CONFIG_NAME).read_text())
    change(record)
    (folder / CONFIG_NAME).write_text(json.dumps(record))


def cut(folder):
    path = folder / read_record(folder).file
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(folder):
    path = folder / read_record(folder).file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


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
        folder, lambda found: found["transformers"]["transformer"]["mhla"].update(entries)
    )


def tensors(change):
    return lambda folder: rewrite(folder, change)


def text(content):
    return lambda folder: (folder / CONFIG_NAME).write_text(content)


BY_HAND = f"{CONFIG_NAME} was changed after saving: .*"
DAMAGE = {
    # what is done to the folder, offending value
    "file cut": (cut, "damaged or was changed"),
    "a bit": (flip_a_bit, "damaged or was changed"),
    "file gone": (lambda folder: (folder / read_record(folder).file).unlink(), "is missing"),
    "tensor gone": (tensors(lambda found: found.pop(NAME)), "missing blocks.1.attn1.mhla.mixing"),
    "base weight gone": (
        tensors(lambda found: found.pop("transformer.blocks.1.attn1.to_q.bias")),
        "missing blocks.1.attn1.to_q.bias",
    ),
    "tensor more": (
        tensors(lambda found: found.update({"transformer.blocks.9.x": torch.ones(1)})),
        "unexpected blocks.9.x",
    ),
    "shape": (
        tensors(lambda found: found.update({NAME: torch.ones(2, 2)})),
        r"mixing has shape \(2, 2\), expected \(2, 12, 12\)",
    ),
    "NaN": (tensors(lambda found: found[NAME].view(-1)[0].fill_(torch.nan)), "mixing holds NaN or infinite values"),
    "no settings in the file": (
        lambda folder: rewrite(folder, lambda _: None, metadata={"format": "pt"}),
        "was written anew without its settings",
    ),
    "feature map": (settings(feature_map="elu+1"), rf"{BY_HAND}transformer.mhla.feature_map is 'elu\+1'.*'relu'"),
    "blocks": (settings(blocks=[4, 2, 3]), rf"{BY_HAND}transformer.mhla.blocks is \[4, 2, 3\].*\[2, 2, 3\]"),
    "other weights": (record(weights="mhla"), f"{BY_HAND}weights is 'mhla'.*saved with 'changed'"),
    "base weights": (in_transformer(base_weights=[]), rf"{BY_HAND}transformer.base_weights is \[\]"),
    "version": (record(format_version=99), "99"),
    "key more": (record(more=1), "'more'; Allowed: format_version"),
    "key gone": (record_without("file"), "file is missing"),
    "weights": (record(weights="zzz"), "'zzz' .*allowed: 'mhla', 'changed', 'all'"),
    "file of a number": (record(file=3), "file must be text, got 3"),
    "list of transformers": (record(transformers=[]), r"transformers must be an object, got \[\]"),
    "no transformers": (record(transformers={}), "transformers is empty"),
    "transformer of a number": (record(transformers={"transformer": 1}), "transformer must be an object"),
    "no heads": (record_without("transformers", "transformer", "heads"), "transformer.heads is missing"),
    "heads as text": (in_transformer(heads="two"), "transformer.heads must be an integer, got 'two'"),
    "no blocks": (record_without("transformers", "transformer", "mhla", "blocks"), "need blocks"),
    "file elsewhere": (record(file="../mhla-x.safetensors"), "'../mhla-x.safetensors'"),
    "file of another kind": (record(file="weights.bin"), "'weights.bin'"),
    "empty record": (text(""), CONFIG_NAME),
    "record of a list": (text("[1]"), CONFIG_NAME),
    "record of a number": (text("3"), CONFIG_NAME),
    "record cut": (text('{"a": '), CONFIG_NAME),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_nothing_is_applied(case, folder):
    damage, value = DAMAGE[case]
    damage(folder)
    model = models.wan()
    before = footprint(model)
    with pytest.raises(FileNotFoundError if case == "file gone" else ValueError, match=value):
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
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinite values, 2 of"):
        save_mhla(model, tmp_path, weights="all")
    rewrite(tmp_path, lambda found: found[name].view(-1)[:2].fill_(torch.inf))
    before = footprint(other)
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinite values, 2 of"):
        load_mhla(other, tmp_path)
    assert_same_footprint(other, before)


def test_wrong_models_are_refused_and_left_alone(folder):
    for model, words in [
        (models.wan_i2v(), "layers=4, the model has 3"),
        (models.wan_vace(), "'WanTransformer3DModel', the model has 'WanVACETransformer3DModel'"),
        (models.sana(), "'WanTransformer3DModel', the model has 'SanaTransformer2DModel'"),
        (models.patched("wan"), "already patched"),
    ]:
        before = footprint(model)
        with pytest.raises(ValueError, match=words):
            load_mhla(model, folder)
        assert_same_footprint(model, before)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "mhla.bin").write_bytes(b"anything")
    with pytest.raises(FileNotFoundError, match=r"holds mhla.bin, but pickle files are never loaded"):
        load_mhla(models.wan(), tmp_path)
    with pytest.raises(ValueError, match="pickle file, which is never loaded"):
        load_mhla(models.wan(), tmp_path / "mhla.bin")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        load_mhla(models.wan(), tmp_path / "file")


NO_FOLDER = "There is no folder {}, and it is no Hub id"
NAMES = [
    # what is asked for, the way out
    ("tiny-wan-exat", FileNotFoundError, "tiny-wan-exat is no folder.*mean 'tiny-wan-exact'.*These ship: "),
    *((name, FileNotFoundError, NO_FOLDER.format(re.escape(name))) for name in ("./tiny-dit-exact", "outputs/run/x")),
    *((name, FileNotFoundError, NO_FOLDER.format(name)) for name in ("/nowhere/patch", "some where/patch")),
    ("tiny-dit-exact/", FileNotFoundError, "is 'tiny-dit-exact', without a slash"),
    (None, ValueError, "patch=None "),
    ("", ValueError, "patch='' "),
    (3, ValueError, "patch=3 "),
    ("wan2.1-t2v-1.3b", ValueError, r"apply_mhla\(model, 'wan2.1-t2v-1.3b'\)"),
]


@pytest.mark.parametrize(("name", "error", "words"), NAMES, ids=lambda value: str(value)[:20])
def test_names_that_are_no_adapted_patch_are_answered_without_the_hub(name, error, words):
    with pytest.raises(error, match=words):
        load_mhla(models.wan(), name)


def test_a_relative_path_asks_no_hub(tmp_path, monkeypatch):
    """Where its folder is there; a revision says that the Hub is meant."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or "runs")
    with pytest.raises(FileNotFoundError, match="The folder runs that is here has no first.*revision='main'"):
        load_mhla(models.wan(), "runs/first")
    assert not asked
    with pytest.raises(FileNotFoundError, match="holds no MHLA patch"):
        load_mhla(models.wan(), "runs/first", revision="main")
    assert asked == ["runs/first"]


def test_patches_of_the_first_format_are_still_read(folder):
    """They had no settings in the safetensors file and no list of base weights."""
    expected = models.output(load_mhla(models.wan(), folder), models.inputs("wan"))
    rewrite(folder, lambda _: None, metadata={"format": "pt"})
    record(format_version=1)(folder)
    record_without("unpatched")(folder)
    record_without("transformers", "transformer", "base_weights")(folder)
    assert torch.equal(models.output(load_mhla(models.wan(), folder), models.inputs("wan")), expected)


THEN = {"sparse": "exact", "density": "exact_share", "pooled": "tile_means", "fit_pooled_bias": "fit_mean_bias"}
TENSORS = {".linear_log_weight": ".far_field_log_weight", ".pooled_bias": ".mean_bias"}
BLOCKS = {"blocks": (2, 2, 3), "sparse": "none"}


def saved_then(folder, version=2, settings=None, old=None):
    """A model whose layers have learned something, and its patch in the old format with further old settings.

    That is of before all blocks of the sparse branch were uniform.
    """
    config = {"blocks": (2, 2, 3), "sparse": "content", "fit_pooled_bias": False, "block_size": 64}
    model = apply_mhla(models.wan(), **(settings or config))
    for layer in mhla_layers(model).values():
        shake(layer)
    save_mhla(model, folder)
    found = json.loads((folder / CONFIG_NAME).read_text()) | {"format_version": version}
    part = found["transformers"]["transformer"]
    then = {THEN.get(name, name): value for name, value in part["mhla"].items()} | {"exact_tiles": None}
    del then["block_size"]
    part["mhla"] = then | (old or {})
    saved = load_file(folder / found["file"])
    for now, before in TENSORS.items():
        saved = {name.replace(now, before): tensor for name, tensor in saved.items()}
    told = {name: found[name] for name in ("weights", "transformers", "unpatched")}
    save_file(saved, folder / found["file"], {"mhla": json.dumps(told)} if version > 1 else {"format": "pt"})
    found["sha256"] = file_hash(folder / found["file"])
    (folder / CONFIG_NAME).write_text(json.dumps(found))
    return model


@pytest.mark.parametrize("version", [1, 2])
def test_boxes_by_content_open_as_uniform_blocks_with_a_note(version, tmp_path):
    model = saved_then(tmp_path, version, old={"exact_tiles": [4, 4, 6], "fit_mean_bias": None})
    with pytest.warns(UserWarning, match="opens with uniform blocks, which it was not trained with: of 64"):
        opened = load_mhla(models.wan(), tmp_path)
    (config,) = {layer.config for layer in mhla_layers(opened).values()}
    assert (config.sparse, config.block_size, config.fits_pooled_bias) == ("content", 64, False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    with pytest.warns(UserWarning, match="trained with boxes"):
        smaller = load_mhla(models.wan(), tmp_path, block_size=8)
    assert {layer.config.block_size for layer in mhla_layers(smaller).values()} == {8}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("settings", "old"),
    [
        (BLOCKS, {}),
        (BLOCKS | {"causal": "block", "block_length": 2, "sparse": "own"}, {}),
        (BLOCKS | {"sparse": "content", "block_size": 8, "density": 0.2}, {"block_size": 8}),
    ],
    ids=["MHLA alone", "causal", "along a curve"],
)
def test_what_means_the_same_now_opens_without_a_note(settings, old, tmp_path):
    model = saved_then(tmp_path, settings=settings, old=old)
    opened = load_mhla(models.wan(), tmp_path)
    assert [x.config for x in mhla_layers(opened).values()] == [x.config for x in mhla_layers(model).values()]
    arguments = models.inputs("wan")
    assert torch.equal(models.output(opened, arguments), models.output(model, arguments))


@pytest.mark.parametrize("old", [{"exact": "calibrated"}, {"exact": "own"}, {"near_field": "softmax"}], ids=str)
def test_lists_that_are_no_more_are_refused_with_the_way_out(old, tmp_path):
    saved_then(tmp_path, version=1 if "near_field" in old else 2, old=old)
    with pytest.raises(ValueError, match=r"not supported any more.*apply_mhla\(model, blocks=\(2, 2, 3\)"):
        load_mhla(models.wan(), tmp_path)


def test_settings_of_an_old_patch_that_were_changed_by_hand_are_noticed(tmp_path):
    saved_then(tmp_path, settings=BLOCKS)
    path = tmp_path / CONFIG_NAME
    path.write_text(path.read_text().replace('"eps": 1e-06', '"eps": 1e-05'))
    with pytest.raises(ValueError, match=f"{BY_HAND.split(' was')[0]}.*transformer.mhla.eps is 1e-05"):
        load_mhla(models.wan(), tmp_path)
