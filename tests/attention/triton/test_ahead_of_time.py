"""Every kernel compiles for cards that are not there, fits into their shared memory and spills no register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_diffusers.attention.triton.tuning import PROCESSORS

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
SHAPES = ("wan2.1-1.3b-480p", "dit-xl-2-512px", "sana-1.6b-1024px")
"""Head dims 128, 72 and 32; the first two with exact tiles of 75 and 64 tokens."""
OLDEST_TRITON = Path(sys.prefix) / "triton-oldest"
"""The oldest version that is allowed, beside the installed one; the Makefile puts it there."""


def run_without_interpreter(arguments, folder, triton=None):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    if triton is not None:
        environment["PYTHONPATH"] = str(triton)
    root = Path(__file__).parents[3]
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=root).stdout


def reports_of(architecture, names, folder, triton=None, everything=True):
    """What each kernel needs, with RoPE, key mask, norm and gate or as models use it, one dictionary per kernel."""
    file = folder / "kernels.jsonl"
    shape = [argument for name in names for argument in ("--shape", name)]
    arguments = ["bench", "kernels", *shape, "--architecture", architecture, "--output", str(file)]
    arguments += ["--everything"] if everything else []
    run_without_interpreter(["-c", "from mhla_diffusers.cli import run; run()", *arguments], folder, triton)
    return [json.loads(line) for line in file.read_text().splitlines()]


OF_PADDED_CHANNELS = 16
"""Bytes of a thread's stack: the own block's kernels find no register for four numbers at D = 72 on some cards."""


def check(reports, stack_bytes=0):
    for report in reports:
        assert report["shared_bytes"] <= SHARED_MEMORY[report["architecture"]], report
        padded = report["kernel"].startswith("own_block") and report["shape"].startswith("dit")
        assert report["stack_bytes"] <= max(stack_bytes, OF_PADDED_CHANNELS if padded else 0), report


def test_the_table_of_cards_is_whole():
    assert set(SHARED_MEMORY) == set(PROCESSORS)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_kernels_fit(architecture, tmp_path):
    reports = reports_of(architecture, SHAPES, tmp_path)
    assert len(reports) == 48
    check(reports)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST_TRITON.is_dir(), reason="make puts the oldest Triton beside the installed one")
def test_kernels_fit_with_the_oldest_triton(tmp_path):
    """It finds no register for one number of some kernels at D = 128, which the newer version does."""
    reports = reports_of("sm_90", SHAPES, tmp_path, OLDEST_TRITON)
    assert len(reports) == 48
    check(reports, stack_bytes=8)
    check(reports_of("sm_90", SHAPES[:1], tmp_path, OLDEST_TRITON, everything=False), stack_bytes=8)


ONE_CHANNEL = """
import torch
from mhla_diffusers.benchmark.kernels import exact_call_of, exact_launches_of, report_kernel
from mhla_diffusers.benchmark.shapes import Shape

shape = Shape("one channel", (9,), (2,), 2, 1, tiles=(3,))
for launch in exact_launches_of(exact_call_of(shape, shape.tiles, torch.float32, 1, everything=False), None, "sm_90"):
    report_kernel(launch, "sm_90")
"""


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST_TRITON.is_dir(), reason="make puts the oldest Triton beside the installed one")
def test_exact_tiles_of_one_channel_compile_with_the_oldest_triton(tmp_path):
    """A stride is 1 then, which that version does not find in a tuple of a tuple."""
    run_without_interpreter(["-c", ONE_CHANNEL], tmp_path, OLDEST_TRITON)


def test_another_resolution_compiles_nothing(tmp_path):
    """Only where tiles are cut differently is there another variant."""
    counts = json.loads(run_without_interpreter(["-m", "tests.attention.triton.count_variants"], tmp_path))
    assert counts["MHLA"] == {"variants": 7, "tilings": 7}
    assert counts["shares"]["variants"] == counts["shares"]["tilings"] == 7
    assert counts["exact"]["variants"] == counts["exact"]["tilings"]
    assert counts["own block"]["variants"] == counts["own block"]["tilings"] == 3
