"""The step ``device``: versions, the card and its clocks, and what it reaches in a copy and in a matrix product."""

import shutil
import subprocess
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ...attention.triton.tuning import architecture_of
from ...devices import FLOAT_TYPES
from ..conditions import gather_conditions, installed_version, measure_rates
from .findings import Measured, Notebook, NotHereError

_PACKAGES = (
    "numpy",
    "peft",
    "accelerate",
    "flash-attn",
    "flash-linear-attention",
    "xformers",
    "pytest",
    "pytest-xdist",
)
"""Beside those that every result names."""
_QUERIES = (
    "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu,"
    "memory.total,memory.used,clocks_throttle_reasons.active,ecc.mode.current,compute_mode,mig.mode.current"
)
"""Of nvidia-smi."""


def describe_device(notebook: Notebook, device: torch.device) -> None:
    """Everything that is to be known before a number of the other steps is read."""
    for name in FLOAT_TYPES if device.type == "cuda" else ("float32",):
        notebook.attempt(f"rates in {name}", partial(_rates, device, FLOAT_TYPES[name]))
    notebook.attempt("clocks", _clocks)
    notebook.attempt("card", partial(_card, device))
    notebook.attempt("versions", partial(_versions, device))


def _versions(device: torch.device) -> Measured:
    conditions = asdict(gather_conditions(device))
    conditions["versions"] |= {name: found for name in _PACKAGES if (found := installed_version(name)) is not None}
    told = ", ".join(f"{name} {conditions['versions'].get(name)}" for name in ("torch", "triton", "diffusers"))
    return Measured(conditions, f"Python {conditions['python']}, {told}")


def _card(device: torch.device) -> Measured:
    """Its limits, and how torch multiplies float32 matrices on it."""
    numbers: dict[str, Any] = {
        "architecture": architecture_of(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_in_convolutions": torch.backends.cudnn.allow_tf32,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        for name in ("multi_processor_count", "total_memory", "shared_memory_per_block_optin", "L2_cache_size"):
            numbers[name] = getattr(properties, name, None)  # some are not there in every version of torch
        numbers["devices"] = torch.cuda.device_count()
        numbers["free_memory"] = torch.cuda.mem_get_info(device)[0]
    return Measured(numbers, f"{numbers['architecture']}, float32 matmul {numbers['float32_matmul_precision']}")


def _clocks() -> Measured:
    if shutil.which("nvidia-smi") is None:
        raise NotHereError("nvidia-smi is not installed")
    numbers = {}
    for query in _QUERIES.split(","):  # one by one: a driver that does not know one of them refuses all
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            numbers[query] = ended.stdout.strip().splitlines()
    return Measured(numbers, f"SM clock {numbers.get('clocks.sm')} of {numbers.get('clocks.max.sm')}")


def _rates(device: torch.device, dtype: torch.dtype) -> Measured:
    rates = measure_rates(device, dtype)
    return Measured(asdict(rates), f"{rates.matmul / 1e12:.3g} TFLOP/s, {rates.copy / 1e9:.4g} GB/s copied")
