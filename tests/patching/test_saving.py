"""Patches are saved: which weights, whole or not at all, with nothing private, and read again as they were."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_diffusers import apply_mhla, load_mhla, mhla_layers, save_mhla
from mhla_diffusers.patching import PATCH_FILE, read_record, saving

from .. import models, pipelines
from ..forking import CONTEXT
from ..refusals import refused
from .shared import lora

SETTINGS = {"layers": "2/3", "output_gate": True, "output_norm": True, "convolution": 3, "mixing_per_head": True}


def shake(module):
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.rand(parameter.shape, generator=generator))


def adapted(name, everything=False):
    """A patched model whose MHLA weights, or all weights, are no longer the initial ones."""
    case = models.FAMILIES[name]
    model = apply_mhla(case.build(), blocks=case.blocks, **SETTINGS)
    for module in [model] if everything else mhla_layers(model).values():
        shake(module)
    return model


def plain_wan():
    return apply_mhla(models.wan(), blocks=(2, 2, 3))


def saved_names(folder):
    return set(load_file(folder / PATCH_FILE))


@pytest.mark.parametrize("weights", ["changed", "all", "changed of its origin"])
def test_changed_base_weights_round_trip(weights, tmp_path):
    """What has changed is told by a base that is given, or by where the model came from."""
    models.wan().save_pretrained(tmp_path / "base")
    model = type(models.wan()).from_pretrained(tmp_path / "base")
    apply_mhla(model, blocks=(2, 2, 3), **SETTINGS)
    shake(model.blocks[1].attn1.to_q)
    base = models.wan() if weights == "changed" else None
    save_mhla(model, tmp_path, weights=weights.split()[0], base=base)
    saved = saved_names(tmp_path)
    if weights == "all":
        assert saved == {f"transformer.{name}" for name in model.state_dict()}
    else:
        changed = {name for name in saved if ".mhla." not in name}
        assert changed == {f"transformer.blocks.1.attn1.to_q.{kind}" for kind in ("weight", "bias")}
    assert read_record(tmp_path).base_model == "base"
    other = load_mhla(models.wan(), tmp_path)
    arguments = models.inputs("wan")
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


@pytest.mark.parametrize("weights", ["changed", "all"])
def test_what_was_loaded_with_weights_is_saved_with_them(weights, tmp_path):
    model = plain_wan()
    shake(model.blocks[1].attn1.to_q)
    save_mhla(model, tmp_path / "first", weights=weights, base=models.wan() if weights == "changed" else None)
    again = save_mhla(load_mhla(models.wan(), tmp_path / "first"), tmp_path / "again")
    assert read_record(again).weights == "changed"
    arguments = models.inputs("wan")
    other = load_mhla(models.wan(), again)
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


@pytest.mark.parametrize("patched", [["transformer", "transformer_2"], ["transformer"], ["transformer_2"]], ids=str)
def test_both_or_one_of_two_transformers(patched, tmp_path):
    pipe = pipelines.wan22_pipeline()
    for component in patched:
        apply_mhla(getattr(pipe, component), blocks=(3, 2, 1))
    for layer in mhla_layers(pipe).values():
        shake(layer)
    save_mhla(pipe, tmp_path)
    other = load_mhla(pipelines.wan22_pipeline(), tmp_path)
    assert mhla_layers(other).keys() == mhla_layers(pipe).keys()
    for name, layer in mhla_layers(pipe).items():
        assert torch.equal(mhla_layers(other)[name].mixing, layer.mixing)
    with refused(", ".join(patched), "has transformer."):
        load_mhla(pipelines.wan_pipeline(), tmp_path)


def test_saving_replaces_the_old_patch_and_no_other_file(tmp_path):
    """With the rights of any new file."""
    model, kept = adapted("wan"), tmp_path / "mhla-my-experiment-7.safetensors"
    save_file({"a": torch.ones(1)}, kept)
    save_mhla(model, tmp_path)
    first = (tmp_path / PATCH_FILE).read_bytes()
    shake(mhla_layers(model)["blocks.1.attn1.mhla"])
    before = os.umask(0o027)
    try:
        save_mhla(model, tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / PATCH_FILE).read_bytes() != first
    assert {path.name for path in tmp_path.iterdir()} == {PATCH_FILE, kept.name}
    assert (tmp_path / PATCH_FILE).stat().st_mode & 0o777 == 0o640


def save_until_killed(before, folder):
    """In a process of its own."""
    model = apply_mhla(models.wan(), blocks=(2, 2, 3), mixing_init="uniform")
    write = saving.write_tensors

    def killed(*arguments, **options):
        if not before:
            write(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    saving.write_tensors = killed
    save_mhla(model, folder)


@pytest.mark.parametrize("before", [True, False])
def test_a_kill_while_saving_leaves_a_whole_patch(tmp_path, before):
    save_mhla(plain_wan(), tmp_path)
    process = CONTEXT.Process(target=save_until_killed, args=(before, tmp_path))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    mixing = mhla_layers(load_mhla(models.wan(), tmp_path))["blocks.0.attn1.mhla"].mixing
    assert bool((mixing == mixing[0, 0]).all()) is not before


def test_saving_refuses_what_it_cannot_save(tmp_path):
    model, folder, base = plain_wan(), tmp_path / "patch", models.wan()
    cases = [
        (models.wan(), {}, "not patched"),
        (model, {"weights": "some"}, "'some'...'mhla'...'changed'...'all'"),
        (model, {"weights": "changed"}, "weights='changed'"),
        (model, {"weights": "changed", "base": model}, "base"),
        (model, {"weights": "changed", "base": models.sana()}, "transformer.scale_shift_table"),
        (model, {"weights": "mhla", "base": base}, "weights='mhla'"),
        (model, {"weights": "all", "base": base}, "weights='all'"),
    ]
    for one, settings, value in cases:
        with refused(value):
            save_mhla(one, folder, **settings)
    assert not folder.exists()
    model.add_adapter(lora("to_q"))
    with refused("LoRA"):
        save_mhla(model, folder, weights="all")
    save_mhla(model, folder, weights="mhla")
    assert (folder / PATCH_FILE).is_file()


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
    model = type(models.wan()).from_pretrained(snapshot, subfolder="transformer")
    save_mhla(apply_mhla(model, blocks=(2, 2, 3)), tmp_path / "patch", weights="changed")
    assert read_record(tmp_path / "patch").base_model == "someone/base.v1"
    load_mhla(models.wan(), tmp_path / "patch")
