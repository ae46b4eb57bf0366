"""``mhla check``: what it computes, writes and says; and that sparse attention needs little more memory than dense."""

import re

import torch
from typer.testing import CliRunner

from mhla_diffusers import apply_mhla
from mhla_diffusers.cli import app

from . import models
from .attention.problems import peak_bytes

SMALL = ("check", "--model", "tiny-wan", "--device", "cpu")


def test_a_check_is_correct_written_and_tells_what_pays(tmp_path):
    ended = CliRunner().invoke(app, [*SMALL, "--output", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    found = (tmp_path / "check.md").read_text()
    assert found in ended.output and "\ncorrect: largest error" in found
    assert re.search(r"\*\*(pays|leave it off)", found)
    timed = found.partition("one attention, ")[2]
    for name in ("softmax flash", "faithful", "balanced", "fast"):
        assert re.search(rf"\| {name} \| [\d.]+ \|", timed), name


def test_a_cpu_times_a_part_of_a_long_sequence_and_decides_nothing(tmp_path):
    command = ("check", "--model", "pixart-alpha-xl-2", "--size", "2048", "--device", "cpu", "--output", str(tmp_path))
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    (bound,) = re.findall(r"\| faithful \| ([\d.]+) \| [\d.]+ \|", ended.output.partition("one attention, ")[0])
    assert re.search(rf"\*\*not decided on a CPU: over 4,096 of 16,384 tokens, .* at most {bound}x", ended.output)


def test_a_patched_forward_holds_at_most_a_third_more_than_a_dense_one():
    """On the eager path: 2,304 tokens, heads of 128 channels."""
    model = models.wan(num_attention_heads=4, attention_head_dim=128, ffn_dim=2048, num_layers=2)
    given = {
        "hidden_states": torch.randn(1, 16, 4, 48, 48),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 16, 32),
    }

    dense = peak_bytes(lambda: model(**given))
    apply_mhla(model, "fast", dense_first=0, dense_every=0)
    assert dense < peak_bytes(lambda: model(**given)) <= 1.3 * dense
