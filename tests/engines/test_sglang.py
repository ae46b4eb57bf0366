"""SGLang's own attention layers with the plug-in, in processes that start as SGLang's do; on a CPU, over gloo."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from sglang_worker import GRID, STEPS, TEXT, TOKENS, tensors

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import NOTHING_DENSE

ROOT = Path(__file__).parents[2]
SPARSE_ALONE = {"MHLA_MIN_TOKENS": "0"} | {f"MHLA_{name.upper()}": str(count) for name, count in NOTHING_DENSE.items()}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: make engines"),
]


class Run:
    """Outputs of the processes of one run, one after another, and what they logged."""

    def __init__(self, folder: Path, world: int = 1, **variables: str) -> None:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("MHLA_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command = [*launch, Path(__file__).with_name("sglang_worker.py"), folder]
        done = subprocess.run(command, env=environment | variables, stderr=subprocess.PIPE, text=True, timeout=500)
        self.code, self.log = done.returncode, done.stderr
        self.outputs = [torch.load(path) for path in sorted(folder.glob("*.pt"))]

    def lines(self) -> list[str]:
        return re.findall(r"^\w+ MHLA: .*$", self.log, re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run processes with environment variables; once for each set of them."""

    @cache
    def get(world: int = 1, **variables: str) -> Run:
        done = Run(tmp_path_factory.mktemp("run"), world, **variables)
        assert done.code == 0, done.log[-3000:]
        return done

    return get


@pytest.fixture
def dense(run):
    return run().outputs[0]


@pytest.fixture
def sparse(run):
    return run(**SPARSE_ALONE, MHLA_DENSITY=".15")


def operator(query, key, value, extra=(0, 0)):
    return sparse_attention(query, key, value, GRID, density=0.15, extra=extra)


def test_without_variables_sglang_is_as_it_was(run):
    assert run().lines() == []


def test_density_1_is_dense_attention_everywhere(run, dense):
    exact = run(**SPARSE_ALONE, MHLA_DENSITY="1")
    output = exact.outputs[0]
    assert f"INFO MHLA: sparse in {2 * STEPS} of {2 * STEPS} attentions" in exact.lines()
    assert output.keys() == dense.keys()
    for name in dense:
        torch.testing.assert_close(output[name], dense[name], atol=1e-5, rtol=0, msg=name)


def test_sparse_attention_is_the_operator(sparse, dense):
    for layer in range(2):
        for step in range(STEPS):
            output = sparse.outputs[0][f"step {step} layer {layer}"]
            torch.testing.assert_close(output, operator(*tensors(TOKENS, seed=layer)), atol=1e-6, rtol=0)
            assert (output - dense[f"step {step} layer {layer}"]).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "extra"), [("text before", (TEXT, 0)), ("text after", (0, TEXT))])
def test_replicated_tokens_are_extra(sparse, name, extra):
    expected = operator(*tensors(TOKENS + TEXT), extra=extra)
    torch.testing.assert_close(sparse.outputs[0][name], expected, atol=1e-6, rtol=0)


def test_compiled_code_attends_and_counts_in_every_call(sparse):
    torch.testing.assert_close(sparse.outputs[0]["compiled"], operator(*tensors(TOKENS)), atol=1e-6, rtol=0)
    assert sparse.lines()[-1] == "INFO MHLA: sparse in 2 of 2 attentions", "of the last request"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mask", "a mask, padding"),
        ("causal", "causal"),
        ("no grid", "the token grid is unknown"),
        ("packed", "sequences are packed into one"),
    ],
)
def test_what_cannot_be_sparse_is_sglangs_own_and_told(sparse, dense, name, words):
    torch.testing.assert_close(sparse.outputs[0][name], dense[name], atol=0, rtol=0)
    assert any(line.startswith("WARNING") and re.search(words, line) for line in sparse.lines())


def test_cross_attention_is_dense_and_not_counted(sparse, dense):
    torch.testing.assert_close(sparse.outputs[0]["cross"], dense["cross"], atol=0, rtol=0)
    assert f"INFO MHLA: sparse in {2 * STEPS} of {2 * STEPS} attentions" in sparse.lines()


def test_first_steps_and_layers_stay_dense(run, dense):
    asked = run(**{**SPARSE_ALONE, "MHLA_DENSITY": ".15", "MHLA_DENSE_FIRST": "1", "MHLA_DENSE_LAYERS": "1"})
    for step in range(STEPS):
        for layer in range(2):
            name = f"step {step} layer {layer}"
            assert torch.equal(asked.outputs[0][name], dense[name]) == (step == 0 or layer == 0)
    assert "INFO MHLA: sparse in 2 of 6 attentions, 3 dense: first layers, 1 dense: dense steps" in asked.lines()
    assert any("the layer has no number, on which dense_layers=1 depends" in line for line in asked.lines())


def test_two_processes_with_ulysses_give_what_one_gives(run, sparse):
    two = run(2, **SPARSE_ALONE, MHLA_DENSITY=".15")
    first, second = two.outputs
    for name in first:
        if name == "text before":
            output = torch.cat((first[name], second[name][:, TEXT:]), dim=1)
        elif name == "text after":
            output = torch.cat((first[name][:, :-TEXT], second[name]), dim=1)
        else:
            output = torch.cat((first[name], second[name]), dim=1)
        torch.testing.assert_close(output, sparse.outputs[0][name], atol=1e-6, rtol=0, msg=name)
    assert f"INFO MHLA: sparse in {2 * STEPS} of {2 * STEPS} attentions" in two.lines()


@pytest.mark.parametrize("variable", ["MHLA_DENSITY", "MHLA_DENSE_STEPS"])
def test_wrong_variables_stop_sglang(tmp_path, variable):
    wrong = Run(tmp_path, **{variable: "2"})
    assert wrong.code == 1 and variable in wrong.log
