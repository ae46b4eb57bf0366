"""What a run was measured on and with, and what the device itself can do, measured in the same run."""

import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .timing import Clock, summarise

_PACKAGES = ("torch", "diffusers", "transformers", "triton")
_REPETITIONS = 7


@dataclass(frozen=True)
class Conditions:
    """Everything that two runs must have in common for their times to be compared."""

    device: str
    """Name of the card, or of the processor with the number of threads used."""
    device_type: str
    """cpu, cuda, …"""
    driver: str | None
    """Version of the NVIDIA driver; None elsewhere."""
    toolkit: str | None
    """CUDA or ROCm version that torch was built with."""
    python: str
    versions: dict[str, str]
    """Package → version; absent packages are left out."""
    commit: str | None
    """Of the checkout that the package runs from, "+changes" if files differ; None for an installed package."""
    threads: int | None
    """That torch uses on the CPU; None where nobody noted it."""
    date: str
    """UTC."""
    command: str

    @property
    def folder_name(self) -> str:
        """The device as the name of a folder, for example ``nvidia-h100-80gb-hbm3``."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


def gather_conditions(device: torch.device) -> Conditions:
    """Look the conditions up.

    Args:
        device: where the run measures.
    """
    from .. import __version__

    cuda = device.type == "cuda"
    return Conditions(
        device=torch.cuda.get_device_name(device) if cuda else _other_device(device),
        device_type=device.type,
        driver=_nvidia_driver() if cuda and torch.version.hip is None else None,
        toolkit=(torch.version.cuda or torch.version.hip) if cuda else None,
        python=platform.python_version(),
        versions={
            "mhla_diffusers": __version__,
            **{name: found for name in _PACKAGES if (found := installed_version(name)) is not None},
        },
        commit=_commit(Path(__file__)),
        threads=torch.get_num_threads(),
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        command=shlex.join(["mhla", *sys.argv[1:]]),
    )


def _other_device(device: torch.device) -> str:
    if device.type != "cpu":
        return f"{platform.machine()} {device.type}"
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    """Name of the processor, which Linux tells in a file and other systems through ``platform``."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.is_file() else []
    return re.sub(r"\((R|TM)\)", "", names[0]) if names else platform.processor() or f"{platform.machine()} CPU"


def installed_version(package: str) -> str | None:
    """Of a package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def _commit(file: Path) -> str | None:
    """The commit of a file that git tracks."""
    if shutil.which("git") is None:
        return None
    git = ("git", "-C", str(file.parent))
    if not _output(*git, "ls-files", file.name):
        return None
    commit = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _output(*command: str) -> str | None:
    """What a command prints; None if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None


@dataclass(frozen=True)
class Rates:
    """Measured limits of a device: the yardstick of every other figure."""

    matmul: float
    """FLOP/s of a large matrix product; a multiplication and an addition count two."""
    matmul_dtype: str
    copy: float
    """Bytes/s of a large copy; reading and writing both count."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time a matrix product and a copy that are too large for any cache.

    Args:
        device: which device.
        dtype: of the matrices.
    """
    side, copied = (8192, 2**30) if device.type == "cuda" else (1024, 2**27)
    clock = Clock(device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def copy() -> None:
        target.copy_(source)

    medians = []
    for run in (multiply, copy):
        run()
        medians.append(summarise([clock.seconds(run) for _ in range(_REPETITIONS)]).median)
    return Rates(2 * side**3 / medians[0], str(dtype).removeprefix("torch."), 2 * copied / medians[1])
