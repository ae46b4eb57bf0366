"""Training of classifiers, comparisons, and accuracy over a folder: a handful of steps of everything."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import (
    AutoImageProcessor,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import mhla_diffusers as mhla

from ..paper_models.shared import tiny_vlt
from ..refusals import refused
from ..scripts import CONFIGS, script
from ..vision.models import dinov2, pooled_vit, registers, siglip, vit
from .test_pictures import write_folder

classify = script("classify")
SHIPPED = sorted(CONFIGS.glob("classify-*.yaml"))
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}
MHLA = {"blocks": [4, 4]}


def write_config(folder, **changes):
    settings = {
        "model": "pooled-vit",
        "settings": MODEL,
        "size": 64,
        "steps": 2,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "held_out": 8,
        "analysed": 2,
        "variants": {"softmax": "softmax", "MHLA + CPE": {**MHLA, "convolution": 3}},
        "ablations": {"CPE": {"without": MHLA, "with": "MHLA + CPE"}},
    }
    file = folder / "classify.yaml"
    file.write_text(yaml.safe_dump(settings | changes, sort_keys=False))
    return file


def load(folder, **changes):
    return classify.ClassifyConfig.from_yaml(write_config(folder, **changes))


def of_variants(config):
    return {"comparison": {name: name for name in config.variants}}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file):
    """And the head of each says how it is launched, and of those that were never run that they were not."""
    config, text = classify.ClassifyConfig.from_yaml(file), file.read_text()
    assert f"--config finetune/configs/{file.name}" in text
    if config.data == "digits":
        assert set(config.ablations) == {"initialisation", "blocks", "CPE and gating"}
    else:
        assert "never run" in text
        pictures = config.steps * config.batch_size * config.accumulate
        assert config.batch_size * config.accumulate == 1024 and config.learning_rate == 1e-3
        assert abs(pictures / 1_281_167 - 300) < 0.01  # epochs of ImageNet-1K (paper, Sec. 5.1)
        config = classify.ClassifyConfig(**vars(config) | {"data": "digits"})  # no folders are there
    for variant in config.all_variants().values():
        with torch.device("meta"):
            classify.build(config, variant, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": {"a": "hyena"}}, "'hyena'"),
        ({"variants": {"a": {"block": [4, 4]}}}, "'block'"),
        ({"variants": {}}, "variants"),
        ({"ablations": {"t": {"row": "MHLA"}}}, "'MHLA'"),
        ({"ablations": {"t": {"row": {"block": 4}}}}, "'block'"),
        ({"ablations": {"Comparison": {"a": MHLA}}}, "'Comparison' .* 'comparison'"),
        ({"variants": {"A+B": "softmax", "aplusb": "softmax"}, "ablations": {}}, "'aplusb' .* 'A.B'"),
        ({"data": "imagenet"}, "data='imagenet'"),
        ({"data": {"train": "a"}}, "held_out"),
        ({"model": "google/vit-base-patch16-224"}, "model='google/vit-base"),
        ({"steps": 30, "warmup": 4}, "warmup=4 .* steps=30"),
        ({"stages": []}, "'stages'"),
    ],
)
def test_a_configuration_that_is_not_allowed(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        load(tmp_path, **changes)


MODELS = {
    "vit": vit,
    "pooled-vit": pooled_vit,
    "dinov2": lambda: dinov2(Dinov2ForImageClassification),
    "registers": registers,
    "siglip": siglip,
    "list": lambda: vit(image_size=[32, 32]),
}


@pytest.mark.parametrize("name", MODELS)
def test_pictures_of_another_size_are_taken(name):
    model = MODELS[name]()
    assert classify.own_size(model) == 32 and classify.call_settings(model, 32) == {}
    with torch.no_grad():
        assert model(torch.randn(1, 3, 48, 48), **classify.call_settings(model, 48)).logits.isfinite().all()


def test_sizes_that_a_model_does_not_tell_or_take():
    assert classify.own_size(tiny_vlt()) is None and classify.call_settings(tiny_vlt(), 48) == {}
    fixed = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], image_size=32))
    with refused("32 x 48"):
        classify.own_size(vit(image_size=[32, 48]))
    with refused("32 ", "size=48"):
        classify.call_settings(fixed, 48)


def loss_of(model, config):
    data = classify.pictures_of(config, 0, held_out=True)
    batch = [data[index] for index in range(len(data))]
    with torch.no_grad():
        logits = model(torch.stack([one["pixel_values"] for one in batch])).logits
    return float(cross_entropy(logits, torch.stack([one["labels"] for one in batch])))


def test_training_lowers_the_loss_and_keeps_mixing_in_its_range(tmp_path, capsys):
    soft = {"smoothing": 0.1, "mixup": 0.2, "cutmix": 0.2}
    config = load(tmp_path, steps=100, warmup=1, mixing_learning_rate=0.5, **soft)
    model = classify.build(config, MHLA, 0)
    start = [layer.mixing.clone() for layer in mhla.mhla_layers(model).values()]
    before = loss_of(model, config)
    classify.train(model, config, 0)
    assert loss_of(model, config) < before - 0.02
    for layer, fresh in zip(mhla.mhla_layers(model).values(), start, strict=True):
        assert not torch.equal(layer.mixing, fresh) and layer.mixing.min() > 0 and layer.mixing.max() < 1
    written = capsys.readouterr()
    assert "100 of 100 steps, loss " in written.err and not written.out


def test_only_what_a_training_made_is_deleted(tmp_path):
    folder = tmp_path / "mhla-seed-0"
    folder.mkdir()
    (folder / "notes.txt").touch()

    def run(place):
        (place / "checkpoint-1").mkdir()
        (place / "result").mkdir()
        return {"loss": 1}

    for _ in range(2):
        classify.trainer.results_of([classify.trainer.Part(tmp_path / "mhla-seed-0.json", {}, run)])
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_stopped_training_without_chance_goes_on_and_ends_where_it_would_have(tmp_path):
    """From a whole checkpoint of the same settings; the result has nothing of another one."""
    changes = {"steps": 4, "save_every": 1}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    expected = classify.load_classifier(str(classify.train_one(load(tmp_path, **changes), "MHLA + CPE", whole)))
    assert {path.name for path in whole.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    (stopped / "result").mkdir(parents=True)
    (stopped / "result" / "model.safetensors").touch()
    shutil.copytree(whole / "checkpoint-3", stopped / "checkpoint-3")
    (stopped / "checkpoint-4").mkdir()  # being written when it stopped
    for other, named in (
        ({}, "no training.json"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"batch_size": 8}, "rows_of_a_step"),
    ):
        if other:
            shutil.copy(whole / "training.json", stopped)
        config = load(tmp_path, **changes | other)
        with refused("stopped ", named):
            classify.train_one(config, "MHLA + CPE", stopped)
    checkpoint = stopped / "checkpoint-3" / "model.safetensors"
    written = checkpoint.stat().st_mtime_ns
    result = classify.train_one(load(tmp_path, **changes, accumulate=1, seeds=[0, 1]), "MHLA + CPE", stopped)
    assert checkpoint.stat().st_mtime_ns == written  # which would be written again, were the training begun anew
    assert {path.name for path in result.iterdir()} == {path.name for path in (whole / "result").iterdir()}
    found = classify.load_classifier(str(result))
    assert len(mhla.mhla_layers(found)) == 1
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert classify.processor_of(str(result))["image_mean"] == [0.5, 0.5, 0.5]  # digits lie in [-1, 1]


def test_a_comparison_that_was_stopped_goes_on_within_a_training(tmp_path, monkeypatch, capsys):
    config, output = load(tmp_path, save_every=1, variants={"softmax": "softmax"}, ablations={}), tmp_path / "out"
    folder, seen = output / "softmax-seed-0", []
    state = folder / "checkpoint-1" / "trainer_state.json"

    def look(model, config, most):
        if most > 1:  # after the training
            seen.append(state.stat().st_mtime_ns)
            if len(seen) == 1:
                raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(classify, "look_at_attention", look)
    with pytest.raises(KeyboardInterrupt):
        classify.compare(config, of_variants(config), output)
    written, told = state.stat().st_mtime_ns, json.loads(state.read_text())
    assert 0 < told["stateful_callbacks"]["Watch"]["attributes"]["seconds"] < 1000
    told["stateful_callbacks"]["Watch"]["attributes"]["seconds"] = 1000.0
    state.write_text(json.dumps(told))
    os.utime(state, ns=(written, written))
    shutil.rmtree(folder / "checkpoint-2")
    other = load(tmp_path, learning_rate=0.1, ablations={})
    with refused("softmax-seed-0 ", " learning_rate"):
        classify.compare(other, of_variants(other), output)
    classify.compare(config, of_variants(config), output)
    assert len(seen) == 2 and seen[0] == seen[1] and not folder.exists()
    found = json.loads((output / "softmax-seed-0.json").read_text())
    assert 1000 < found["seconds"] < 2000  # those before the checkpoint count too
    assert "1 of 1: softmax-seed-0" in capsys.readouterr().err


def test_processes_have_pictures_of_their_own_and_one_gpu_each(tmp_path, monkeypatch):
    config = load(tmp_path)
    assert len(classify.pictures_of(config, 0)) == 8
    with monkeypatch.context() as launched:
        launched.setenv("WORLD_SIZE", "3")
        assert len(classify.pictures_of(config, 0)) == 24
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda arguments: 2))
    with refused("2 GPUs"):
        classify.train(classify.build(config, "softmax", 0), config, 0)


def constant(folder, classes, size=16):
    """A saved ViT that puts class 0 before class 1 and so on, whatever it sees."""
    model = ViTForImageClassification(ViTConfig(**MODEL | {"image_size": size, "num_labels": classes}))
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(-torch.arange(float(classes)))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    return folder


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_model_to_begin_from_is_trained_in_float32_and_lacks_its_classifier_alone(tmp_path):
    folder = constant(tmp_path / "model", 3, size=32)
    ViTForImageClassification.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    config = load(tmp_path, model=str(folder), settings={})
    model = classify.build(config, "softmax", 0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.classifier.out_features == 19
    change_json(folder / "config.json", intermediate_size=32)
    with refused("vit", "mlp"):
        classify.build(config, "softmax", 0)


def test_a_model_to_begin_from_is_compared_at_another_size(tmp_path, monkeypatch):
    """Its attention is looked at with interpolated positions, as it is trained; what cannot be is said before that."""
    changes = {"model": str(constant(tmp_path / "model", 19, size=32)), "settings": {}, "ablations": {}}
    config = load(tmp_path, **changes, steps=1, variants={"MHLA": MHLA})
    found = classify.compare(config, of_variants(config), tmp_path / "out")[1]["MHLA"][0]
    assert found["grid"] == [8, 8] and found["rank"] >= 1

    def refuse(model, config, most):
        raise ZeroDivisionError

    monkeypatch.setattr(classify, "look_at_attention", refuse)
    with pytest.raises(ZeroDivisionError):
        classify.compare(config, of_variants(config), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.fixture
def run(capsys):
    """Runs the script in this process; what it prints."""

    def run(*arguments):
        classify.main([*map(str, arguments)])
        return capsys.readouterr().out

    return run


def test_kinds_of_attention_are_compared_and_what_is_finished_is_kept(tmp_path, run, capsys):
    pytest.importorskip("matplotlib")
    output = tmp_path / "out"
    given = ("--config", write_config(tmp_path, seeds=[0, 1]), "--output", output)
    printed = run("compare", *given)
    assert "| softmax |" in printed and "| MHLA + CPE |" in printed and " ± " in printed
    found = json.loads((output / "mhla-plus-cpe-seed-1.json").read_text())
    assert found["seed"] == 1 and 0 < found["entropy"] < 4.2 and 1 <= found["rank"] <= 64 and len(found["map"]) == 64
    assert {"comparison.csv", "rank-and-entropy.png", "attention-maps.png"} <= {path.name for path in output.iterdir()}
    assert run("compare", *given) == printed

    kept = (output / "mhla-plus-cpe-seed-0.json").stat().st_mtime_ns
    ablated = run("ablate", *given).splitlines()
    assert [line.split(" |")[0] for line in ablated] == ["| CPE", "| ---", "| without", "| with"]
    assert ablated[3].split(" | ")[1:] == printed.splitlines()[3].split(" | ")[1:]
    assert (output / "mhla-plus-cpe-seed-0.json").stat().st_mtime_ns == kept

    for arguments, words in (
        (("compare", *given, "seeds=[2,1]", "steps=3"), "softmax-seed-1.json .*another .* differs in steps;"),
        (("compare", *given, "--steps", "3"), "unrecognized arguments: --steps 3"),
        (("ablate", *given, "ablations={}"), "has no ablations"),
        (("train", *given, "--variant", "no"), "'no' is unknown; allowed: softmax, MHLA"),
        (("train", *given, "--variant", "softmax", "settings.hiden_size=9"), "hiden_size'; did you mean 'hidden_size'"),
        (("evaluate", "--model", output, "--pictures", output, "size=3"), "unrecognized arguments: size=3"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments)
        assert re.search(words, capsys.readouterr().err), words
    assert not (output / "softmax-seed-2.json").exists()


def test_a_comparison_whose_figures_cannot_be_drawn_does_not_begin(tmp_path, run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        run("compare", "--config", write_config(tmp_path), "--output", tmp_path / "out")
    assert "matplotlib" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_top_1_and_top_5_over_a_folder(tmp_path, run):
    """There are 3 + 1 + 0 + 2 + 1 + 2 + 1 = 10 pictures: 3 are of class 0, and 7 of the first five classes."""
    counts = dict(zip("abcdefg", (3, 1, 0, 2, 1, 2, 1), strict=True))
    model, pictures = constant(tmp_path / "model", 7), write_folder(tmp_path / "val", counts)
    printed = run("evaluate", "--model", model, "--pictures", pictures, "--batch-size", 4)
    assert json.loads(printed) == {"top1": 0.3, "top5": 0.7, "pictures": 10}
    assert classify.evaluate(str(model), pictures, size=24)["top5"] == 0.7  # positions are interpolated


def test_a_patch_of_a_classifier_is_judged(tmp_path):
    """The patch of the folder is what runs, and three classes have no sixth."""
    model, pictures = constant(tmp_path / "model", 3), write_folder(tmp_path / "val", {"a": 1, "b": 1, "c": 2})
    patched = mhla.apply_mhla(ViTForImageClassification.from_pretrained(model), blocks=(2, 2))
    mhla.save_mhla(patched, tmp_path / "patch")
    assert len(mhla.mhla_layers(classify.load_classifier(str(model), tmp_path / "patch"))) == 1
    found = classify.evaluate(str(model), pictures, patch=tmp_path / "patch")
    assert found == {"top1": 0.25, "top5": 1.0, "pictures": 4}


def test_what_cannot_be_judged_is_said(tmp_path):
    model, pictures = constant(tmp_path / "model", 3), write_folder(tmp_path / "val", {"a": 1, "b": 1})
    unknown, headless = shutil.copytree(model, tmp_path / "unknown"), tmp_path / "headless"
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "preprocessor_config.json").write_text("{}")
    ViTModel(ViTConfig(**MODEL)).save_pretrained(headless)
    change_json(unknown / "config.json", architectures=["ViTTForImageClassification"])
    with refused("2 ", " 3 "):
        classify.evaluate(str(model), pictures)
    with refused("image_mean, image_std"):
        classify.evaluate(str(plain), pictures)
    with refused("ViTModel"):
        classify.load_classifier(str(headless))
    with refused("ViTTForImageClassification"):
        classify.load_classifier(str(unknown))


def test_what_is_trained_on_a_folder_knows_its_classes_and_how_pictures_are_cut(tmp_path):
    counts = {"train": {"a": 2, "b": 2}, "held_out": {"a": 1, "b": 3}, "other": {"b": 1, "c": 1}}
    folders = {name: str(write_folder(tmp_path / name, count)) for name, count in counts.items()}
    unlike = load(tmp_path, data={"train": folders["train"], "held_out": folders["other"]})
    other = Path(folders.pop("other"))
    result = classify.train_one(load(tmp_path, data=folders, steps=1, size=56), "softmax", tmp_path / "out")
    assert classify.load_classifier(str(result)).config.id2label == {0: "a", 1: "b"}
    assert classify.evaluate(str(result), Path(folders["held_out"]))["pictures"] == 4
    assert classify.processor_of(str(result))["crop_size"] == {"height": 56, "width": 56}
    with refused(f"{other} ", "a, c"):
        classify.build(unlike, MHLA, 0)
    with refused(f"{other} ", "a, c"):
        classify.evaluate(str(result), other)
    picture = Image.radial_gradient("L").convert("RGB").crop((0, 0, 128, 256))
    found = AutoImageProcessor.from_pretrained(result)(picture, return_tensors="pt")["pixel_values"][0]
    assert (found - classify.View(56)(picture)).abs().max() < 0.02  # one of 255 steps, divided by 0.224
