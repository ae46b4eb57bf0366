"""The process of one step: ``python -m mhla_diffusers.benchmark.gpu_check STEP DEVICE FILE``."""

import sys
from pathlib import Path

import torch

from .checks import FUNCTIONS
from .findings import Notebook

if __name__ == "__main__":
    step, device, file = sys.argv[1:]
    FUNCTIONS[step](Notebook(Path(file)), torch.device(device))
