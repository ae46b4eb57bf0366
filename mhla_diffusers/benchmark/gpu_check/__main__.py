"""One process of a step: ``python -m mhla_diffusers.benchmark.gpu_check STEP DEVICE FILE SHARE SHARES``."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from .comparisons import compare_models, compare_rivals
from .correctness import check_correctness
from .device import describe_device
from .findings import Notebook
from .integration import check_integration
from .kernels import measure_kernels
from .limits import check_limits
from .tests import run_tests

FUNCTIONS: dict[str, Callable[[Notebook, torch.device], None]] = {
    "device": describe_device,
    "correctness": check_correctness,
    "limits": check_limits,
    "tests": run_tests,
    "integration": check_integration,
    "kernels": measure_kernels,
    "rivals": compare_rivals,
    "models": compare_models,
}
"""Name of a step → what it does."""


def main() -> None:
    """Make the attempts of one step that fall to this process."""
    step, device, file, share, shares = sys.argv[1:]
    sys.argv[1:] = ["bench", "gpu-check", "--steps", step]  # what results name as their command
    FUNCTIONS[step](Notebook(Path(file), int(share), int(shares)), torch.device(device))


if __name__ == "__main__":
    main()
