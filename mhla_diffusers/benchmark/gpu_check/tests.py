"""The step ``tests``: the kernels' tests on the card, in parallel, where there is a checkout that has them."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from .findings import Measured, Notebook, NotHereError

_ROOT = Path(__file__).parents[3]
_FOLDER = Path("tests/attention/triton")
_FILES = (
    "test_kernels.py",
    "test_exact.py",
    "test_outside.py",
    "test_backend.py",
    "test_mixing.py",
    "test_causal.py",
    "test_linear.py",
    "test_sparse.py",
)
_SECONDS = 120
"""Of one file."""
_MOST_PROCESSES = 8
"""Each has a CUDA context of its own."""
_NEEDED = ("pytest", "hypothesis")


def run_tests(notebook: Notebook, device: torch.device) -> None:
    """One attempt for each file of tests."""
    for file in _FILES:
        notebook.attempt(file, partial(_run_file, _FOLDER / file, device))


def _run_file(file: Path, device: torch.device) -> Measured:
    if device.type == "cpu":
        raise NotHereError("on a CPU, make test runs them through the interpreter")
    if not (_ROOT / file).is_file():
        raise NotHereError(f"there is no {file}: the package does not run from a checkout")
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise NotHereError(f"{', '.join(missing)} is not installed")
    # the options that pyproject.toml adds need a plugin that may not be there
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(file),
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    if find_spec("xdist") is not None:
        command += ["-n", str(min(_MOST_PROCESSES, os.cpu_count() or 1))]
    try:
        ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")
        return Measured({"printed": printed[-2000:]}, wrong=f"not at its end after {_SECONDS} s")
    sys.stdout.write(ended.stdout)
    sys.stderr.write(ended.stderr)
    last = (ended.stdout.strip().splitlines() or ["nothing printed"])[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)}
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    wrong = "" if ended.returncode == 0 else f"{last.strip('= ')}; {'; '.join(failed[:3])}"
    return Measured({**counts, "failures": failed}, last.strip("= "), wrong)
