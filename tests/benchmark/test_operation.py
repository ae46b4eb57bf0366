"""The benchmark of one attention, on a small shape."""

import json

import pytest
import torch

from mhla_diffusers.benchmark import operation
from mhla_diffusers.benchmark.operation import Shape, benchmark_operation, write_result
from mhla_diffusers.benchmark.timing import time_interleaved

SMALL = Shape("small", (4, 6, 6), (2, 2, 3), 2, 16)


def test_a_result_holds_every_variant_and_its_conditions(tmp_path):
    result = benchmark_operation(SMALL, repetitions=3, softmax=2)
    assert {name: timing.repetitions for name, timing in result.timings.items()} == {
        "MHLA": 3,
        "plain linear": 3,
        "softmax (SDPA)": 2,
    }
    assert all(0 < timing.p20 <= timing.median <= timing.p80 for timing in result.timings.values())
    assert result.ratio("MHLA", "MHLA") == 1
    write_result(result, tmp_path / "runs" / "small.json")
    saved = json.loads((tmp_path / "runs" / "small.json").read_text())
    assert saved["shape"]["grid"] == [4, 6, 6]
    assert saved["dtype"] == "float32"


def test_a_wrong_attention_is_not_timed(monkeypatch):
    right = operation.mhla_attention
    monkeypatch.setattr(operation, "mhla_attention", lambda *args: right(*args) + 1)
    with pytest.raises(ValueError, match="relative error .* Nothing was timed"):
        benchmark_operation(SMALL)


def test_variants_take_turns():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "ab"}
    time_interleaved(variants, {"a": 3, "b": 2}, torch.device("cpu"))
    assert calls == ["a", "b", "a", "b", "a", "b", "a"]
