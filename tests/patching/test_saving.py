"""Saving, loading and sharing patches."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mhla_diffusers import MHLAProcessor, apply_mhla, load_mhla, mhla_layers, remove_mhla, save_mhla
from mhla_diffusers.patching import saving
from mhla_diffusers.patching.record import CONFIG_NAME, read_record
from mhla_diffusers.patching.saving import model_card

from .. import models, pipelines
from ..forking import CONTEXT
from .shared import assert_same_footprint, footprint

SETTINGS = {"layers": "2/3", "output_gate": True, "output_norm": True, "convolution": 3, "mixing_per_head": True}


def shake(parameters) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.05 * torch.rand(parameter.shape, generator=generator))


def trained(name: str, everything: bool = False):
    """A patched model whose MHLA weights, or all weights, are no longer the initial ones."""
    case = models.FAMILIES[name]
    model = apply_mhla(case.build(), sparse="none", blocks=case.blocks, **SETTINGS)
    parameters = model.parameters() if everything else (p for x in mhla_layers(model).values() for p in x.parameters())
    shake(parameters)
    return model


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_mhla_weights_round_trip(name, tmp_path):
    model = trained(name)
    save_mhla(model, tmp_path / "patch")
    other = load_mhla(models.FAMILIES[name].build(), tmp_path / "patch")
    arguments = models.inputs(name)
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))
    untouched = models.output(models.FAMILIES[name].build(), arguments)
    assert not torch.equal(models.output(model, arguments), untouched)
    assert torch.equal(models.output(remove_mhla(other), arguments), untouched)


@pytest.mark.parametrize("weights", ["changed", "all"])
def test_changed_base_weights_round_trip(weights, tmp_path):
    model = trained("wan")
    shake(model.blocks[1].attn1.to_q.parameters())
    save_mhla(model, tmp_path, weights=weights, base=models.wan() if weights == "changed" else None)
    saved = set(load_file(tmp_path / read_record(tmp_path).file))
    own = {name for name in saved if ".mhla." in name}
    if weights == "changed":
        assert saved - own == {f"transformer.blocks.1.attn1.to_q.{kind}" for kind in ("weight", "bias")}
    else:
        assert saved == {f"transformer.{name}" for name in model.state_dict()}
    other = load_mhla(models.wan(), tmp_path)
    arguments = models.inputs("wan")
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


def test_changed_finds_its_base_where_the_model_came_from(tmp_path):
    models.wan().save_pretrained(tmp_path / "base")
    model = apply_mhla(type(models.wan()).from_pretrained(tmp_path / "base"), sparse="none", blocks=(2, 2, 3))
    shake(model.blocks[0].attn1.to_q.parameters())
    save_mhla(model, tmp_path / "patch", weights="changed")
    names = set(load_file(tmp_path / "patch" / read_record(tmp_path / "patch").file))
    assert {name for name in names if ".mhla." not in name} == {
        f"transformer.blocks.0.attn1.to_q.{kind}" for kind in ("weight", "bias")
    }
    assert read_record(tmp_path / "patch").base_model == "base"


def test_two_transformers(tmp_path):
    pipe = apply_mhla(pipelines.wan22_pipeline(), sparse="none", blocks=(3, 2, 1))
    shake(mhla_layers(pipe.transformer_2)["blocks.0.attn1.mhla"].parameters())
    save_mhla(pipe, tmp_path)
    other = load_mhla(pipelines.wan22_pipeline(), tmp_path)
    for name, layer in mhla_layers(pipe).items():
        assert torch.equal(mhla_layers(other)[name].mixing, layer.mixing)
    with pytest.raises(ValueError, match="patch is for transformer, transformer_2 .* but the model has transformer"):
        load_mhla(pipelines.wan_pipeline(), tmp_path)


@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
def test_one_of_two_transformers(component, tmp_path):
    pipe = pipelines.wan22_pipeline()
    apply_mhla(getattr(pipe, component), sparse="none", blocks=(3, 2, 1))
    shake(parameter for layer in mhla_layers(pipe).values() for parameter in layer.parameters())
    save_mhla(pipe, tmp_path)
    other = load_mhla(pipelines.wan22_pipeline(), tmp_path)
    assert mhla_layers(other).keys() == mhla_layers(pipe).keys()
    for name, layer in mhla_layers(pipe).items():
        assert torch.equal(mhla_layers(other)[name].mixing, layer.mixing)
    with pytest.raises(ValueError, match=rf"for {component}, with transformer.* left as it is"):
        load_mhla(pipelines.wan_pipeline(), tmp_path)


def test_a_patch_of_one_transformer_does_not_go_into_a_pipeline_of_two(tmp_path):
    """The same classes and sizes, as Wan 2.1 14B and Wan 2.2 A14B have them, are not the same model."""
    pipe = pipelines.wan22_pipeline()
    save_mhla(apply_mhla(pipelines.wan_pipeline(), sparse="none", blocks=(3, 2, 1)), tmp_path)
    with pytest.raises(ValueError, match=r"but the model has transformer, transformer_2"):
        load_mhla(pipe, tmp_path)
    load_mhla(pipe.transformer, tmp_path)


def test_a_refused_patch_leaves_processors_that_were_set_by_hand(tmp_path):
    pipe = pipelines.wan22_pipeline()
    save_mhla(apply_mhla(pipelines.wan22_pipeline(), sparse="none", blocks=(3, 2, 1)), tmp_path)
    pipe.transformer_2.set_attn_processor(MHLAProcessor(blocks=(3, 2, 1), grid=(3, 2, 2)))
    before = footprint(pipe.transformer), footprint(pipe.transformer_2)
    with pytest.raises(ValueError, match="already patched"):
        load_mhla(pipe, tmp_path)
    assert_same_footprint(pipe.transformer, before[0])
    assert_same_footprint(pipe.transformer_2, before[1])


def test_opening_at_other_block_counts(tmp_path):
    model = apply_mhla(models.wan(), sparse="none", blocks=(2, 2, 3))
    save_mhla(model, tmp_path)
    finer = load_mhla(models.wan(), tmp_path, blocks=(4, 2, 6))
    layer = mhla_layers(finer)["blocks.0.attn1.mhla"]
    assert layer.mixing.shape == (layer.heads, 48, 48)
    assert layer.config.blocks == (4, 2, 6)
    arguments = models.inputs("wan")
    assert models.output(finer, arguments).isfinite().all()


def test_beside_save_pretrained(tmp_path):
    """diffusers' own save keeps the model, save_mhla in the same folder keeps the patch."""
    model = trained("wan", everything=True)
    model.save_pretrained(tmp_path)
    save_mhla(model, tmp_path)
    other = load_mhla(type(model).from_pretrained(tmp_path), tmp_path)
    arguments = models.inputs("wan")
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


