"""``mhla bench kernels``: the kernels of some shapes on some architectures, as a table and a file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.table import Table

from ..attention.triton.arguments import angles_of
from ..attention.triton.tuning import PROCESSORS
from ..files import write_text
from .kernels import (
    KernelReport,
    call_of,
    exact_call_of,
    exact_launches_of,
    launches_of,
    own_block_launches_of,
    report_kernel,
    sequence_call_of,
)
from .recorder import console
from .shapes import Shape

_BLOCK_LENGTH = 128
"""Tokens in a block of the sequence that the kernels of the own block are shown at."""


def write_kernels(
    shapes: Sequence[Shape],
    architectures: Sequence[str],
    dtype: torch.dtype,
    batch: int,
    *,
    everything: bool,
    output: Path,
) -> None:
    """Compile, show and save; a table for every shape and architecture.

    Args:
        shapes: of attentions; those with tiles have kernels of exact tiles too, and of softmax within the own block.
        architectures: keys of :data:`PROCESSORS`.
        dtype: of query, key and value.
        batch: samples.
        everything: see :func:`call_of`.
        output: JSON, a line per kernel.

    Raises:
        ValueError: an architecture is unknown, or Triton runs as an interpreter.
    """
    for architecture in architectures:
        if architecture not in PROCESSORS:
            raise ValueError(f"Unknown architecture {architecture!r}; allowed: {', '.join(PROCESSORS)}.")
    lines: list[str] = []
    for shape in shapes:
        for architecture in architectures:
            found = list(_reports(shape, architecture, dtype, batch, everything=everything))
            console().print(_table(f"{shape.name}, batch {batch}, {architecture}: counted, not measured", found))
            case = {"shape": shape.name, "dtype": str(dtype).removeprefix("torch."), "batch": batch}
            lines += [json.dumps(case | asdict(report)) + "\n" for report in found]
            write_text("".join(lines), output)
    console().print(f"Wrote {output}", highlight=False)


def _reports(
    shape: Shape, architecture: str, dtype: torch.dtype, batch: int, *, everything: bool
) -> Iterator[KernelReport]:
    call = call_of(shape, dtype, batch, everything=everything)
    launches = launches_of(call, architecture)
    if shape.tiles is not None:
        of_tiles = exact_call_of(shape, shape.tiles, dtype, batch, everything=everything)
        launches += exact_launches_of(of_tiles, angles_of(call), architecture)
    for launch in launches:
        yield report_kernel(launch, architecture)
    for has_softmax in (False, True) if shape.tiles is not None else (False,):
        sequence = sequence_call_of(call, _BLOCK_LENGTH, has_softmax)
        for launch in own_block_launches_of(sequence, has_softmax, architecture):
            report = report_kernel(launch, architecture)
            yield replace(report, kernel=f"{report.kernel}, softmax") if has_softmax else report


def _table(title: str, reports: Sequence[KernelReport]) -> Table:
    table = Table("kernel", "tiles", title=title, title_justify="left")
    for name in ("registers", "stack, B", "shared, KiB", "programs", "waves", "MB", "GFLOP"):
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(
            report.kernel,
            ", ".join(f"{name} {value}" for name, value in report.tiles.items()),
            f"{report.registers}",
            f"{report.stack_bytes}",
            f"{report.shared_bytes / 1024:.0f}",
            f"{report.programs:,}",
            "" if report.waves is None else f"{report.waves:.1f}",
            f"{report.bytes / 1e6:.0f}",
            f"{report.flops / 1e9:.1f}",
        )
    return table
