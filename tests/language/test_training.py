"""Texts, configurations and training of language models: three steps of everything."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_diffusers as mhla
from mhla_diffusers.training.language.comparison import compare
from mhla_diffusers.training.language.run import build, load_language_config, losses_by_place, rows_of, train
from mhla_diffusers.training.language.texts import StreamedRows, python_topics

from ..models import relative_change
from .models import llama, logits, patch, text

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "finetune" / "configs").glob("language-*.yaml"))
MODEL = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "eos_token_id": None,
}
MHLA = {"blocks": [4], "block_length": 8, "causal": "token", "rope": "before"}


def _config(folder: Path, **changes) -> Path:
    settings = {
        "model": MODEL,
        "length": 32,
        "steps": 3,
        "batch_size": 2,
        "learning_rate": 1e-2,
        "adapt_steps": 2,
        "variants": {"softmax": "softmax", "gated": "gated linear", "MHLA": MHLA},
        "adapt": {"own": {**MHLA, "sparse": "own"}},
    }
    file = folder / "language.yaml"
    file.write_text(yaml.safe_dump(settings | changes, sort_keys=False))
    return file


def test_pages_are_cut_into_rows_and_some_are_held_out():
    trained, held_out = python_topics(128, False), python_topics(128, True)
    assert len(trained) > 5 * len(held_out) > 50
    row = trained[0]
    assert row["input_ids"].shape == (128,) and torch.equal(row["input_ids"], row["labels"])
    assert bytes(row["input_ids"].tolist()).decode().startswith('The "assert" statement')


def test_texts_that_stream_are_cut_where_a_row_ends():
    rows = StreamedRows(lambda: ["abc", "defgh", "i"], lambda one: [*one.encode(), 0], 4)
    found = [row["input_ids"].tolist() for row in rows]
    assert found == [[*b"abc", 0], [*b"defg"], [*b"h", 0, *b"i", 0]]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file):
    """And every patch of theirs is for the length that is trained."""
    config = load_language_config(file)
    for variant in (*config.variants.values(), *config.adapt.values()):
        if not isinstance(variant, str):
            assert variant["blocks"][0] * variant["block_length"] == config.length
    assert f"--config finetune/configs/{file.name}" in file.read_text()


def test_the_paper_s_size():
    """Sec. 5.4: 0.3B, 10B tokens, 0.25M tokens a step, 32 blocks of 2,048 tokens."""
    config = load_language_config(ROOT / "finetune" / "configs" / "language-0.3b.yaml")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config.model))
    assert 0.29e9 < sum(parameter.numel() for parameter in model.parameters()) < 0.36e9
    tokens = config.length * config.batch_size * config.accumulate
    assert 0.25e6 < tokens < 0.27e6 and abs(config.steps * tokens - 10e9) < tokens
    assert config.variants["MHLA"]["blocks"] == [32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {"a": "hyena"}}, "variant 'a' is 'hyena'; allowed: 'softmax', 'gated linear'"),
        ({"variants": {"a": {"block": [4]}}}, "Unknown MHLA setting 'block'"),
        ({"variants": {"own": "hyena", "a": "softmax"}}, "variant 'own' is 'hyena'"),
        ({"precision": "bfloat17"}, r"precision='bfloat17' is unknown; allowed: .* bfloat16 \(or bf16\)"),
        ({"text": "shakespeare"}, "text='shakespeare' is unknown; allowed: 'python-topics'"),
        ({"text": {"name": "a/b", "tokeniser": "c/d"}}, "Unknown setting 'text.tokeniser'; did you mean 'tokenizer'"),
        ({"text": {"name": "a/b"}}, "lacks tokenizer"),
        ({"variants": {"MHLA": MHLA}}, "adapt changes the model that was trained with softmax.*leave adapt out"),
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"adapt_steps": 0}, "adapt_steps=0 must be a whole number of at least 1"),
    ],
)
def test_a_configuration_that_is_not_allowed(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_language_config(_config(tmp_path, **changes))


def test_training_lowers_the_loss_and_keeps_mixing_in_its_range(tmp_path):
    config = load_language_config(_config(tmp_path, steps=12, warmup=1, learning_rate=0.02, mixing_learning_rate=0.5))
    model = build(config, {**MHLA, "sparse": "own"}, 0)
    rows = python_topics(32, True).rows[:8]
    before = losses_by_place(model, rows).mean()
    fresh = [layer.mixing.clone() for layer in mhla.mhla_layers(model).values()]
    train(model, config, 0, config.steps)
    assert losses_by_place(model, rows).mean() < before - 0.3
    assert model.config.use_cache  # or it would be saved, and generate without a cache
    for layer, start in zip(mhla.mhla_layers(model).values(), fresh, strict=True):
        assert not torch.equal(layer.mixing, start)
        assert layer.mixing.min() > 0 and layer.mixing.max() < 1


def test_all_blocks_weighing_alike_is_one_block():
    """So that "plain linear" of the configurations is linear attention as it was before."""
    ids, found = text(length=32), []
    for blocks, length in (((4,), 8), ((1,), 32)):
        model = llama()
        mhla.apply_mhla(model, blocks=blocks, block_length=length, sparse="none", mixing_init="uniform")
        found.append(logits(model, ids))
    assert relative_change(found[0], found[1]) < 1e-5


def test_perplexity_by_place_is_that_of_transformers():
    model, ids = patch(llama()), text(batch=3)
    expected = model(ids, labels=ids).loss.detach()
    torch.testing.assert_close(losses_by_place(model, ids).mean(), expected.double(), rtol=1e-5, atol=0)


def test_nothing_is_held_out_of_a_data_set_of_the_hub(tmp_path):
    config = load_language_config(_config(tmp_path, text={"name": "a/b", "tokenizer": "c/d"}))
    with pytest.raises(ValueError, match="Nothing of a data set of the Hub is held out"):
        rows_of(config, held_out=True)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script of ``finetune/`` in this process; what it prints."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(ROOT / "finetune" / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_kinds_of_attention_are_compared_and_finished_seeds_kept(tmp_path, run):
    file, output = _config(tmp_path), tmp_path / "out"
    printed = run("language.py", "compare", "--config", file, "--output", output)
    for line in ("| gated |", "| MHLA |", "| own |", "perplexity after 3 steps", "tokens 65 to 128"):
        assert line in printed
    assert {"scratch.csv", "adapted.md", "beyond.md", "seed-0.json"} <= {path.name for path in output.iterdir()}
    assert run("language.py", "compare", "--config", file, "--output", output) == printed
    printed = run("language.py", "compare", "--config", file, "--output", tmp_path / "other", "steps=1", "adapt={}")
    assert "perplexity after 1 steps" in printed and "| own |" not in printed
    another = load_language_config(_config(tmp_path, steps=4, batch_size=3, seeds=[1, 0]))
    with pytest.raises(ValueError, match="seed-0.json is of another configuration, which differs in batch_size, steps"):
        compare(another, output)
    assert not (output / "seed-1.json").exists()


def test_a_text_of_which_nothing_is_held_out_is_not_compared(tmp_path):
    config = load_language_config(_config(tmp_path, text={"name": "a/b", "tokenizer": "c/d"}))
    with pytest.raises(ValueError, match="Nothing of a data set of the Hub is held out"):
        compare(config, tmp_path / "out")


def test_shipped_results_are_of_the_shipped_configuration(tmp_path):
    shutil.copytree(ROOT / "assets" / "language", tmp_path, dirs_exist_ok=True)
    compare(load_language_config(ROOT / "finetune" / "configs" / "language-tiny.yaml"), tmp_path)
    for name in ("scratch", "adapted", "beyond"):
        assert (tmp_path / f"{name}.md").read_text() == (ROOT / "assets" / "language" / f"{name}.md").read_text()


def test_one_variant_is_trained_saved_and_loaded(tmp_path, run, capsys):
    """Again it goes on from its last checkpoint; of other settings it is not."""
    given = ("--output", tmp_path, "--variant")
    run("language.py", "train", "--config", _config(tmp_path), *given, "MHLA")
    result, checkpoint = tmp_path / "result", tmp_path / "checkpoint-3" / "model.safetensors"
    model = mhla.load_mhla(LlamaForCausalLM(LlamaConfig.from_pretrained(result)), result)
    assert len(mhla.mhla_layers(model)) == 2
    written, files = checkpoint.stat().st_mtime_ns, {path.name for path in result.iterdir()}
    (result / "model.safetensors").touch()
    assert run("language.py", "train", "--config", _config(tmp_path), *given, "MHLA") == f"{result}\n"
    assert checkpoint.stat().st_mtime_ns == written and {path.name for path in result.iterdir()} == files
    again = mhla.load_mhla(LlamaForCausalLM(LlamaConfig.from_pretrained(result)), result)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for changes, variant, name in ({}, "gated", "variant"), ({"steps": 4}, "MHLA", "steps"):
        with pytest.raises(SystemExit):
            run("language.py", "train", "--config", _config(tmp_path, **changes), *given, variant)
        assert f"is of another configuration, which differs in {name};" in capsys.readouterr().err


def test_a_variant_that_is_unknown(tmp_path, run, capsys):
    with pytest.raises(SystemExit):
        run("language.py", "train", "--config", _config(tmp_path), "--output", tmp_path, "--variant", "no")
    assert "variant 'no' is unknown; allowed: softmax, gated, MHLA" in capsys.readouterr().err


def test_decoding_is_timed_beside_keys_and_values(tmp_path, run):
    sizes = ("--width", 64, "--layers", 1, "--tokens", 2, "--turns", 1)
    run("decoding.py", "--output", tmp_path, "--lengths", 64, 128, *sizes)
    rows = [line.split(" | ") for line in (tmp_path / "decoding.md").read_text().splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["64", "128"]


@pytest.mark.parametrize("name", ["scratch", "adapted", "beyond", "decoding"])
def test_tables_of_the_page_are_what_was_measured(name):
    page = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    assert (ROOT / "assets" / "language" / f"{name}.md").read_text(encoding="utf-8") in page
