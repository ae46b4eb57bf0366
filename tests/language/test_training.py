"""Texts, configurations and training of language models: three steps of everything."""

import re
import runpy
import shutil
import sys

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_diffusers as mhla

from ..models import relative_change
from ..scripts import CONFIGS, ROOT, script
from .models import llama, logits, patch, text

language = script("language")
SHIPPED = sorted(CONFIGS.glob("language-*.yaml"))
MODEL = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 2, "eos_token_id": None}
OWN = {"blocks": [4], "block_length": 8}
MHLA = {**OWN, "own": "linear"}
OF_THE_HUB = {"name": "a/b", "tokenizer": "c/d"}


def write_config(folder, **changes):
    settings = {
        "model": MODEL,
        "length": 32,
        "steps": 3,
        "batch_size": 2,
        "learning_rate": 1e-2,
        "adapt_steps": 2,
        "variants": {"softmax": "softmax", "gated": "gated linear", "MHLA": MHLA},
        "adapt": {"own": OWN},
    }
    file = folder / "language.yaml"
    file.write_text(yaml.safe_dump(settings | changes, sort_keys=False))
    return file


def load(folder, **changes):
    return language.LanguageConfig.from_yaml(write_config(folder, **changes))


def test_pages_are_cut_into_rows_and_some_are_held_out():
    trained, held_out = (language.python_topics(128, held_out) for held_out in (False, True))
    assert len(trained) > 5 * len(held_out) > 50
    row = trained[0]
    assert row["input_ids"].shape == (128,) and torch.equal(row["input_ids"], row["labels"])
    assert bytes(row["input_ids"].tolist()).decode().startswith('The "assert" statement')


def test_texts_that_stream_are_cut_where_a_row_ends():
    rows = language.StreamedRows(lambda: ["abc", "defgh", "i"], lambda one: [*one.encode(), 0], 4)
    found = [row["input_ids"].tolist() for row in rows]
    assert found == [[*b"abc", 0], [*b"defg"], [*b"h", 0, *b"i", 0]]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file):
    """And every patch of theirs is for the length that is trained."""
    config = language.LanguageConfig.from_yaml(file)
    for variant in (*config.variants.values(), *config.adapt.values()):
        if not isinstance(variant, str):
            assert variant["blocks"][0] * variant["block_length"] == config.length
    assert f"--config finetune/configs/{file.name}" in file.read_text()


