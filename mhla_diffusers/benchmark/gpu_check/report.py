"""The result of one step and its file; the summary of all of them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...files import read_json, write_json
from .findings import Finding, Status

_TOLD = 3
"""Findings in the line of a step."""


@dataclass(frozen=True)
class Report:
    """The result of one step."""

    step: str
    device: str
    """Name of the card or processor."""
    status: Status
    reason: str
    """Why the step as a whole failed or was skipped; empty where its findings say so."""
    seconds: float
    findings: tuple[Finding, ...]
    output: str
    """The last lines that its processes printed."""


def read_reports(folder: Path, names: Iterable[str], device: str) -> dict[str, Report]:
    """Step → its result, of the steps that have one.

    Args:
        folder: of the results.
        names: of steps.
        device: that the run is on.

    Raises:
        OSError: a result is of another device.
        ValueError: a file is no result.
    """
    reports = {}
    for name in names:
        file = folder / f"{name}.json"
        if not file.is_file():
            continue
        try:
            found = read_json(file)
            report = Report(**found | {"findings": tuple(Finding(**one) for one in found["findings"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file} is no result of mhla bench gpu-check; choose another --output.") from error
        if report.device != device:
            raise OSError(f"{file} is of {report.device!r}; this is {device!r}. Choose another --output.")
        reports[name] = report
    return reports


def write_report(report: Report, folder: Path) -> None:
    """Write ``{step}.json``.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(asdict(report), folder / f"{report.step}.json")


def summary(reports: Mapping[str, Report], device: str) -> str:
    """Markdown: a line per step, then a line per finding.

    Args:
        reports: step → result, in the order of the page.
        device: name of the card or processor.
    """
    lines = [f"# {device}", "", "| step | status | seconds | most telling |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.step} | {one.status} | {one.seconds:.0f} | {told(one)} |" for one in reports.values()]
    for report in reports.values():
        lines += ["", f"## {report.step}", ""]
        lines += [report.reason, ""] if report.reason else []
        lines += [_line(finding) for finding in report.findings]
    return "\n".join(lines) + "\n"


def told(report: Report) -> str:
    """How many findings there are of each kind, and the first words of those that failed, else of the others."""
    counts = {status: sum(one.status == status for one in report.findings) for status in ("ok", "failed", "skipped")}
    words = [report.reason] if report.reason else []
    words += [", ".join(f"{number} {status}" for status, number in counts.items() if number)]
    first = sorted(report.findings, key=lambda one: one.status != "failed")
    words += [f"{one.name}: {text}" for one in first if (text := one.reason or one.telling)][:_TOLD]
    return "; ".join(_in_one_line(word) for word in words if word)


def _line(finding: Finding) -> str:
    words = [word for word in (finding.telling, finding.reason) if word]
    return _in_one_line(
        f"- {finding.name}: {finding.status}, {finding.seconds:.1f} s" + "".join(f"; {w}" for w in words)
    )


def _in_one_line(text: str) -> str:
    """For a cell of a table."""
    return " ".join(text.split()).replace("|", "/")