def test_saving_replaces_the_old_patch(tmp_path):
    model = trained("wan")
    save_mhla(model, tmp_path)
    first = read_record(tmp_path)
    shake(mhla_layers(model)["blocks.1.attn1.mhla"].parameters())
    save_mhla(model, tmp_path)
    second = read_record(tmp_path)
    assert first.sha256 != second.sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG_NAME, second.file])


def test_other_files_of_the_folder_stay(tmp_path):
    model = trained("wan")
    kept = tmp_path / "mhla-my-experiment-7.safetensors"
    save_file({"a": torch.ones(1)}, kept)
    for _ in range(2):
        save_mhla(model, tmp_path)
        shake(mhla_layers(model)["blocks.1.attn1.mhla"].parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [CONFIG_NAME, read_record(tmp_path).file, kept.name]
    )


def test_saved_tensors_get_the_rights_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        save_mhla(trained("wan"), tmp_path)
    finally:
        os.umask(before)
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_mode & 0o777 == 0o640


def save_until_killed(step, before, folder):
    """In a process of its own."""
    model = apply_mhla(models.wan(), sparse="none", blocks=(2, 2, 3), mixing_init="uniform")
    original = getattr(saving, step)

    def killed(*arguments, **options):
        if not before:
            original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(saving, step, killed)
    save_mhla(model, folder)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", ["write_tensors", "write_json"])
