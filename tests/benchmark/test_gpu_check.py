"""``mhla bench gpu-check``, on the CPU: what fails here would fail on the day for a silly reason."""

import json
import sys
import time

import pytest
import torch

from mhla_diffusers.benchmark.gpu_check import run
from mhla_diffusers.benchmark.gpu_check.checks import _ROOT, FUNCTIONS, SHAPES, TESTS
from mhla_diffusers.benchmark.gpu_check.findings import Measured, Notebook, NotHereError, read_findings
from mhla_diffusers.benchmark.gpu_check.run import STEPS, choose_steps, run_step
from mhla_diffusers.benchmark.problems import cut
from mhla_diffusers.benchmark.shapes import shapes
from mhla_diffusers.files import read_json

from ..attention.triton.interpreter import make_interpreter_fast
from .commands import bench

make_interpreter_fast()

CPU = torch.device("cpu")


def check(folder, *more):
    return bench("gpu-check", "--device", "cpu", "--output", folder, *more)


def test_steps_are_chosen_by_name():
    assert list(STEPS) == list(FUNCTIONS)
    assert choose_steps(["kernels,device", "limits"]) == ["device", "limits", "kernels"]
    assert choose_steps(None) == list(STEPS)
    with pytest.raises(ValueError, match=r"'speed'; allowed: device, correctness.*Leave --steps out"):
        choose_steps(["device,speed"])


def test_tests_that_take_the_device_that_is_there_carry_the_marker():
    texts = {path.name: path.read_text() for path in (_ROOT / TESTS).glob("test_*.py")}
    marked = {name for name, text in texts.items() if "pytestmark = pytest.mark.gpu" in text}
    assert marked == {name for name, text in texts.items() if "DEVICE" in text or "on_device" in text} != set()


@pytest.mark.parametrize(
    ("step", "skipped"),
    [
        ("device", set()),
        pytest.param("correctness", set(), marks=pytest.mark.slow),
        ("limits", {"a second device", "compute-sanitizer"}),
        ("tests", {f"pytest -m gpu {TESTS}"}),
        pytest.param("kernels", set(), marks=pytest.mark.slow),
        pytest.param(
            "integration",
            {f"CUDA graph, {kind}" for kind in ("plain", "sparse", "sparse by content", "causal")},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_step_finds_on_a_cpu(tmp_path, step, skipped):
    FUNCTIONS[step](Notebook(tmp_path / "found.json"), CPU)
    found = read_findings(tmp_path / "found.json")
    assert [(one.name, one.text) for one in found if one.status == "failed"] == []
    assert {one.name for one in found if one.status == "skipped"} == skipped
    assert all(one.text for one in found)
    if step == "kernels":
        text = json.dumps([one.numbers for one in found])
        assert len(found) > 10 and '"bytes"' in text and '"seconds"' not in text


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path):
    output = check(tmp_path, "--steps", "device,tests")
    assert "device: ok" in output and "tests: skipped" in output
    before = (tmp_path / "device.json").stat().st_mtime_ns
    assert "device: ok, kept" in check(tmp_path, "--steps", "device")
    assert (tmp_path / "device.json").stat().st_mtime_ns == before
    page = (tmp_path / "summary.md").read_text()
    assert "| device | ok |" in page and "| tests | skipped |" in page and "GB/s copied" in page
    result = read_json(tmp_path / "device.json")
    (tmp_path / "device.json").write_text(json.dumps(result | {"device": "Card A"}))
    with pytest.raises(OSError, match=r"device.json is of 'Card A'.*another --output"):
        check(tmp_path)
    assert not list(tmp_path.glob(".*"))


def run_program(tmp_path, monkeypatch, text, seconds):
    """The result of a step that does this."""
    program = tmp_path / "program.py"
    program.write_text(text)
    start = run.subprocess.Popen

    def started(command, **options):
        return start([sys.executable, str(program), command[-1]], **options)

    monkeypatch.setattr(run.subprocess, "Popen", started)
    return run_step("device", CPU, "a CPU", tmp_path, seconds)


@pytest.mark.slow
def test_a_crash_costs_one_attempt(tmp_path, monkeypatch):
    program = """
import os, sys
from pathlib import Path
from mhla_diffusers.benchmark.gpu_check.findings import Measured, Notebook
notebook = Notebook(Path(sys.argv[1]))
for name in "abc":
    notebook.attempt(name, lambda: os.abort() if name == "b" else Measured("", {"x": 1}))
"""
    report = run_program(tmp_path, monkeypatch, program, seconds=100.0)
    assert [(one.name, one.status) for one in report.findings] == [("a", "ok"), ("b", "failed"), ("c", "ok")]
    assert report.status == "failed" and report.reason == ""
    assert "in the middle of it" in report.findings[1].text


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


def test_what_an_attempt_raises_is_a_finding(tmp_path):
    def absent():
        raise NotHereError("no such thing")

    def broken():
        raise ZeroDivisionError("by nothing")

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    notebook = Notebook(tmp_path / "found.json")
    notebook.attempt("absent", absent)
    notebook.attempt("broken", broken)
    notebook.attempt("wrong", lambda: Measured("", {"error": 1.0}, wrong="too large"))
    with pytest.raises(SystemExit):
        notebook.attempt("lost", lost)
    Notebook(tmp_path / "found.json").attempt("lost", lambda: pytest.fail("made again"))
    found = {one.name: one for one in read_findings(tmp_path / "found.json")}
    assert [one.status for one in found.values()] == ["skipped", "failed", "failed", "failed"]
    assert found["broken"].text == "ZeroDivisionError: by nothing" and found["wrong"].numbers == {"error": 1.0}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_of_a_cut_shape_are_the_real_ones(name):
    real = shapes()[name]
    small = cut(real, 4096)
    assert [n // b for n, b in zip(small.grid, small.blocks, strict=True)] == [
        n // b for n, b in zip(real.grid, real.blocks, strict=True)
    ]
    assert (small.head_dim, small.block_size) == (real.head_dim, real.block_size) and 1000 < small.tokens <= 4096
    least = cut(real, 30)
    assert least.blocks == (1,) * len(real.blocks)
    assert least.tokens <= 30 if real.block_size is None else least.uniform_blocks >= 2
