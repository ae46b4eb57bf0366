"""What a step finds, written down after every attempt: a process that ends early leaves what it found until then."""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...files import read_json, write_json

Status = Literal["ok", "failed", "skipped"]

_LONGEST_TEXT = 500


@dataclass(frozen=True)
class Finding:
    """What became of one attempt."""

    name: str
    status: Status
    text: str = ""
    """Why it failed or was skipped, or the most telling number."""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured."""


@dataclass(frozen=True)
class Measured:
    """What an attempt gives back."""

    text: str
    """The most telling number."""
    numbers: dict[str, Any] = field(default_factory=dict)
    wrong: str = ""
    """What is not as it should be; such an attempt failed, and its numbers are kept."""


class NotHereError(Exception):
    """What an attempt needs is not on this machine; its text says what."""


class Notebook:
    """The file of a step's findings, and the attempts that fill it.

    A process that is started anew passes over the attempts that stand in the file.

    Args:
        file: a JSON list of findings; read if it is there.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._found = {finding.name: finding for finding in read_findings(file)}

    def attempt(self, name: str, measure: Callable[[], Measured]) -> None:
        """Measure something and write down what became of it; what it raises is a finding too.

        Args:
            name: of the finding.
            measure: what to do; raises :class:`NotHereError` for what this machine has not.

        Raises:
            SystemExit: the CUDA context is lost, in which every further call would fail.
        """
        if name in self._found:
            return
        # stands for the process that ends in the middle of it, and is replaced otherwise
        self._write(Finding(name, "failed", "the process ended, or was ended, in the middle of it"))
        start, lost = time.perf_counter(), False
        try:
            found = measure()
            status: Status = "failed" if found.wrong else "ok"
            finding = Finding(name, status, found.wrong or found.text, numbers=found.numbers)
        except NotHereError as error:
            finding = Finding(name, "skipped", str(error))
        except Exception as error:  # noqa: BLE001 - written down with its reason; the other attempts go on
            traceback.print_exc()
            finding = Finding(name, "failed", f"{type(error).__name__}: {error}"[:_LONGEST_TEXT])
            lost = any(words in str(error) for words in ("CUDA error", "Triton Error [CUDA]"))
        self._write(replace(finding, seconds=time.perf_counter() - start))
        if lost:
            raise SystemExit(1)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _write(self, finding: Finding) -> None:
        self._found[finding.name] = finding
        write_json([asdict(one) for one in self._found.values()], self.file)


def read_findings(file: Path) -> list[Finding]:
    """The findings of a process; none where it has written nothing yet.

    Raises:
        ValueError: the file is damaged.
    """
    return [Finding(**found) for found in read_json(file)] if file.is_file() else []