def test_a_kill_while_saving_leaves_a_whole_patch(tmp_path, step, before):
    model = apply_mhla(models.wan(), sparse="none", blocks=(2, 2, 3))
    save_mhla(model, tmp_path)
    process = CONTEXT.Process(target=save_until_killed, args=(step, before, tmp_path))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    loaded = load_mhla(models.wan(), tmp_path)
    mixing = mhla_layers(loaded)["blocks.0.attn1.mhla"].mixing
    saved_new = step == "write_json" and not before
    is_uniform = bool((mixing == mixing[0, 0]).all())
    assert is_uniform == saved_new


def test_wrong_models_are_refused_and_left_alone(tmp_path):
    save_mhla(trained("wan"), tmp_path)
    for model, words in [
        (models.wan_i2v(), "made for layers=4, the model has 3"),
        (models.wan_vace(), "transformer='WanTransformer3DModel', the model has 'WanVACETransformer3DModel'"),
        (models.sana(), "transformer='WanTransformer3DModel', the model has 'SanaTransformer2DModel'"),
    ]:
        keys = list(model.state_dict())
        with pytest.raises(ValueError, match=words):
            load_mhla(model, tmp_path)
        assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="already patched"):
        load_mhla(trained("wan"), tmp_path)


def rewrite(folder: Path, change, metadata=None) -> None:
    """Change the saved tensors and make the hash fit again; the metadata stays unless it is given."""
    import hashlib

    record = json.loads((folder / CONFIG_NAME).read_text())
    path = folder / record["file"]
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = metadata or file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    record["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / CONFIG_NAME).write_text(json.dumps(record))


NAME = "transformer.blocks.1.attn1.mhla.mixing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(NAME), "missing blocks.1.attn1.mhla.mixing"),
        (lambda tensors: tensors.update({"transformer.blocks.9.x": torch.ones(1)}), "unexpected blocks.9.x"),
        (
            lambda tensors: tensors.update({NAME: torch.ones(2, 2)}),
            r"mixing has shape \(2, 2\), expected \(2, 12, 12\)",
        ),
        (lambda tensors: tensors[NAME].view(-1)[0].fill_(torch.nan), "mixing holds NaN or infinite values"),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_applied(tmp_path, change, words):
    save_mhla(trained("wan"), tmp_path)
    rewrite(tmp_path, change)
    model = models.wan()
    before = models.output(model, models.inputs("wan"))
    with pytest.raises(ValueError, match=words):
        load_mhla(model, tmp_path)
    assert not mhla_layers(model)
    assert torch.equal(models.output(model, models.inputs("wan")), before)


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(own, tmp_path):
    model = trained("wan")
    attn = model.blocks[1].attn1
    save_mhla(model, tmp_path, weights="all")
    name = NAME if own else "transformer.blocks.1.attn1.to_q.weight"
    with torch.no_grad():
        (attn.mhla.mixing if own else attn.to_q.weight).view(-1)[:2] = torch.nan
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinite values, 2 of"):
        save_mhla(model, tmp_path, weights="all")
    rewrite(tmp_path, lambda tensors: tensors[name].view(-1)[:2].fill_(torch.inf))
    other = models.wan()
    before = footprint(other)
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinite values, 2 of"):
        load_mhla(other, tmp_path)
    assert_same_footprint(other, before)


def change_record(folder: Path, change) -> None:
    record = json.loads((folder / CONFIG_NAME).read_text())
    change(record)
    (folder / CONFIG_NAME).write_text(json.dumps(record))


def mhla_settings(**settings):
    return lambda record: record["transformers"]["transformer"]["mhla"].update(settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (mhla_settings(feature_map="elu+1"), r"transformer.mhla.feature_map is 'elu\+1'.*saved with 'relu'.*load_mhla"),
        (mhla_settings(blocks=[4, 2, 3]), r"transformer.mhla.blocks is \[4, 2, 3\].*saved with \[2, 2, 3\]"),
        (lambda record: record.update(weights="mhla"), "weights is 'mhla'.*saved with 'changed'"),
        (
            lambda record: record["transformers"]["transformer"]["base_weights"].pop(),
            "transformer.base_weights is .*to_q.bias'\\],",
        ),
    ],
)
def test_settings_changed_by_hand_are_named(tmp_path, change, words):
    model = trained("wan")
    shake(model.blocks[1].attn1.to_q.parameters())
    save_mhla(model, tmp_path, weights="changed", base=models.wan())
    change_record(tmp_path, change)
    with pytest.raises(ValueError, match=f"{CONFIG_NAME} was changed after saving: .*{words}"):
        load_mhla(models.wan(), tmp_path)


