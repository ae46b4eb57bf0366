"""Every kernel compiles for cards that are not there, fits into their shared memory and spills no register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def compile_ahead(arguments, cache):
    """What each kernel needs, one dictionary per kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.attention.triton.compile_ahead", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def check(reports):
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[report["architecture"]], report
        assert report["stack_bytes"] == 0, report


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture, tmp_path):
    targets = [f"{architecture}:{head_dim}" for head_dim in (32, 72, 128)]
    reports = compile_ahead(targets, tmp_path)
    assert len(reports) == 5 * len(targets)
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_tile", [75, 120])
def test_kernels_of_exact_tiles_fit(tokens_per_tile, tmp_path):
    """Wan's tiles, D = 128, on every architecture."""
    targets = [f"{architecture}:128" for architecture in SHARED_MEMORY]
    reports = compile_ahead([*targets, "--exact", str(tokens_per_tile)], tmp_path)
    assert len(reports) == 5 * len(targets)
    check(reports)


@pytest.mark.slow
def test_kernels_of_small_exact_tiles_fit(tmp_path):
    """DiT's tiles of 16 tokens, D = 72, and another head dim."""
    targets = ["sm_80:72", "sm_90:72", "sm_100:32", "sm_120:72", "gfx942:32"]
    reports = compile_ahead([*targets, "--exact", "16"], tmp_path)
    assert len(reports) == 5 * len(targets)
    check(reports)
