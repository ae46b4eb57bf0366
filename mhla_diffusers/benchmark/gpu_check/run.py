"""The order of the steps, their processes, and what is written after each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...files import check_writable, read_json, write_json, write_text
from ..conditions import gather_conditions
from ..recorder import console
from .findings import Finding, Status, read_findings

STEPS = {"device": 60, "correctness": 600, "limits": 180, "tests": 900, "integration": 300, "kernels": 180}
"""Name → seconds after which its process is ended, in the order of a run."""
_SHOWN = 3
"""Findings in the line of a step."""


@dataclass(frozen=True)
class Report:
    """The result of one step."""

    step: str
    device: str
    """Name of the card or processor."""
    status: Status
    reason: str
    """Why the step as a whole failed; empty where its findings say so."""
    seconds: float
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        """How many findings there are of each kind, and the first words of those that failed, else of the others."""
        counts = {status: sum(one.status == status for one in self.findings) for status in ("ok", "failed", "skipped")}
        words = [self.reason, ", ".join(f"{number} {status}" for status, number in counts.items() if number)]
        first = sorted(self.findings, key=lambda one: one.status != "failed")
        words += [f"{one.name}: {one.text}" for one in first if one.text][:_SHOWN]
        return "; ".join(_in_one_line(word) for word in words if word)


def choose_steps(names: Sequence[str] | None) -> list[str]:
    """Steps by name, in the order of ``STEPS``; all for None.

    Args:
        names: each one name, or several with commas between them.

    Raises:
        ValueError: an unknown name.
    """
    wanted = [name.strip() for text in names or () for name in text.split(",")]
    for name in wanted:
        if name not in STEPS:
            raise ValueError(f"Unknown step {name!r}; allowed: {', '.join(STEPS)}. Leave --steps out to run all.")
    return [step for step in STEPS if step in wanted or not wanted]


def check_gpu(steps: Sequence[str], device: torch.device, output: Path) -> bool:
    """Run steps one after the other, each in a process of its own; a step whose result is there and ok is kept.

    Args:
        steps: which.
        device: where; on a CPU sizes are small, and the kernels run through Triton's interpreter.
        output: gets ``{step}.json`` and ``{step}.log`` per step, and ``summary.md``.

    Returns:
        Whether none of them failed.

    Raises:
        OSError: the folder cannot be written, or holds results of another device.
        ValueError: a file in it is no result.
    """
    check_writable(output)
    name = gather_conditions(device).device
    reports = {step: found for step in STEPS if (found := _read_report(output / f"{step}.json", name)) is not None}
    # so that a scheduler's signal ends the process of the step too
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for step in steps:
            kept = step in reports and reports[step].status == "ok"
            if not kept:
                reports[step] = run_step(step, device, name, output, STEPS[step])
                write_json(asdict(reports[step]), output / f"{step}.json")
            in_order = [reports[name] for name in STEPS if name in reports]
            write_text(_summary(in_order, name), output / "summary.md")
            status = f"{reports[step].status}, " + ("kept" if kept else f"{reports[step].seconds:.0f} s")
            console().print(f"{step}: {status}; {reports[step]}", highlight=False, markup=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    return all(reports[step].status != "failed" for step in steps)


def run_step(step: str, device: torch.device, name: str, output: Path, seconds: float) -> Report:
    """Run one step; after a crash its process is started anew, as long as each start finds something more.

    An illegal memory access leaves a process in which every further call fails: a new one makes the attempts that are
    left.
    """
    findings, start = output / f".{step}.json", time.monotonic()
    findings.unlink(missing_ok=True)
    # -P: the package that this process has, whatever lies in the present folder
    command = [sys.executable, "-P", "-m", __package__ or "", step, str(device), str(findings)]
    reason, known = "", -1
    with (output / f"{step}.log").open("wb") as log:
        while len(read_findings(findings)) > known:
            known = len(read_findings(findings))
            left = start + seconds - time.monotonic()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=_environment(device), start_new_session=True
            )
            try:
                code = process.wait(timeout=max(0.0, left))
                reason = f"its process ended with code {code}" if code else ""
            except subprocess.TimeoutExpired:
                code, reason = None, f"ended after {seconds:.0f} s, its limit"
            finally:
                with suppress(ProcessLookupError):  # and what it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code in (0, None):
                break
    found = tuple(read_findings(findings))
    findings.unlink(missing_ok=True)
    statuses = {one.status for one in found}
    status: Status = "failed" if reason or "failed" in statuses else "skipped" if statuses == {"skipped"} else "ok"
    return Report(step, name, status, reason, time.monotonic() - start, found)


def _environment(device: torch.device) -> dict[str, str]:
    """Of a step's process: kernels are made for the interpreter on a CPU, and for the card elsewhere."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    interpreted = {"TRITON_INTERPRET": "1"} if device.type == "cpu" else {}
    return inherited | interpreted | {"PYTHONUNBUFFERED": "1"}


def _read_report(file: Path, device: str) -> Report | None:
    if not file.is_file():
        return None
    try:
        found = read_json(file)
        report = Report(**found | {"findings": tuple(Finding(**one) for one in found["findings"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{file} is no result of mhla bench gpu-check; choose another --output.") from error
    if report.device != device:
        raise OSError(f"{file} is of {report.device!r}; this is {device!r}. Choose another --output.")
    return report


def _summary(reports: Iterable[Report], device: str) -> str:
    """Markdown: a line per step, then a line per finding."""
    reports = list(reports)
    lines = [f"# {device}", "", "| step | status | seconds | most telling |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.step} | {one.status} | {one.seconds:.0f} | {one} |" for one in reports]
    for report in reports:
        lines += ["", f"## {report.step}", ""]
        lines += [report.reason, ""] if report.reason else []
        lines += [
            _in_one_line(f"- {one.name}: {one.status}, {one.seconds:.1f} s; {one.text}") for one in report.findings
        ]
    return "\n".join(lines) + "\n"


def _in_one_line(text: str) -> str:
    """For a cell of a table."""
    return " ".join(text.split()).replace("|", "/")