def test_a_changed_base_weight_that_is_gone_is_missed(tmp_path):
    model = trained("wan")
    shake(model.blocks[1].attn1.to_q.parameters())
    save_mhla(model, tmp_path, weights="changed", base=models.wan())
    rewrite(tmp_path, lambda tensors: tensors.pop("transformer.blocks.1.attn1.to_q.bias"))
    with pytest.raises(ValueError, match=r"missing blocks\.1\.attn1\.to_q\.bias"):
        load_mhla(models.wan(), tmp_path)


def test_patches_of_the_first_format_are_still_read(tmp_path):
    """They had no settings in the safetensors file and no list of base weights."""
    model = trained("wan")
    shake(model.blocks[1].attn1.to_q.parameters())
    save_mhla(model, tmp_path, weights="changed", base=models.wan())
    rewrite(tmp_path, lambda tensors: None, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="was written anew without its settings"):
        load_mhla(models.wan(), tmp_path)

    def to_first(record):
        record["format_version"] = 1
        del record["unpatched"], record["transformers"]["transformer"]["base_weights"]

    change_record(tmp_path, to_first)
    other = load_mhla(models.wan(), tmp_path)
    arguments = models.inputs("wan")
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


def test_damaged_files_are_refused(tmp_path):
    save_mhla(trained("wan"), tmp_path)
    path = tmp_path / read_record(tmp_path).file
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="damaged or was changed"):
        load_mhla(models.wan(), tmp_path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="damaged or was changed"):
        load_mhla(models.wan(), tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is missing"):
        load_mhla(models.wan(), tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.update(format_version=99), "format version 99 is unknown"),
        (lambda record: record.update(more=1), "Unknown key 'more'; Allowed: format_version"),
        (lambda record: record.pop("file"), "file is missing"),
        (lambda record: record.update(weights="zzz"), "weights='zzz' is unknown; allowed: 'mhla', 'changed', 'all'"),
        (lambda record: record.update(file=3), "file must be text, got 3"),
        (lambda record: record.update(transformers=[]), r"transformers must be an object, got \[\]"),
        (lambda record: record.update(transformers={}), "transformers is empty"),
        (lambda record: record.update(transformers={"transformer": 1}), "transformers.transformer must be an object"),
        (
            lambda record: record["transformers"]["transformer"].pop("heads"),
            "transformers.transformer.heads is missing",
        ),
        (
            lambda record: record["transformers"]["transformer"].update(heads="two"),
            "transformers.transformer.heads must be an integer, got 'two'",
        ),
        (lambda record: record["transformers"]["transformer"]["mhla"].pop("blocks"), "valid patch: .*need blocks"),
        (lambda record: record.update(file="../mhla-x.safetensors"), "names '../mhla-x.safetensors'"),
        (lambda record: record.update(file="weights.bin"), "names 'weights.bin'"),
    ],
)
def test_bad_records_are_named(tmp_path, change, words):
    save_mhla(trained("wan"), tmp_path)
    change_record(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        load_mhla(models.wan(), tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "3", '{"a": '])
