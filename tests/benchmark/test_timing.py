"""Interleaving, and variants that cannot run."""

import pytest
import torch

from mhla_diffusers.benchmark.timing import Absent, Budget, time_interleaved

CPU = torch.device("cpu")


def test_variants_take_turns():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "ab"}
    outcomes = time_interleaved(variants, CPU, Budget(seconds=1e-9, least=3))
    assert calls[-6:] == ["a", "b", "a", "b", "a", "b"]
    assert outcomes["a"].timing.repetitions == 3
    assert outcomes["a"].peak_bytes is None


def test_what_cannot_run_is_listed_with_its_reason():
    def too_large():
        torch.empty(2**58)

    def refused():
        raise RuntimeError("No available kernel.\nmore")

    variants = {"gone": Absent("not installed"), "large": too_large, "refused": refused, "runs": lambda: None}
    outcomes = time_interleaved(variants, CPU, Budget(seconds=1e-9))
    assert list(outcomes) == list(variants)
    assert [outcome.status for outcome in outcomes.values()] == ["absent", "out of memory", "absent", "measured"]
    assert outcomes["gone"].reason == "not installed"
    assert outcomes["refused"].reason == "No available kernel."


def test_the_budget_bounds_repetitions():
    budget = Budget(seconds=1, least=3, most=30)
    assert [budget.repetitions(seconds) for seconds in (1e-6, 0.1, 60)] == [30, 10, 3]
    with pytest.raises(ValueError, match="seconds=0"):
        Budget(seconds=0)
