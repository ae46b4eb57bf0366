"""Listed and pooled attention compile for cards that are not there, fit their shared memory and spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .compiled import SHARED_MEMORY

ALLOWED_STACK = {"listed_forward of 128": 112}
"""128 rows of queries on four warps were measured fastest on an H100, 40 to 112 bytes in a thread's stack or not."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.triton.compile_attention", architecture]
    root = Path(__file__).parents[3]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=root).stdout
    print(text)
    reports = [json.loads(line) for line in text.splitlines()]
    assert len(reports) == (28 if architecture == "sm_90" else 21)
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        allowed = ALLOWED_STACK.get(report["kernel"], 0) if architecture == "sm_90" else 0
        assert report["stack_bytes"] <= allowed, report
        if architecture == "sm_90":
            assert report["loop"]["wgmma.mma_async"] >= 12, report
