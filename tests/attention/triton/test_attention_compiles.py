"""The listed and the pooled attention compile for cards that are not there, fit into their memory, spill nothing."""

import json

import pytest

from .compiled import SHARED_MEMORY, run_without_interpreter

ALLOWED_STACK = {"listed_forward of 128": 112, "pooled_dkv": 16}
"""On an H100, whose tiles are those that were measured fastest, with about as many bytes in a thread's stack."""


def run(argument):
    """Lines of JSON that compile_attention prints, in a process without the interpreter."""
    text = run_without_interpreter(["-m", "tests.attention.triton.compile_attention", argument])
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
