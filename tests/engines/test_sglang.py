"""SGLang's own attention layers with the plug-in, in processes that start as SGLang's do; on a CPU, over gloo."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from sglang_worker import GRID, STEPS, TEXT, TOKENS, tensors

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import NOTHING_DENSE

ROOT = Path(__file__).parents[2]
SPARSE_ALONE = {"MHLA_MIN_TOKENS": "0"} | {f"MHLA_{name.upper()}": str(count) for name, count in NOTHING_DENSE.items()}
GROUP = "sglang.multimodal_gen.plugins"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: make engines"),
]


class Processes:
    """Outputs of the processes of one run, one after another, and what they logged."""

    def __init__(self, folder: Path, world: int = 1, **variables: str) -> None:
        port = _free_port()
        running = [self._start(folder, rank, world, port, variables) for rank in range(world)]
        self.logs = [process.communicate(timeout=500)[1] for process in running]
        self.codes = [process.returncode for process in running]
        paths = [folder / f"{rank}.pt" for rank in range(world)]
        self.outputs = [torch.load(path) for path in paths if path.exists()]

    @staticmethod
    def _start(folder: Path, rank: int, world: int, port: int, variables: dict[str, str]) -> subprocess.Popen[str]:
        # the entry point as an installed mhla_diffusers would have it
        metadata = folder / "mhla_diffusers-0.dist-info"
        metadata.mkdir(exist_ok=True)
        entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
        lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in entry_points.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mhla_diffusers\nVersion: 0\n")
        environment = {name: text for name, text in os.environ.items() if not name.startswith("MHLA_")}
        environment |= {
            "PYTHONPATH": f"{folder}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            **variables,
        }
        command = [sys.executable, str(Path(__file__).with_name("sglang_worker.py")), str(folder / f"{rank}.pt")]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def lines(self, rank: int = 0) -> list[str]:
        return re.findall(r"^\w+ MHLA: .*$", self.logs[rank], re.MULTILINE)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run processes with environment variables; once for each set of them."""
    done: dict[object, Processes] = {}

    def get(world: int = 1, **variables: str) -> Processes:
        key = (world, *sorted(variables.items()))
        if key not in done:
            done[key] = Processes(tmp_path_factory.mktemp("run"), world, **variables)
        assert done[key].codes == [0] * world, done[key].logs[0][-3000:]
        return done[key]

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
    wrong = Processes(tmp_path, **{variable: "2"})
    assert wrong.codes == [1] and variable in wrong.logs[0]
