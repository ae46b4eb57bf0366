"""The self-attentions that a transformer is measured with."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from mhla_diffusers import MHLAConfig, is_patched
from mhla_diffusers.benchmark import shapes
from mhla_diffusers.benchmark.cases import PATCHES, Case, Choice, attention_choices, content_note
from mhla_diffusers.benchmark.models import Size, choose_sizes, models
from mhla_diffusers.benchmark.results import CONTENT
from mhla_diffusers.benchmark.timing import Absent
from mhla_diffusers.families import get_family

CPU = torch.device("cpu")
MHLA = Choice("MHLA", "MHLA")


def a_case(name, layers=None):
    model = models()[name]
    return Case(model, choose_sizes(model, None, None, "cpu")[0], layers, CPU, torch.float32)


def token_grid(case, transformer):
    return get_family(transformer).token_grid(transformer, case.inputs(transformer)["hidden_states"])


def output(case, candidate):
    torch.manual_seed(0)
    return candidate.run(case.inputs(candidate.model))()[0]


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana", "tiny-dit"])
def test_candidates_share_weights_and_compute_what_they_say(name):
    case = a_case(name)
    transformer = case.build()
    native = case.candidate(transformer, Choice("softmax native", "softmax", baseline=True))
    expected = output(case, native)
    choices = attention_choices(
        get_family(transformer), case.model, case.model.layers, token_grid(case, transformer), 1, CPU
    )
    for choice in choices:
        candidate = case.candidate(transformer, choice)
        if choice.absent is not None:
            assert candidate.model is None and candidate.run({}) == Absent(choice.absent)
            continue
        assert all(
            parameter is own
            for parameter, own in zip(candidate.model.parameters(), transformer.parameters(), strict=False)
        ) or is_patched(candidate.model)
        found = output(case, candidate)
        change = float((found - expected).norm() / expected.norm())
        if choice.kind == "softmax":
            assert change < 1e-4, choice
        if choice.kind in PATCHES:
            is_softmax = "100.0% of the pairs" in choice.note  # of a grid of one block
            assert is_patched(candidate.model) and (change > 1e-5) != is_softmax, choice
    assert not is_patched(transformer)
    assert _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE


@pytest.mark.parametrize(("name", "there"), [("tiny-wan", True), ("tiny-dit", True), ("tiny-sana", False)])
def test_the_sparse_branch_is_for_models_of_softmax_attention(name, there):
    case = a_case(name)
    transformer = case.build()
    grid = token_grid(case, transformer)
    found = [c for c in attention_choices(get_family(transformer), case.model, 3, grid, 1, CPU) if c.kind == CONTENT]
    assert len(found) == there and all("chosen at every call" in choice.note for choice in found)


def test_samples_of_a_batch_do_not_attend_to_each_other(monkeypatch):
    """So what weights of softmax need grows with their number, and not with its square."""
    monkeypatch.setattr(shapes, "free_bytes", lambda device: 10 * 2 * 4 * 2 * 64**2)
    case = replace(a_case("tiny-pooled-vit", layers=1), size=Size(32, 32, None, batch=10))
    (choice,) = case.count(["softmax math"]).choices
    assert choice.absent is None


def test_the_note_tells_the_density_that_there_is():
    config = MHLAConfig((2, 2), sparse="content")
    assert content_note(config, (64, 64)).startswith("4.7% of the pairs of 64 blocks of 64 tokens")
    assert content_note(config, (8, 16)).startswith("50.0% of the pairs of 2 ")


def test_plain_linear_attention_is_what_sana_has():
    case = a_case("tiny-sana")
    transformer = case.build()
    choices = [Choice(kind, kind) for kind in ("own", "plain linear", "softmax")]
    own, plain, softmax = (output(case, case.candidate(transformer, choice)) for choice in choices)
    assert (plain - own).norm() < 1e-3 * (softmax - own).norm() + 1e-5 * own.norm()


@pytest.mark.slow
def test_compiled_layers_compute_the_same():
    case = a_case("tiny-dit", layers=1)
    transformer = case.build()
    expected = output(case, case.candidate(transformer, MHLA))
    compiled = case.candidate(transformer, MHLA, compiled=True)
    assert compiled.name == "MHLA + torch.compile"
    torch.testing.assert_close(output(case, compiled), expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()


def test_pytorch_backends_are_not_compiled_apart():
    case = a_case("tiny-dit", layers=1)
    flash = Choice("softmax flash", "softmax", baseline=True, backend="flash")
    candidate = case.candidate(case.build(), flash, compiled=True)
    assert candidate.run({}) == Absent("torch.compile chooses PyTorch's backend itself")
