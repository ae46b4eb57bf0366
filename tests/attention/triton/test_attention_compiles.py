"""The listed and the pooled attention compile for cards that are not there, fit into their memory, spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .compiled import SHARED_MEMORY

ALLOWED_STACK = {"listed_forward of 128": 112, "pooled_dkv": 16}
"""On an H100, whose tiles are those that were measured fastest, with about as many bytes in a thread's stack."""


def run(argument):
    """Lines of JSON that compile_attention prints, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.triton.compile_attention", argument]
    root = Path(__file__).parents[3]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=root).stdout
    print(text)
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture):
    reports = run(architecture)
    assert len(reports) == (28 if architecture == "sm_90" else 21)
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[architecture], report
        allowed = ALLOWED_STACK.get(report["kernel"], 0) if architecture == "sm_90" else 0
        assert report["stack_bytes"] <= allowed, report
        if architecture == "sm_90" and report["shape"] != "float32":
            assert report["loop"]["wgmma.mma_async"] >= 12, report


def test_another_size_compiles_nothing():
    assert set(run("variants")[0].values()) == {1}
