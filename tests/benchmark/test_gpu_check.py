"""``mhla bench gpu-check``, on the CPU: what fails here would fail on the day for a silly reason."""

import json
import math
import sys
import time

import pytest
import torch

from mhla_diffusers.attention.triton.tilings import PairTiling, Place, Tiling, tiles_of
from mhla_diffusers.attention.triton.tuning import pair_tiling, tiling
from mhla_diffusers.benchmark.gpu_check import run, steps, tests
from mhla_diffusers.benchmark.gpu_check.__main__ import FUNCTIONS
from mhla_diffusers.benchmark.gpu_check.correctness import SHAPES
from mhla_diffusers.benchmark.gpu_check.findings import Measured, Notebook, NotHereError, read_findings
from mhla_diffusers.benchmark.gpu_check.steps import MOST_SECONDS, STEPS, choose_steps
from mhla_diffusers.benchmark.problems import cut
from mhla_diffusers.benchmark.shapes import shapes
from mhla_diffusers.files import read_json

from ..attention.triton.interpreter import make_interpreter_fast
from .commands import bench

make_interpreter_fast()

CPU = torch.device("cpu")


def check(folder, *more):
    return bench("gpu-check", "--device", "cpu", "--output", folder, *more)


def test_every_step_has_a_function_and_time():
    assert [step.name for step in STEPS] == list(FUNCTIONS)
    assert sum(step.seconds for step in STEPS) <= MOST_SECONDS


def test_steps_are_chosen_by_name():
    assert [step.name for step in choose_steps(["models,device", "limits"])] == ["device", "limits", "models"]
    assert choose_steps(None) == list(STEPS)
    with pytest.raises(ValueError, match=r"'speed'; allowed: device, correctness.*Leave --steps out"):
        choose_steps(["device,speed"])


def test_the_tests_that_it_runs_carry_the_marker():
    """So does every file whose tests run on the device that is there."""
    texts = {path.name: path.read_text() for path in (tests._ROOT / tests._FOLDER).glob("test_*.py")}
    marked = {name for name, text in texts.items() if "pytestmark = pytest.mark.gpu" in text}
    assert marked == set(tests._FILES) == {name for name, text in texts.items() if "DEVICE" in text}


