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


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 72, 128])
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture, head_dim, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "tests.attention.triton.compile_ahead", architecture, str(head_dim)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    ).stdout
    reports = [json.loads(line) for line in output.splitlines()]
    assert len(reports) == 9
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        assert report["stack_bytes"] == 0, report
