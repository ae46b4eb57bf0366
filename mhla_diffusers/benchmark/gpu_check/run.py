"""The order of the steps, their processes, and what is written after each."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ...files import check_writable, write_text
from ..conditions import gather_conditions
from ..recorder import console
from .findings import Finding, Status, read_findings
from .report import Report, read_reports, summary, told, write_report
from .steps import MOST_SECONDS, STEPS, Step

_LEAST_SECONDS = 5
"""What is left of a run must be this much for a step to begin."""
_TAIL = 4000
"""Characters of what a step printed that its result keeps."""


def check_gpu(steps: Sequence[Step], device: torch.device, output: Path) -> bool:
    """Run steps one after the other, each in processes of its own; a step whose result is there and ok is kept.

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
    names = [step.name for step in STEPS]
    reports = read_reports(output, names, name)
    end = time.monotonic() + MOST_SECONDS
    # so that a scheduler's signal ends the processes of the step too
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for step in steps:
            kept = step.name in reports and reports[step.name].status == "ok"
            if not kept:
                report = _run_step(step, device, name, output, end - time.monotonic())
                write_report(report, output)
                reports[step.name] = report
            in_order = {name: reports[name] for name in names if name in reports}
            write_text(summary(in_order, name), output / "summary.md")
            _print_line(reports[step.name], kept)
    finally:
        signal.signal(signal.SIGTERM, before)
    return all(reports[step.name].status != "failed" for step in steps)


def _print_line(report: Report, kept: bool) -> None:
    status = f"{report.status}, kept" if kept else f"{report.status}, {report.seconds:.0f} s"
    console().print(f"{report.step}: {status}; {told(report)}", highlight=False, markup=False)


def _run_step(step: Step, device: torch.device, name: str, output: Path, left: float) -> Report:
    """Run one step in what is left of the run, in seconds."""
    if left < _LEAST_SECONDS:
        reason = f"the {MOST_SECONDS / 60:.0f} minutes of the run are over; run it again with --steps {step.name}"
        return Report(step.name, name, "skipped", reason, 0.0, (), "")
    log, start = output / f"{step.name}.log", time.monotonic()
    log.unlink(missing_ok=True)
    shares = min(step.processes, os.cpu_count() or 1) if device.type != "cpu" else 1
    children = [_Child(step.name, device, output, log, share, shares) for share in range(shares)]
    seconds = min(step.seconds, left)
    try:
        while time.monotonic() < start + seconds:
            running = [child.is_running() for child in children]  # each is asked: that starts a crashed one anew
            if not any(running):
                break
            time.sleep(0.1)
    finally:
        stopped = [child.stop() for child in children]
    findings = tuple(finding for child in children for finding in child.take_findings())
    reasons = [f"ended after {seconds:.0f} s, its limit"] if any(stopped) else []
    codes = [child.code for child, was_stopped in zip(children, stopped, strict=True) if not was_stopped]
    reasons += [f"a process ended with code {code}" for code in codes if code]
    printed = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    status = _status(findings, whole=not reasons)
    return Report(step.name, name, status, "; ".join(reasons), time.monotonic() - start, findings, printed)


def _status(findings: Sequence[Finding], whole: bool) -> Status:
    """Of a step: ``whole`` where all of its processes came to their end by themselves."""
    if not whole or any(finding.status == "failed" for finding in findings):
        return "failed"
    return "skipped" if all(finding.status == "skipped" for finding in findings) else "ok"


class _Child:
    """One process of a step. After a crash it is started anew, as long as each start found something more.

    An illegal memory access leaves a process in which every further call fails: a new one makes the attempts that are
    left.
    """

    def __init__(self, step: str, device: torch.device, output: Path, log: Path, share: int, shares: int) -> None:
        self._findings = output / f".{step}-{share}.json"
        self._findings.unlink(missing_ok=True)
        module = __package__ or ""
        # -P: the package that this process has, whatever lies in the present folder
        self._command = [
            sys.executable,
            "-P",
            "-m",
            module,
            step,
            str(device),
            str(self._findings),
            str(share),
            str(shares),
        ]
        self._environment = _environment(device)
        self._log = log
        self._found = 0
        self._process = self._start()

    @property
    def code(self) -> int | None:
        """What the process ended with; None while it runs."""
        return self._process.returncode

    def is_running(self) -> bool:
        """Whether the process runs; one that crashed is started anew here."""
        if self._process.poll() is None:
            return True
        found = len(read_findings(self._findings))
        if self._process.returncode == 0 or found == self._found:
            return False
        self._found = found
        self._process = self._start()
        return True

    def stop(self) -> bool:
        """End the process, with those that it started, if it still runs; whether it did."""
        runs = self._process.poll() is None
        with suppress(ProcessLookupError):  # of what it started, something may outlive it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return runs

    def take_findings(self) -> list[Finding]:
        """What was found; its file goes into the result of the step."""
        found = read_findings(self._findings)
        self._findings.unlink(missing_ok=True)
        return found

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )


def _environment(device: torch.device) -> dict[str, str]:
    """Of a step's processes: kernels are made for the interpreter on a CPU, and for the card elsewhere."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    interpreted = {"TRITON_INTERPRET": "1"} if device.type == "cpu" else {}
    return inherited | interpreted | {"PYTHONUNBUFFERED": "1"}