@pytest.mark.parametrize(
    ("step", "skipped"),
    [
        ("device", set()),
        ("correctness", set()),
        ("limits", {"a second device", "compute-sanitizer"}),
        ("tests", set(tests._FILES)),
        ("rivals", set()),
        pytest.param("kernels", set(), marks=pytest.mark.slow),
        pytest.param("models", set(), marks=pytest.mark.slow),
        pytest.param(
            "integration",
            {f"CUDA graph, {kind}" for kind in ("plain", "exact tiles", "exact tiles by content", "causal")},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_step_finds_on_a_cpu(tmp_path, step, skipped):
    FUNCTIONS[step](Notebook(tmp_path / "found.json"), CPU)
    found = read_findings(tmp_path / "found.json")
    assert [(one.name, one.reason) for one in found if one.status == "failed"] == []
    assert {one.name for one in found if one.status == "skipped"} - {"clocks"} == skipped
    assert all(one.reason for one in found if one.status == "skipped")
    if step == "kernels":
        python, *kernels = found
        assert 0 < python.numbers["seconds"] < 0.1
        text = json.dumps([one.numbers for one in kernels])
        assert len(kernels) == 32 and '"bytes"' in text and '"seconds"' not in text


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
    start = run._Child._start

    def started(child):
        child._command = [sys.executable, str(program), str(child._findings)]
        return start(child)

    monkeypatch.setattr(run._Child, "_start", started)
    return run._run_step(steps.Step("device", seconds), CPU, "a CPU", tmp_path, 1000.0)


@pytest.mark.slow
def test_a_crash_costs_one_attempt(tmp_path, monkeypatch):
    program = """
import os, sys
from pathlib import Path
from mhla_diffusers.benchmark.gpu_check.findings import Measured, Notebook
notebook = Notebook(Path(sys.argv[1]))
print("here I am")
for name in "abc":
    notebook.attempt(name, lambda: os.abort() if name == "b" else Measured({"x": 1}))
"""
    report = run_program(tmp_path, monkeypatch, program, seconds=100.0)
    assert [(one.name, one.status) for one in report.findings] == [("a", "ok"), ("b", "failed"), ("c", "ok")]
    assert report.status == "failed" and report.reason == "" and "here I am" in report.output
    assert "in the middle of it" in report.findings[1].reason


def test_a_step_ends_at_its_limit_with_what_it_found(tmp_path, monkeypatch):
    program = """
import json, sys, time
with open(sys.argv[1], "w") as file:
    json.dump([{"name": "a", "status": "ok"}], file)
time.sleep(1000)
"""
    began = time.monotonic()
    report = run_program(tmp_path, monkeypatch, program, seconds=3.0)
    assert time.monotonic() - began < 30
    assert report.status == "failed" and "its limit" in report.reason
    assert [(one.name, one.status) for one in report.findings] == [("a", "ok")]


def test_a_step_that_has_no_time_left_says_so(tmp_path):
    report = run._run_step(STEPS[0], CPU, "a CPU", tmp_path, 1.0)
    assert report.status == "skipped" and "--steps device" in report.reason


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
    notebook.attempt("wrong", lambda: Measured({"error": 1.0}, wrong="too large"))
    with pytest.raises(SystemExit):
        notebook.attempt("lost", lost)
    Notebook(tmp_path / "found.json").attempt("lost", lambda: pytest.fail("made again"))
    found = {one.name: one for one in read_findings(tmp_path / "found.json")}
    assert [one.status for one in found.values()] == ["skipped", "failed", "failed", "failed"]
    assert found["broken"].reason == "ZeroDivisionError: by nothing" and found["wrong"].numbers == {"error": 1.0}


def test_attempts_are_shared_out(tmp_path):
    shared = []
    for share in range(2):
        notebook = Notebook(tmp_path / f"{share}.json", share, 2)
        for name in "abc":
            notebook.attempt(name, lambda: Measured({}))
        shared.append([one.name for one in read_findings(notebook.file)])
    assert shared == [["a", "c"], ["b"]]


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_and_tiles_of_a_cut_shape_are_the_real_ones(name):
    real = shapes()[name]
    small = cut(real, 4096)
    assert [n // b for n, b in zip(small.grid, small.blocks, strict=True)] == [
        n // b for n, b in zip(real.grid, real.blocks, strict=True)
    ]
    assert small.head_dim == real.head_dim and 1000 < small.tokens <= 4096
    if real.tiles is not None:
        assert [n / t for n, t in zip(small.grid, small.tiles, strict=True)] == [
            n / t for n, t in zip(real.grid, real.tiles, strict=True)
        ]
    least = cut(real, 100)
    assert least.blocks == (1,) * len(real.blocks)
    assert least.tokens <= 100 if real.tiles is None else math.prod(least.tiles) >= 2


def test_tiles_are_what_was_wished_for_within_the_context():
    settings = (64, torch.bfloat16, 100)
    wishes = {"output": Tiling(16, 32, 2, 3), "sparse": PairTiling(16, 16, 2, 3)}
    for function, name in ((tiling, "output"), (pair_tiling, "exact")):
        place = Place("sm_90", name, *settings)
        default = function(place)
        with tiles_of(name, wishes[name]):
            assert function(place) == wishes[name]
        assert function(place) == default != wishes[name]


def test_the_kernels_tests_are_left_out_with_a_reason(tmp_path, monkeypatch):
    notebook, card = Notebook(tmp_path / "found.json"), torch.device("cuda")
    monkeypatch.setattr(tests, "find_spec", lambda name: None)
    notebook.attempt("no pytest", lambda: tests._run_file(tests._FOLDER / "test_kernels.py", card))
    monkeypatch.setattr(tests, "_ROOT", tmp_path)
    notebook.attempt("no checkout", lambda: tests._run_file(tests._FOLDER / "test_kernels.py", card))
    found = read_findings(notebook.file)
    assert [one.status for one in found] == ["skipped", "skipped"]
    assert "pytest, hypothesis" in found[0].reason and "not run from a checkout" in found[1].reason
