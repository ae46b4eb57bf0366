"""The kernels compile for cards that are not there, fit into their memory, and spill no more than they did.

``make kernels`` compiles all of them into kernels.csv; the tests ask whether that is of today's kernels.
"""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from mhla_diffusers.attention.triton.tiles import PROCESSORS

from .ahead_of_time import COMPILED, TABLE_FILE

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
KERNELS, LINEAR_KERNELS = 13, 3
ALLOWED_STACK = {
    ("listed_kernel", "blocks of 128"): 136,
    "16 bits, 256 channels": 16,
    "float32": 320,
    "float32, 256 channels": 464,
}
"""Bytes of a thread's stack, by kernel and problem, or of all kernels of a problem."""
ROOT = Path(__file__).parents[3]


def compiler(*arguments, folder):
    """Objects that the program prints, run without the interpreter and with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", "tests.attention.triton.ahead_of_time", *arguments]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT).stdout
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def table():
    with TABLE_FILE.open(newline="") as file:
        return [row | {name: int(row[name]) for name in COMPILED} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Rows of today's kernels, and how many variants of each several resolutions need, by problem."""
    rows, *variants = compiler("rows", folder=tmp_path_factory.mktemp("cache"))
    return rows, variants


def installed(table):
    """Rows of the Triton that is installed, which on a machine with CUDA may be another than the pinned one."""
    rows = [row for row in table if row["triton"] == triton.__version__]
    if not rows:
        pytest.skip(f"kernels.csv is of the Triton that constraints.txt pins, not of {triton.__version__}")
    return rows


def test_the_table_is_of_todays_kernels_and_launches(table, said):
    """If this fails, run ``make kernels`` and look at what changed in kernels.csv."""
    expected, _ = said
    assert [{name: row[name] for name in expected[0]} for row in installed(table)] == expected


def test_the_table_is_of_all_cards_and_of_the_pinned_and_of_the_oldest_triton(table):
    pinned = re.search(r"^triton==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    oldest = re.search(r"^OLDEST_TRITON := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert {row["triton"] for row in table} == {pinned, oldest}
    assert {row["architecture"] for row in table} == set(SHARED_MEMORY) == set(PROCESSORS)
    # the oldest compiles the linear branch, which every call has
    linear = [row for row in table if row["triton"] == oldest]
    assert len({row["kernel"] for row in linear}) == LINEAR_KERNELS
    assert {row["key"] for row in linear} <= {row["key"] for row in table if row["triton"] == pinned}


@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture, table):
    reports = [row for row in table if row["architecture"] == architecture]
    assert len({row["kernel"] for row in reports}) == KERNELS
    for report in reports:
        kernel, problem = report["kernel"], report["problem"]
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        assert report["stack_bytes"] <= ALLOWED_STACK.get((kernel, problem), ALLOWED_STACK.get(problem, 0)), report
        if kernel.startswith("prepare") and architecture.startswith("sm_"):
            # of order, valid, tokens of rows and, with 72 channels, key mask; all else is read 16 bytes at a time
            assert report["narrow_loads"] <= (12 if problem == "72 channels" else 9), report
        # key blocks of 16 and 32 are too few rows for it in the gradient of keys, which takes one block at a time
        has_rows = not (kernel == "listed_dkv_kernel" and problem.startswith("keys in"))
        if (
            architecture == "sm_90"
            and kernel.startswith(("listed", "pooled"))
            and has_rows
            and "float32" not in problem
        ):
            assert report["wgmma"] >= 12, report


def test_another_resolution_compiles_nothing(said):
    for name, counts in said[1]:
        # states are added up of keys, and as gradients of queries; both are prepared, and both read states
        several = dict.fromkeys(("states_kernel", "prepare_kernel", "read_kernel"), 2)
        assert all(count <= several.get(kernel, 1) for kernel, count in counts.items()), (name, counts)