def test_a_record_that_is_none_is_named(tmp_path, text):
    (tmp_path / CONFIG_NAME).write_text(text)
    with pytest.raises(
        ValueError, match=rf"{CONFIG_NAME} is no (valid patch: it must be an object|readable JSON file)"
    ):
        load_mhla(models.wan(), tmp_path)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "mhla.bin").write_bytes(b"anything")
    with pytest.raises(FileNotFoundError, match=r"holds mhla.bin, but pickle files are never loaded"):
        load_mhla(models.wan(), tmp_path)
    with pytest.raises(ValueError, match="pickle file, which is never loaded"):
        load_mhla(models.wan(), tmp_path / "mhla.bin")


def test_saving_refuses_what_it_cannot_save(tmp_path):
    with pytest.raises(ValueError, match="not patched with MHLA; call apply_mhla"):
        save_mhla(models.wan(), tmp_path)
    model = apply_mhla(models.wan(), sparse="none", blocks=(2, 2, 3))
    with pytest.raises(ValueError, match="weights='some' is unknown; allowed: mhla, changed, all"):
        save_mhla(model, tmp_path, weights="some")
    with pytest.raises(ValueError, match="unknown where this model came from"):
        save_mhla(model, tmp_path, weights="changed")
    with pytest.raises(ValueError, match="base must be an unpatched model"):
        save_mhla(model, tmp_path, weights="changed", base=model)
    with pytest.raises(ValueError, match=r"base does not fit: it has no transformer\.scale_shift_table"):
        save_mhla(model, tmp_path, weights="changed", base=models.sana())
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="Cannot save a patch into .*file"):
        save_mhla(model, file)
    for folder in ("", None):
        with pytest.raises(ValueError, match=f"folder={folder!r} must be the path of the folder"):
            save_mhla(model, folder)
    with pytest.raises(FileNotFoundError, match="is no folder; load_mhla takes the folder"):
        load_mhla(models.wan(), file)
    from peft import LoraConfig

    model.add_adapter(LoraConfig(target_modules=["to_q"]))
    with pytest.raises(ValueError, match="has LoRA adapters"):
        save_mhla(model, tmp_path, weights="all")
    save_mhla(model, tmp_path, weights="mhla")
    assert (tmp_path / CONFIG_NAME).is_file()


def test_half_the_size_where_that_is_asked_for(tmp_path):
    model = apply_mhla(models.wan(), blocks=(2, 2, 3), sparse="content", density=1.0)
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight.mul_(1.01)
    save_mhla(model, tmp_path, weights="changed", base=models.wan(), dtype=torch.float16)
    (file,) = tmp_path.glob("*.safetensors")
    saved = load_file(file)
    assert saved["transformer.blocks.0.attn1.to_q.weight"].dtype == torch.float16
    opened = load_mhla(models.wan(), tmp_path)
    for name, tensor in opened.state_dict().items():
        assert tensor.dtype == model.state_dict()[name].dtype
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=5e-4, atol=1e-7)
    for wrong in (torch.int8, torch.float8_e4m3fn, "float16"):
        with pytest.raises(ValueError, match=r"must be None or one of torch.float16, torch.bfloat16"):
            save_mhla(model, tmp_path, dtype=wrong)
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"to_q.weight has values up to 1e\+06, which torch.float16 cannot hold"):
        save_mhla(model, tmp_path, weights="changed", base=models.wan(), dtype=torch.float16)


def test_names_that_are_no_adapted_patch_are_answered_without_the_hub():
    with pytest.raises(FileNotFoundError, match="tiny-wan-exat is no folder.*mean 'tiny-wan-exact'.*These ship: "):
        load_mhla(models.wan(), "tiny-wan-exat")
    for absent in ("./tiny-dit-exact", "outputs/run/result", "/nowhere/patch", "some where/patch"):
        with pytest.raises(FileNotFoundError, match=f"There is no folder {re.escape(absent)}, and it is no Hub id"):
            load_mhla(models.wan(), absent)
    with pytest.raises(FileNotFoundError, match=r"no folder tiny-dit-exact/, .* is 'tiny-dit-exact', without a slash"):
        load_mhla(models.wan(), "tiny-dit-exact/")
    for none in (None, "", 3):
        with pytest.raises(ValueError, match=f"patch={none!r} must be a folder, a Hub id"):
            load_mhla(models.wan(), none)
    with pytest.raises(ValueError, match=r"settings alone; apply_mhla\(model, 'wan2.1-t2v-1.3b'\) opens it"):
        load_mhla(models.wan(), "wan2.1-t2v-1.3b")
    with pytest.raises(ValueError, match=r"adapted, with weights; load_mhla\(model, 'tiny-wan-exact'\) opens it"):
        apply_mhla(models.wan(), "tiny-wan-exact")


