"""The kernels compile for cards that are not there, fit into their memory, and spill no more than they did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_diffusers.attention.triton.tiles import PROCESSORS

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
TOGETHER = ("sm_90",), ("sm_80", "sm_86", "sm_89"), ("sm_100", "sm_120", "gfx942")
"""What one process compiles for: starting one takes as long as five kernels."""
KERNELS = 17
ALLOWED_STACK = {
    ("pooled_dkv_kernel", "16 bits"): 16,
    ("pooled_dkv_kernel", "72 channels"): 16,
    ("listed_forward_kernel", "blocks of 128"): 136,
    ("pooled_dkv_kernel", "blocks of 128"): 16,
    "16 bits, 256 channels": 48,
    "float32": 328,
    "float32, 256 channels": 520,
}
"""Bytes of a thread's stack, by kernel and problem, or of all kernels of a problem."""
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
    reports = [report for report in reports if report["architecture"] == architecture]
    assert len({report["kernel"] for report in reports}) == kernels
    for report in reports:
        kernel, problem = report["kernel"], report["problem"]
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        assert report["stack_bytes"] <= ALLOWED_STACK.get((kernel, problem), ALLOWED_STACK.get(problem, 0)), report
        if kernel.startswith("prepare") and architecture.startswith("sm_"):
            # of order, valid and, with 72 channels, key mask; all else is read 16 bytes at a time
            assert report["narrow_loads"] <= (11 if problem == "72 channels" else 5), report
        # key blocks of 16 and 32 are too few rows for it in the gradient of keys, which takes one block at a time
        has_rows = not (kernel == "listed_dkv_kernel" and problem.startswith("keys in"))
        if (
            kernel.startswith(("listed", "pooled"))
            and has_rows
            and architecture == "sm_90"
            and "float32" not in problem
        ):
            assert report["loop"]["wgmma.mma_async"] >= 12, report


@pytest.mark.slow
@pytest.mark.parametrize("architectures", TOGETHER, ids=" ".join)
def test_kernels_fit(architectures, tmp_path):
    reports = run(*architectures, folder=tmp_path)
    for architecture in architectures:
        check(reports, architecture)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST_TRITON.is_dir(), reason="make puts the oldest Triton beside the installed one")
def test_kernels_fit_with_the_oldest_triton(tmp_path):
    """Those of the linear branch, which every call has."""
    check(run("sm_90", "MHLA", folder=tmp_path, triton=OLDEST_TRITON), "sm_90", kernels=4)


def test_another_resolution_compiles_nothing(tmp_path):
    for name, counts in run("variants", folder=tmp_path):
        # states are added up of keys, and as gradients of queries; rows have gradients of queries, keys and values
        several = {"states_kernel": 2, "rows_gradient_kernel": 3}
        assert all(count <= several.get(kernel, 1) for kernel, count in counts.items()), (name, counts)


def test_the_table_of_cards_is_whole():
    assert set(SHARED_MEMORY) == set(PROCESSORS) == {name for group in TOGETHER for name in group}
