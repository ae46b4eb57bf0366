"""Training of classifiers, comparisons, and accuracy over a folder: a handful of steps of everything."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, TrainingArguments, ViTConfig, ViTForImageClassification, ViTModel

import mhla_diffusers as mhla
from mhla_diffusers.analysis.classifiers import look_at_classifier
from mhla_diffusers.training.classify.comparison import ablate, compare
from mhla_diffusers.training.classify.config import load_classify_config
from mhla_diffusers.training.classify.evaluation import evaluate, load_classifier
from mhla_diffusers.training.classify.folders import CentreView, Normalised
from mhla_diffusers.training.classify.models import fresh_model
from mhla_diffusers.training.classify.run import build, pictures_of, train, train_one
from mhla_diffusers.training.classify.saving import cutting_of

from .folders import write_folder

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "finetune" / "configs").glob("classify-*.yaml"))
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}
MHLA = {"blocks": [4, 4]}


def _config(folder: Path, **changes) -> Path:
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


def _load(folder: Path, **changes):
    return load_classify_config(_config(folder, **changes))


def _loss(model, config) -> float:
    data = pictures_of(config, 0, held_out=True)
    batch = [data[index] for index in range(len(data))]
    with torch.no_grad():
        logits = model(torch.stack([one["pixel_values"] for one in batch])).logits
    return float(cross_entropy(logits, torch.stack([one["labels"] for one in batch])))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file):
    """And the head of each says how it is launched, and of those that were never run that they were not."""
    config, text = load_classify_config(file), file.read_text()
    assert f"--config finetune/configs/{file.name}" in text
    if config.data == "digits":
        assert set(config.ablations) == {"initialisation", "blocks", "CPE and gating"}
        assert len(config.variants) == 5
    else:
        assert "never run" in text
        pictures = config.steps * config.batch_size * config.accumulate
        assert config.batch_size * config.accumulate == 1024 and config.learning_rate == 1e-3
        assert abs(pictures / 1_281_167 - 300) < 0.01  # epochs of ImageNet-1K (paper, Sec. 5.1)
    for variant in config.all_variants().values():
        with torch.device("meta"):
            fresh_model(config.model, config.settings, variant, 1000, config.size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {"a": "hyena"}}, "variant 'a' is 'hyena'; allowed: 'softmax'"),
        ({"variants": {"a": {"block": [4, 4]}}}, "Unknown MHLA setting 'block'"),
        ({"ablations": {"t": {"row": "MHLA"}}}, "'row' of the ablation 't' is 'MHLA', which is none of the variants"),
        ({"ablations": {"t": {"row": {"block": 4}}}}, "Unknown MHLA setting 'block'"),
        ({"data": "imagenet"}, "data='imagenet' is unknown; allowed: 'digits', or train and held_out"),
        ({"data": {"train": "a"}}, "lacks held_out"),
        ({"smoothing": 1.0}, "smoothing=1.0 must be from 0 to 1"),
        ({"mixup": -1}, "mixup=-1.0 must be 0 for none"),
        ({"model": "google/vit-base-patch16-224"}, "settings are those of a model with random weights"),
        ({"precision": "bf17"}, "precision='bf17' is unknown"),
        ({"seeds": []}, "seeds is empty; give at least one"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"held_out": 0}, "held_out=0 must be a whole number of at least 1"),
        ({"analysed": 0}, "analysed=0 must be a whole number of at least 1"),
        ({"steps": 30, "warmup": 4}, "warmup=4 is more than a tenth of steps=30; allowed: 3"),
        ({"learning_rate": "fast"}, "learning_rate='fast' must be of type float"),
        ({"learning_rate": 0}, "learning_rate=0.0 must be a positive number such as 1e-3"),
        ({"stages": []}, "Unknown setting 'stages'"),
        (
            {"mixing_learning_rate": 0.0},
            "mixing_learning_rate=0.0 must be a positive number.*leave it out for learning",
        ),
        (
            {"variants": {"A+B": "softmax", "aplusb": "softmax"}, "ablations": {}},
            "'aplusb' and 'A.B' would both be written",
        ),
        ({"ablations": {"Comparison": {"a": MHLA}}}, "'Comparison' and the file 'comparison' would both be written"),
        ({"clip": -1}, "clip=-1.0 must be a number of at least 0"),
    ],
)
def test_a_configuration_that_is_not_allowed(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, **changes)


def test_settings_are_overridden_as_those_of_finetune_are(tmp_path):
    config = load_classify_config(_config(tmp_path), ["learning_rate=1e-4", "settings.hidden_size=32", "steps=7"])
    assert (config.learning_rate, config.settings["hidden_size"], config.steps) == (1e-4, 32, 7)


def test_settings_that_a_model_does_not_have(tmp_path):
    config = _load(tmp_path, settings={"hiden_size": 16})
    with pytest.raises(ValueError, match="'settings.hiden_size'; did you mean 'hidden_size'"):
        build(config, "softmax", 0)


def test_training_lowers_the_loss_and_keeps_mixing_in_its_range(tmp_path):
    config = _load(
        tmp_path, steps=30, warmup=1, batch_size=8, mixing_learning_rate=0.5, smoothing=0.1, mixup=0.2, cutmix=0.2
    )
    model = build(config, MHLA, 0)
    start = [layer.mixing.clone() for layer in mhla.mhla_layers(model).values()]
    before = _loss(model, config)
    train(model, config, 0)
    assert _loss(model, config) < before - 0.02
    for layer, fresh in zip(mhla.mhla_layers(model).values(), start, strict=True):
        assert not torch.equal(layer.mixing, fresh) and layer.mixing.min() > 0 and layer.mixing.max() < 1


def test_a_stopped_training_without_chance_goes_on_and_ends_where_it_would_have(tmp_path):
    """Of what was begun with the same settings, and from a whole checkpoint; the result has nothing of another one."""
    changes = {"steps": 4, "save_every": 1}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    expected = load_classifier(str(train_one(_load(tmp_path, **changes), "MHLA + CPE", whole)))
    assert {path.name for path in whole.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}
    (stopped / "result").mkdir(parents=True)
    (stopped / "result" / "model.safetensors").touch()
    shutil.copytree(whole / "checkpoint-3", stopped / "checkpoint-3")
    (stopped / "checkpoint-4").mkdir()  # being written when it stopped
    with pytest.raises(ValueError, match=r"stopped has checkpoints and no training.json"):
        train_one(_load(tmp_path, **changes), "MHLA + CPE", stopped)
    shutil.copy(whole / "training.json", stopped)
    for other, name in ({"learning_rate": 0.1}, "learning_rate"), ({"batch_size": 8}, "rows_of_a_step"):
        with pytest.raises(ValueError, match=f"stopped is of another configuration, which differs in {name};"):
            train_one(_load(tmp_path, **changes | other), "MHLA + CPE", stopped)
    checkpoint = stopped / "checkpoint-3" / "model.safetensors"
    written = checkpoint.stat().st_mtime_ns
    result = train_one(_load(tmp_path, **changes, accumulate=1, seeds=[0, 1]), "MHLA + CPE", stopped)
    assert checkpoint.stat().st_mtime_ns == written  # which would be written again, were the training begun anew
    assert {path.name for path in result.iterdir()} == {path.name for path in (whole / "result").iterdir()}
    found = load_classifier(str(result))
    assert len(mhla.mhla_layers(found)) == 1
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert cutting_of(str(result)).pixels == Normalised((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # digits lie in [-1, 1]


def test_a_comparison_that_was_stopped_goes_on_within_a_training(tmp_path, capsys):
    config, output = _load(tmp_path, save_every=1, variants={"softmax": "softmax"}, ablations={}), tmp_path / "out"
    folder = output / "softmax-seed-0"
    seen = []

    def stop(model, pictures, settings):
        if len(pictures) > 1:  # after the training
            raise KeyboardInterrupt
        return {}

    def look(model, pictures, settings):
        if len(pictures) > 1:
            seen.append((folder / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns)
        return {}

    with pytest.raises(KeyboardInterrupt):
        compare(config, output, stop)
    state = folder / "checkpoint-1" / "trainer_state.json"
    written, before = state.stat().st_mtime_ns, json.loads(state.read_text())["stateful_callbacks"]["Watch"]
    shutil.rmtree(folder / "checkpoint-2")
    with pytest.raises(ValueError, match="softmax-seed-0 is of another configuration, which differs in learning_rate;"):
        compare(_load(tmp_path, learning_rate=0.1, ablations={}), output, look)
    compare(config, output, look)
    assert seen == [written] and not folder.exists()
    found = json.loads((output / "softmax-seed-0.json").read_text())
    assert found["seconds"] > before["attributes"]["seconds"] > 0
    assert "1 of 1: softmax-seed-0" in capsys.readouterr().err


def test_steps_and_loss_are_told(tmp_path, capsys):
    config = _load(tmp_path, steps=100, batch_size=1)
    train(build(config, "softmax", 0), config, 0)
    told = capsys.readouterr()
    assert "100 of 100 steps, loss " in told.err and not told.out


def test_every_process_has_pictures_of_its_own(tmp_path, monkeypatch):
    config = _load(tmp_path)
    assert len(pictures_of(config, 0)) == 8
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(pictures_of(config, 0)) == 24


def test_several_gpus_of_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda arguments: 2))
    config = _load(tmp_path)
    with pytest.raises(ValueError, match="One process sees 2 GPUs.*accelerate launch"):
        train(build(config, "softmax", 0), config, 0)


def test_a_model_to_begin_from_is_trained_in_float32_and_lacks_its_classifier_alone(tmp_path):
    folder = _constant(tmp_path / "model", 3, size=32)
    ViTForImageClassification.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    config = _load(tmp_path, model=str(folder), settings={})
    model = build(config, "softmax", 0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.classifier.out_features == 19
    wider = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(wider))
    with pytest.raises(ValueError, match="model lacks vit.*mlp.*, or in this shape; give a model"):
        build(config, "softmax", 0)


def test_a_model_to_begin_from_is_compared_at_another_size(tmp_path):
    """Its attention is looked at with interpolated positions, as it is trained; what cannot be is said before that."""
    changes = {"model": str(_constant(tmp_path / "model", 19, size=32)), "settings": {}, "ablations": {}}
    config = _load(tmp_path, **changes, steps=1, variants={"MHLA": MHLA})
    found = compare(config, tmp_path / "out", look_at_classifier).results["MHLA"][0]
    assert found["grid"] == [8, 8] and found["rank"] >= 1

    def refuse(model, pictures, settings):
        raise ValueError("no matrices")

    with pytest.raises(ValueError, match="no matrices"):
        compare(config, tmp_path / "other", refuse)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process; what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["classify.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "finetune" / "classify.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_kinds_of_attention_are_compared_and_what_is_finished_is_kept(tmp_path, run):
    pytest.importorskip("matplotlib")
    file, output = _config(tmp_path, seeds=[0, 1]), tmp_path / "out"
    printed = run("compare", "--config", file, "--output", output)
    assert "| softmax |" in printed and "| MHLA + CPE |" in printed and " ± " in printed
    found = json.loads((output / "mhla-plus-cpe-seed-1.json").read_text())
    assert found["seed"] == 1 and 0 < found["entropy"] < 4.2 and 1 <= found["rank"] <= 64 and len(found["map"]) == 64
    assert {"comparison.csv", "rank-and-entropy.png", "attention-maps.png"} <= {path.name for path in output.iterdir()}
    assert run("compare", "--config", file, "--output", output) == printed

    kept = (output / "mhla-plus-cpe-seed-0.json").stat().st_mtime_ns
    ablated = run("ablate", "--config", file, "--output", output)
    assert [line.split(" |")[0] for line in ablated.splitlines()] == ["| CPE", "| ---", "| without", "| with"]
    assert ablated.splitlines()[3].split(" | ")[1:] == printed.splitlines()[3].split(" | ")[1:]
    assert (output / "mhla-plus-cpe-seed-0.json").stat().st_mtime_ns == kept

    with pytest.raises(SystemExit):
        run("compare", "--config", file, "--output", output, "steps=3")  # of another configuration
    with pytest.raises(SystemExit):
        run("compare", "--config", file, "--output", output, "--steps", "3")
    with pytest.raises(SystemExit):
        run("evaluate", "--model", output, "--pictures", output, "size=3")
    another = _load(tmp_path, steps=3, seeds=[2, 1])
    with pytest.raises(ValueError, match="softmax-seed-1.json is of another configuration, which differs in steps"):
        compare(another, output, lambda *given: {})
    assert not (output / "softmax-seed-2.json").exists()
    with pytest.raises(ValueError, match="has no ablations"):
        ablate(_load(tmp_path, ablations={}), output, lambda *given: {})


def test_a_comparison_whose_figures_cannot_be_drawn_does_not_begin(tmp_path, run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        run("compare", "--config", _config(tmp_path), "--output", tmp_path / "out")
    assert "Plots need matplotlib" in capsys.readouterr().err and not (tmp_path / "out").exists()


def _constant(folder: Path, classes: int, size: int = 16) -> Path:
    """A saved ViT that puts class 0 before class 1 and so on, whatever it sees."""
    sizes = MODEL | {"image_size": size, "num_labels": classes}
    model = ViTForImageClassification(ViTConfig(**sizes))
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(-torch.arange(float(classes)))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    return folder


def test_top_1_and_top_5_over_a_folder(tmp_path, run):
    """Of 3 + 1 + 0 + 2 + 1 + 2 + 1 = 10 pictures 3 are of class 0, and 7 of the first five classes."""
    counts = dict(zip("abcdefg", (3, 1, 0, 2, 1, 2, 1), strict=True))
    model, pictures = _constant(tmp_path / "model", 7), write_folder(tmp_path / "val", counts)
    printed = run("evaluate", "--model", model, "--pictures", pictures, "--batch-size", 4)
    assert json.loads(printed) == {"top1": 0.3, "top5": 0.7, "pictures": 10}
    assert evaluate(str(model), pictures, size=24).top5 == 0.7  # positions are interpolated


def test_a_patch_of_a_classifier_is_judged(tmp_path, monkeypatch):
    """The patch of the folder is what runs, and three classes have no sixth."""
    model, pictures = _constant(tmp_path / "model", 3), write_folder(tmp_path / "val", {"a": 1, "b": 1, "c": 2})
    patched = mhla.apply_mhla(ViTForImageClassification.from_pretrained(model), blocks=(2, 2))
    mhla.save_mhla(patched, tmp_path / "patch")
    assert len(mhla.mhla_layers(load_classifier(str(model), tmp_path / "patch"))) == 1
    found = evaluate(str(model), pictures, patch=tmp_path / "patch")
    assert (found.top1, found.top5, found.pictures) == (0.25, 1.0, 4)


def test_what_cannot_be_judged_is_said(tmp_path):
    model, pictures = _constant(tmp_path / "model", 3), write_folder(tmp_path / "val", {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="has 2 subfolders and .* knows 3 classes"):
        evaluate(str(model), pictures)
    (model / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks image_mean, image_std"):
        evaluate(str(model), pictures)
    ViTModel(ViTConfig(**MODEL)).save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match="headless is a ViTModel by its configuration; give a classifier"):
        load_classifier(str(tmp_path / "headless"))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"architectures": ["ViTTForImageClassification"]}))
    with pytest.raises(ValueError, match="is a ViTTForImageClassification by its configuration, which neither"):
        load_classifier(str(model))


def _folders(tmp_path: Path, **counts: dict[str, int]) -> dict[str, str]:
    return {name: str(write_folder(tmp_path / name, count)) for name, count in counts.items()}


def test_folders_of_other_classes_each_are_refused(tmp_path):
    """Labels would follow the held-out folder's own order."""
    config = _load(tmp_path, data=_folders(tmp_path, train={"a": 1, "b": 1, "c": 1}, held_out={"b": 1, "c": 1}))
    with pytest.raises(ValueError, match="held_out are not the classes that the model is trained .*: a is in one"):
        build(config, MHLA, 0)


def test_what_is_trained_on_a_folder_knows_its_classes_and_how_pictures_are_cut(tmp_path):
    data = _folders(tmp_path, train={"a": 2, "b": 2}, held_out={"a": 1, "b": 3})
    result = train_one(_load(tmp_path, data=data, steps=1, size=56), "softmax", tmp_path / "out")
    assert load_classifier(str(result)).config.id2label == {0: "a", 1: "b"}
    assert evaluate(str(result), Path(data["held_out"])).pictures == 4
    assert cutting_of(str(result)).size == 56
    with pytest.raises(ValueError, match="a, c are in one of the two alone"):
        evaluate(str(result), write_folder(tmp_path / "others", {"b": 1, "c": 1}))
    picture = Image.radial_gradient("L").convert("RGB").crop((0, 0, 128, 256))
    found = AutoImageProcessor.from_pretrained(result)(picture, return_tensors="pt")["pixel_values"][0]
    assert (found - CentreView(56)(picture)).abs().max() < 0.02  # one of 255 steps, divided by a deviation of 0.224