def test_no_path_of_the_machine_is_saved_or_published(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--someone--base.v1" / "snapshots" / "0123abcd"
    for folder in (tmp_path / "private" / "tiny", snapshot):
        pipelines.wan_pipeline().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    for source, expected in {
        str(tmp_path / "private" / "tiny"): "tiny",
        "private/tiny": "tiny",
        str(tmp_path / "private" / "removed") + "/": "removed",
        str(snapshot): "someone/base.v1",
        "someone/base.v1": "someone/base.v1",
    }.items():
        pipe = pipelines.wan_pipeline()
        pipe.register_to_config(_name_or_path=source)
        apply_mhla(pipe, sparse="none", blocks=(3, 2, 1))
        for given in (None, source):
            save_mhla(pipe, tmp_path / "patch", base_model=given)
            record = read_record(tmp_path / "patch")
            card = model_card(pipe, "me/my-patch", record)
            assert record.base_model == expected
            for text in ((tmp_path / "patch" / CONFIG_NAME).read_text(), card):
                assert str(tmp_path) not in text
                assert "private" not in text
            assert ("huggingface.co/" in card) == ("/" in expected)
            assert card.startswith("---\nbase_model:") == ("/" in expected)
    model = apply_mhla(
        type(models.wan()).from_pretrained(snapshot, subfolder="transformer"), sparse="none", blocks=(2, 2, 3)
    )
    save_mhla(model, tmp_path / "patch", weights="changed")
    assert read_record(tmp_path / "patch").base_model == "someone/base.v1"
    load_mhla(models.wan(), tmp_path / "patch")


UNREACHABLE = """
from mhla_diffusers import apply_mhla, push_mhla
from tests import models, pipelines
try:
    push_mhla(apply_mhla(models.wan(), sparse="none", blocks=(2, 2, 3)), "me/my-patch", token="hf_none")
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:9"])
def test_a_hub_that_cannot_be_reached_is_told(setting):
    name, _, value = setting.partition("=")
    ended = subprocess.run(
        [sys.executable, "-c", UNREACHABLE],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", name: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Hub repository 'me/my-patch'" in ended.stdout, ended.stderr
    assert "save_mhla" in ended.stdout


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_code_of_the_model_card_runs_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipelines.wan_pipeline().save_pretrained("path/to/base")
    pipe = apply_mhla(pipelines.wan_pipeline(), sparse="none", blocks=(3, 2, 1))
    save_mhla(pipe, "me/my-patch", base_model="base")
    card = model_card(pipe, "me/my-patch", read_record(Path("me/my-patch")))
    names: dict = {}
    exec(card.split("```python")[1].split("```")[0], names)
    assert len(mhla_layers(names["pipe"])) == len(mhla_layers(pipe))
    assert names["pipe"].transformer.dtype == torch.bfloat16


def test_the_model_card_says_how_to_use_it(tmp_path):
    pipe = apply_mhla(pipelines.wan_pipeline(), sparse="none", blocks=(3, 2, 1), layers="2/3")
    save_mhla(pipe, tmp_path, base_model="someone/base")
    card = model_card(pipe, "me/my-patch", read_record(tmp_path))
    assert card.startswith("---\nbase_model: someone/base\n")
    assert 'load_mhla(pipe, "me/my-patch")' in card
    assert "blocks.1.attn1" in card
    assert '"layers": "2/3"' in card
