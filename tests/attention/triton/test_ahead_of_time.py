"""The kernels compile for cards that are not there, fit into their memory, spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mhla_diffusers.attention.triton.launch import PROCESSORS

KIB = 1024
SHARED_MEMORY = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx942": 64 * KIB,
}
"""What one block (workgroup) may have; from the vendors' tables of limits per architecture."""
KERNELS = 16
ALLOWED_STACK = {"listed_forward of 128": 112, "pooled_dkv": 16}
"""On an H100, whose tiles are those that were measured fastest, with about as many bytes in a thread's stack."""
OLDEST_TRITON = Path(sys.prefix) / "triton-oldest"
"""The oldest version that is allowed, beside the installed one; the Makefile puts it there."""


def run(*arguments, folder, triton=None):
    """Lines of JSON that the program prints, in a process without the interpreter and with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    if triton is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(triton), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.attention.triton.ahead_of_time", *arguments]
    root = Path(__file__).parents[3]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=root).stdout
    print(text)
    return [json.loads(line) for line in text.splitlines()]


def check(reports, architecture, kernels=KERNELS):
    assert len({report["kernel"] for report in reports}) == kernels
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        allowed = ALLOWED_STACK.get(report["kernel"], 0) if architecture == "sm_90" else 0
        assert report["stack_bytes"] <= allowed, report
        if report["kernel"].startswith("prepare") and architecture.startswith("sm_"):
            assert report["narrow_loads"] <= 5, report  # of order and valid; all else is read 16 bytes at a time
        if report["kernel"].startswith(("listed", "pooled")) and architecture == "sm_90":
            assert report["problem"] == "float32" or report["loop"]["wgmma.mma_async"] >= 12, report


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture, tmp_path):
    check(run(architecture, folder=tmp_path), architecture)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST_TRITON.is_dir(), reason="make puts the oldest Triton beside the installed one")
def test_kernels_fit_with_the_oldest_triton(tmp_path):
    """Those of the linear branch, which every call has."""
    check(run("sm_90", "linear", folder=tmp_path, triton=OLDEST_TRITON), "sm_90", kernels=5)


def test_another_resolution_compiles_nothing(tmp_path):
    for name, counts in run("variants", folder=tmp_path):
        assert set(counts.values()) == {1}, (name, counts)


def test_the_table_of_cards_is_whole():
    assert set(SHARED_MEMORY) == set(PROCESSORS)
