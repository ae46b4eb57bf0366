"""The plug-in on tiny models, and a small run of every script."""

import json
import shutil
import sys
from pathlib import Path

import decoding
import llama_0_3b
import pytest
import smollm2
import tiny_llama
import torch
from mhla_llama import CausalMHLA, MHLACache, apply_mhla
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
KINDS = {"softmax": {}, "linear": {"own": "linear"}, "hybrid": {"layers": [1]}}
ROUNDING = {"rtol": 1e-4, "atol": 2e-5}
"""Float32 rounding of logits of the order of 1 after three layers that sum in another order."""


def llama():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, **sizes, **heads)).eval()


def patched(**settings):
    """With random mixing matrices, so that every entry matters."""
    model = apply_mhla(llama(), blocks=6, block_length=8, **settings)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, CausalMHLA):
                module.mixing.copy_(torch.rand(6, 6, generator=torch.Generator().manual_seed(3)))
    return model


def text(length=60, batch=2):
    return torch.randint(2, 256, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, **arguments):
    return model(ids, **arguments).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_is_the_whole_text_longer_than_trained_too(kind):
    model, ids = patched(**KINDS[kind]), text()
    cache, whole = MHLACache(model), logits(model, ids)
    pieces = [logits(model, part, past_key_values=cache) for part in ids.split([11, 1, 30, 18], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **ROUNDING)
    changed = ids.clone()
    changed[:, 21:] = 5
    torch.testing.assert_close(logits(model, changed)[:, :21], whole[:, :21])
    assert not torch.allclose(whole, logits(llama(), ids), atol=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_that_of_full_forwards(beams):
    model, settings = patched(), {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    expected = model.generate(text(13), use_cache=False, **settings)
    assert torch.equal(model.generate(text(13), past_key_values=MHLACache(model), **settings), expected)


def test_padding_on_the_right_changes_nothing_before_it():
    model, ids, mask = patched(), text(20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    found, expected = logits(model, ids, attention_mask=mask)[:, :15], logits(model, ids[:, :15])
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, "padded on the right"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]] * 2), "use_cache": False}, "a row of its own"),
    ],
)
def test_rows_that_would_shift_the_blocks_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        logits(patched(), text(4), **arguments)


def test_a_cache_of_keys_and_values_raises():
    with pytest.raises(ValueError, match=r"past_key_values=MHLACache\(model\)"):
        patched().generate(text(9), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("kind", ["gated linear", "MHLA, softmax in the own block"])
def test_training_lowers_the_loss_and_keeps_mixing_in_its_range(kind):
    torch.manual_seed(0)
    model = tiny_llama.as_kind(LlamaForCausalLM(LlamaConfig(**tiny_llama.MODEL)), kind)
    rows = tiny_llama.rows(64, held_out=False)[:32]
    before = tiny_llama.losses_by_place(model, rows).mean()
    recipe = tiny_llama.Recipe(steps=10, batch_size=4, rate=5e-3, mixing_rate=0.5, warmup=1)
    tiny_llama.train(model, [{"input_ids": row, "labels": row} for row in rows], recipe, seed=0)
    assert tiny_llama.losses_by_place(model, rows).mean() < before - 0.3
    mixing = [module.mixing for module in model.modules() if isinstance(module, CausalMHLA)]
    assert all(one.min() > 0 and one.max() < 1 for one in mixing)


def test_tables_are_made_of_the_seeds_that_are_there(tmp_path):
    results = [json.loads((HERE / f"seed-{seed}.json").read_text()) for seed in tiny_llama.SEEDS]
    tiny_llama.write_tables(results, tmp_path)
    for name in ("scratch", "adapted", "beyond"):
        assert (tmp_path / f"{name}.md").read_text() == (HERE / f"{name}.md").read_text()


def test_an_attention_learns_from_softmax_s_and_then_the_model_does(tmp_path, monkeypatch, capsys):
    student, teacher, row = patched(layers=[1, 2]), llama(), text(batch=1)
    for loss in (smollm2.transfer_loss, smollm2.kl_loss):
        made = (loss(teacher, student, row) for _ in range(8))
        losses = list(smollm2.trained(student, made, steps=8, rate=1e-3))
        assert losses[-1] < losses[0]
    shutil.copytree(HERE / "smollm2", tmp_path / "smollm2")
    monkeypatch.setattr(smollm2, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "table"])
    smollm2.main()
    assert capsys.readouterr().out.strip() == (HERE / "smollm2.md").read_text().strip()


def test_decoding_is_timed_beside_keys_and_values(tmp_path, monkeypatch):
    sizes = ["--width", "64", "--layers", "1", "--tokens", "2", "--turns", "1", "--lengths", "64", "128"]
    monkeypatch.setattr(sys, "argv", ["decoding.py", "--output", str(tmp_path), *sizes])
    decoding.main()
    rows = [line.split(" | ") for line in (tmp_path / "decoding.md").read_text().splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["64", "128"]
    # keys and values of 64 channels in float32
    assert [row[4] for row in rows] == ["32 KiB", "64 KiB"]


def test_the_paper_s_size_and_rows():
    """Sec. 5.4: 0.3B, 10B tokens, 0.25M tokens a step, 32 blocks of 2,048 tokens."""
    recipe, length = llama_0_3b.RECIPE, llama_0_3b.LENGTH
    with torch.device("meta"):
        model = llama_0_3b.build("MHLA, softmax in the own block")
    assert 0.29e9 < sum(parameter.numel() for parameter in model.parameters()) < 0.36e9
    tokens = length * recipe.batch_size * recipe.accumulate
    assert 0.25e6 < tokens < 0.27e6 and abs(recipe.steps * tokens - 10e9) < tokens
    assert llama_0_3b.BLOCKS["blocks"] * llama_0_3b.BLOCKS["block_length"] == length
    rows = llama_0_3b.StreamedRows(lambda: ["abc", "defgh", "i"], lambda one: [*one.encode(), 0], 4)
    assert [row["input_ids"].tolist() for row in rows] == [[*b"abc", 0], [*b"defg"], [*b"h", 0, *b"i", 0]]
