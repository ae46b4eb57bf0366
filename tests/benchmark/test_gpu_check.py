"""``mhla bench gpu-check``, on the CPU: what fails here would fail on the day for a silly reason."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from mhla_diffusers.benchmark import gpu_check
from mhla_diffusers.benchmark.correctness import cut
from mhla_diffusers.benchmark.gpu_check import (
    SHAPES,
    STEPS,
    Notebook,
    NotHereError,
    choose_steps,
    found,
    read_findings,
    run_step,
)
from mhla_diffusers.benchmark.shapes import shapes
from mhla_diffusers.files import read_json

from ..attention.triton.interpreter import make_interpreter_fast
from .commands import bench

make_interpreter_fast()

CPU = torch.device("cpu")


def check(folder, *more):
    return bench("gpu-check", "--device", "cpu", "--output", folder, *more)


def test_steps_are_chosen_by_name():
    assert choose_steps(["integration,device", "limits"]) == ["device", "limits", "integration"]
    assert choose_steps(None) == list(STEPS)
    with pytest.raises(ValueError, match=r"'speed'; allowed: device, correctness"):
        choose_steps(["device,speed"])


def test_tests_that_take_the_device_that_is_there_carry_the_marker():
    """So that ``pytest -m gpu`` runs them in a checkout on a card."""
    folder = Path(__file__).parents[1] / "attention" / "triton"
    texts = {path.name: path.read_text() for path in folder.glob("test_*.py")}
    marked = {name for name, text in texts.items() if "pytestmark = pytest.mark.gpu" in text}
    assert marked == {name for name, text in texts.items() if "DEVICE" in text or "on_device" in text} != set()


@pytest.mark.parametrize(
    ("step", "skipped"),
    [
        ("device", set()),
        pytest.param("correctness", set(), marks=pytest.mark.slow),
        ("limits", {"a second device", "compute-sanitizer"}),
        pytest.param(
            "integration",
            {f"CUDA graph, {kind}" for kind in ("plain", "sparse", "sparse by content", "causal")},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_step_finds_on_a_cpu(tmp_path, step, skipped):
    STEPS[step][0](Notebook(tmp_path / "found.json"), CPU)
    findings = read_findings(tmp_path / "found.json")
    assert [(one.name, one.text) for one in findings if one.status == "failed"] == []
    assert {one.name for one in findings if one.status == "skipped"} == skipped
    assert all(one.text for one in findings)


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path):
    assert "device: ok" in check(tmp_path, "--steps", "device")
    before = (tmp_path / "device.json").stat().st_mtime_ns
    assert "device: ok, kept" in check(tmp_path, "--steps", "device")
    assert (tmp_path / "device.json").stat().st_mtime_ns == before
    page = (tmp_path / "summary.md").read_text()
    assert "| device | ok |" in page and "GB/s copied" in page
    result = read_json(tmp_path / "device.json")
    (tmp_path / "device.json").write_text(json.dumps(result | {"device": "Card A"}))
    with pytest.raises(OSError, match=r"device.json is of 'Card A'.*another --output"):
        check(tmp_path)
    assert not list(tmp_path.glob(".*"))


def run_program(tmp_path, monkeypatch, text, seconds):
    """The result of a step that does this."""
    program = tmp_path / "program.py"
    program.write_text(text)
    start = gpu_check.subprocess.Popen

    def started(command, **options):
        return start([sys.executable, str(program), command[-1]], **options)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", started)
    return run_step("device", CPU, "a CPU", tmp_path, seconds)


@pytest.mark.slow
def test_a_crash_costs_one_attempt(tmp_path, monkeypatch):
    program = """
import os, sys
from pathlib import Path
from mhla_diffusers.benchmark.gpu_check import Notebook, found
notebook = Notebook(Path(sys.argv[1]))
for name in "abc":
    notebook.attempt(name, lambda: os.abort() if name == "b" else found("", x=1))
"""
    report = run_program(tmp_path, monkeypatch, program, seconds=100.0)
    assert [(one.name, one.status) for one in report.findings] == [("a", "ok"), ("b", "failed"), ("c", "ok")]
    assert report.status == "failed" and report.reason == ""
    assert "killed, during the attempt" in report.findings[1].text


def test_a_step_ends_at_its_limit_with_what_it_found(tmp_path, monkeypatch):
    program = """
import json, sys, time
with open(sys.argv[1], "w") as file:
    json.dump([{"name": "a", "status": "ok"}], file)
time.sleep(1000)
"""
    began = time.monotonic()
    report = run_program(tmp_path, monkeypatch, program, seconds=2.0)
    assert time.monotonic() - began < 30
    assert report.status == "failed" and "its limit" in report.reason
    assert [(one.name, one.status) for one in report.findings] == [("a", "ok")]


def raises(error):
    raise error


def test_what_an_attempt_raises_is_a_finding(tmp_path):
    notebook = Notebook(tmp_path / "found.json")
    notebook.attempt("absent", raises, NotHereError("no such thing"))
    notebook.attempt("broken", raises, ZeroDivisionError("by nothing"))
    notebook.attempt("wrong", lambda: found("", "too large", error=1.0))
    with pytest.raises(SystemExit):
        notebook.attempt("lost", raises, RuntimeError("CUDA error: an illegal memory access was encountered"))
    Notebook(tmp_path / "found.json").attempt("lost", lambda: pytest.fail("made again"))
    findings = {one.name: one for one in read_findings(tmp_path / "found.json")}
    assert [one.status for one in findings.values()] == ["skipped", "failed", "failed", "failed"]
    assert findings["broken"].text == "ZeroDivisionError: by nothing" and findings["wrong"].numbers == {"error": 1.0}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_a_cut_shape_are_the_real_ones(name):
    real = shapes()[name]
    small = cut(real, 4096)
    lengths = [[n // b for n, b in zip(one.grid, one.blocks, strict=True)] for one in (small, real)]
    assert lengths[0] == lengths[1]
    assert (small.head_dim, small.block_size) == (real.head_dim, real.block_size) and 1000 < small.tokens <= 4096
    least = cut(real, 30)
    assert least.blocks == (1,) * len(real.blocks)
    assert least.tokens <= 30 if real.block_size is None else least.uniform_blocks >= 2