def test_the_paper_s_size():
    """Sec. 5.4: 0.3B, 10B tokens, 0.25M tokens a step, 32 blocks of 2,048 tokens."""
    config = language.LanguageConfig.from_yaml(CONFIGS / "language-0.3b.yaml")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config.model))
    assert 0.29e9 < sum(parameter.numel() for parameter in model.parameters()) < 0.36e9
    tokens = config.length * config.batch_size * config.accumulate
    assert 0.25e6 < tokens < 0.27e6 and abs(config.steps * tokens - 10e9) < tokens
    assert config.variants["MHLA"]["blocks"] == [32]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": {"own": "hyena", "a": "softmax"}}, "'own' .*'hyena'; .*'gated linear'"),
        ({"variants": {"a": {"block": [4]}}}, "'block'"),
        ({"variants": {"a": {"density": 0.1}}}, "density "),
        ({"text": "shakespeare"}, "text='shakespeare' .* 'python-topics'"),
        ({"text": {"name": "a/b", "tokeniser": "c/d"}}, "'text.tokeniser'; .* 'tokenizer'"),
        ({"text": {"name": "a/b"}}, "text .*tokenizer"),
        ({"variants": {"MHLA": MHLA}}, "'softmax: softmax'"),
        ({"learning_rat": 1}, "'learning_rat'; .*'learning_rate'"),
        ({"adapt_steps": 0}, "adapt_steps=0"),
    ],
)
def test_a_configuration_that_is_not_allowed(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        load(tmp_path, **changes)


def test_gated_linear_attention_sees_no_later_token():
    model, ids, other = language.as_variant(llama(), "gated linear"), text(), text()
    other[:, 21:] = 5
    torch.testing.assert_close(logits(model, ids)[:, :21], logits(model, other)[:, :21])


def test_all_blocks_weighing_alike_is_one_block():
    """So that "plain linear" of the configurations is linear attention as it was before."""
    ids, found = text(length=32), []
    for blocks, length in (((4,), 8), ((1,), 32)):
        model = llama()
        mhla.apply_mhla(model, blocks=blocks, block_length=length, own="linear", mixing_init="uniform")
        found.append(logits(model, ids))
    assert relative_change(found[0], found[1]) < 1e-5


def test_training_lowers_the_loss_and_keeps_mixing_in_its_range(tmp_path):
    config = load(tmp_path, steps=12, warmup=1, learning_rate=0.02, mixing_learning_rate=0.5)
    model = language.build(config, OWN, 0)
    rows = language.held_out_rows(config, 32)[:8]
    before = language.losses_by_place(model, rows).mean()
    fresh = [layer.mixing.clone() for layer in mhla.mhla_layers(model).values()]
    language.train(model, config, 0, config.steps)
    assert language.losses_by_place(model, rows).mean() < before - 0.3
    assert model.config.use_cache  # or it would be saved, and generate without a cache
    for layer, start in zip(mhla.mhla_layers(model).values(), fresh, strict=True):
        assert not torch.equal(layer.mixing, start)
        assert layer.mixing.min() > 0 and layer.mixing.max() < 1


def test_perplexity_by_place_is_that_of_transformers():
    model, ids = patch(llama()), text(batch=3)
    expected = model(ids, labels=ids).loss.detach()
    torch.testing.assert_close(language.losses_by_place(model, ids).mean(), expected.double(), rtol=1e-5, atol=0)


@pytest.fixture
def run(capsys):
    """Runs the script in this process; what it prints, or the error that it ends with."""

    def run(*arguments, fails=False):
        if fails:
            with pytest.raises(SystemExit):
                language.main([*map(str, arguments)])
            return capsys.readouterr().err
        language.main([*map(str, arguments)])
        return capsys.readouterr().out

    return run


def test_kinds_of_attention_are_compared_and_finished_seeds_kept(tmp_path, run):
    output = tmp_path / "out"
    given = ("compare", "--config", write_config(tmp_path), "--output", output)
    printed = run(*given)
    for line in ("| gated |", "| MHLA |", "| own |", "perplexity after 3 steps", "tokens 65 to 128"):
        assert line in printed
    assert {"scratch.csv", "adapted.md", "beyond.md", "seed-0.json"} <= {path.name for path in output.iterdir()}
    assert run(*given) == printed
    told = run(*given, "seeds=[1,0]", "steps=4", "batch_size=3", fails=True)
    assert re.search("seed-0.json .*another configuration, which differs in batch_size, steps;", told)
    assert not (output / "seed-1.json").exists()
    other = run(*given[:-1], tmp_path / "other", "steps=1", "variants={softmax: softmax}", "adapt={}")
    assert "perplexity after 1 steps" in other and "| own |" not in other
    told = run("compare", "--config", write_config(tmp_path, text=OF_THE_HUB), "--output", tmp_path / "hub", fails=True)
    assert "Nothing of a data set of the Hub is held out" in told and not (tmp_path / "hub").exists()


def test_shipped_results_are_of_the_shipped_configuration(tmp_path):
    shutil.copytree(ROOT / "studies" / "language", tmp_path, dirs_exist_ok=True)
    shipped = {name: (tmp_path / f"{name}.md").read_text() for name in ("scratch", "adapted", "beyond")}
    language.compare(language.LanguageConfig.from_yaml(CONFIGS / "language-tiny.yaml"), tmp_path)
    assert {name: (tmp_path / f"{name}.md").read_text() for name in shipped} == shipped


def test_one_variant_is_trained_saved_and_loaded(tmp_path, run):
    """Again it goes on from its last checkpoint; of other settings it is not."""
    given = ("train", "--config", write_config(tmp_path), "--output", tmp_path, "--variant")
    run(*given, "MHLA")
    result, checkpoint = tmp_path / "result", tmp_path / "checkpoint-3" / "model.safetensors"
    model = mhla.load_mhla(LlamaForCausalLM(LlamaConfig.from_pretrained(result)), result)
    assert len(mhla.mhla_layers(model)) == 2
    written, files = checkpoint.stat().st_mtime_ns, {path.name for path in result.iterdir()}
    (result / "model.safetensors").touch()
    assert run(*given, "MHLA") == f"{result}\n"
    assert checkpoint.stat().st_mtime_ns == written and {path.name for path in result.iterdir()} == files
    again = mhla.load_mhla(LlamaForCausalLM(LlamaConfig.from_pretrained(result)), result)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert "which differs in variant;" in run(*given, "gated", fails=True)
    assert "which differs in steps;" in run(*given, "MHLA", "steps=4", fails=True)
    assert "variant 'no' is unknown; allowed: softmax, gated, MHLA" in run(*given, "no", fails=True)


def test_decoding_is_timed_beside_keys_and_values(tmp_path, monkeypatch):
    sizes = ["--width", "64", "--layers", "1", "--tokens", "2", "--turns", "1", "--lengths", "64", "128"]
    monkeypatch.setattr(sys, "argv", ["decoding.py", "--output", str(tmp_path), *sizes])
    runpy.run_path(str(ROOT / "studies/language/decoding.py"), run_name="__main__")
    rows = [line.split(" | ") for line in (tmp_path / "decoding.md").read_text().splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["64", "128"]


def test_settings_that_the_page_and_the_script_override_are_allowed():
    page, head = (ROOT / "docs" / "language.md").read_text(), language.__doc__
    named = re.search(r"overrides single settings, such as `(.*?)`", page)[1], re.search("for example: (.*)", head)[1]
    for words in named:
        assert language.LanguageConfig.from_yaml(CONFIGS / "language-tiny.yaml", words.split()).steps == 100
