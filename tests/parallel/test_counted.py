"""What processes send: the bytes of real collectives, the table of the page, and the command that measures both."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusers.benchmark.cases import Shape
from mhla_diffusers.benchmark.measure import Results, read_rows
from mhla_diffusers.benchmark.operator import MHLA, SOFTMAX
from mhla_diffusers.benchmark.processes import benchmark_processes, make_config, make_run, sent_bytes

from ..benchmark.commands import bench
from ..refusals import refused
from .diffusers_on_cpu import diffusers_on_cpu

TINY = Shape("tiny", (4, 6, 6), (2, 2, 3), 2, 16, block_size=16, rope=True)
CPU = torch.device("cpu")
PAGE = (Path(__file__).parents[2] / "docs/scale.md").read_text(encoding="utf-8")
RING, ULYSSES = "ring", "Ulysses"


def formula(row: str, processes: int) -> float:
    """Numbers that the page says a process sends, for the tiny attention."""
    (text,) = re.findall(rf"^\| {row} \|[^|]*\| (.*?) \|", PAGE, re.MULTILINE)
    python = text.replace("−", "-").replace("²", "**2").replace("·", "*")
    python = re.sub(r"(?<=[\w)])\s+(?=[\w(])", " * ", python)
    letters = {"B": 1, "N": TINY.tokens, "H": TINY.heads, "D": TINY.head_dim, "M": math.prod(TINY.blocks)}
    return eval(python, {"__builtins__": {}}, {**letters, "P": processes})


def expected_bytes(attention: str, form: str, processes: int) -> float:
    """Bytes of a forward in bfloat16, by the page; states and tables of RoPE are float32."""
    if form == RING:
        return formula("softmax, ring", processes) * 2 if attention == SOFTMAX else formula("MHLA, ring", processes) * 4
    tables = 4 * 2 * (processes - 1) / processes * TINY.tokens * TINY.head_dim
    return formula("softmax and MHLA, Ulysses", processes) * 2 + (tables if attention == MHLA else 0)


@pytest.mark.parametrize("processes", [2, 8])
@pytest.mark.parametrize("form", [RING, ULYSSES])
@pytest.mark.parametrize("attention", [SOFTMAX, MHLA])
def test_bytes_are_those_of_the_page(attention, form, processes):
    degrees = (processes, 1) if form == RING else (1, processes)
    assert sent_bytes(attention, TINY, *degrees, itemsize=2) == expected_bytes(attention, form, processes)


class Sent(TorchDispatchMode):
    """Bytes that one of P processes sends in the collectives of a context."""

    bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "_c10d_functional_autograd"):
            name, size = func._schema.name.split("::")[1], args[0].numel() * args[0].itemsize
            if name.startswith("all_reduce"):
                processes = dist.distributed_c10d._resolve_process_group(args[2]).size()
                self.bytes += 2 * (processes - 1) / processes * size
            elif name.startswith("all_gather"):
                self.bytes += (args[1] - 1) * size
            elif name.startswith("all_to_all"):
                rows, group = args[2], dist.distributed_c10d._resolve_process_group(args[3])
                kept = rows[group.rank()] / sum(rows) if rows else 1 / group.size()
                self.bytes += (1 - kept) * size
            else:
                assert name.startswith("wait_tensor") or "wrap" in name, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("processes", "ring"), [(2, 2), (2, 1), (4, 4), (4, 2)])
def test_bytes_are_those_of_the_collectives(processes, ring, request):
    everyone = request.getfixturevalue({2: "two", 4: "four"}[processes])
    for attention in (SOFTMAX, MHLA):
        expected = [sent_bytes(attention, TINY, ring, processes // ring, 2, backward=backward) for backward in (0, 1)]
        for sent in everyone.run(_send, attention, (ring, processes // ring)):
            assert sent == pytest.approx(expected), attention


def _send(attention: str, degrees: tuple[int, int]) -> list[float]:
    """Bytes of a forward, and of forward and backward."""
    found, config = [], make_config(*degrees)
    for backward in (False, True):
        run = make_run(attention, TINY, config, CPU, torch.bfloat16, backward=backward)
        with diffusers_on_cpu(), Sent() as sent:
            run()
        found.append(sent.bytes)
    return found


def test_bytes_and_times_of_the_command(two, tmp_path):
    two.run(_benchmark, tmp_path)
    (file,) = tmp_path.glob("*/parallel.csv")
    rows = {(row.variant, row.stage): row for row in read_rows(file)}
    for form in (RING, ULYSSES):
        for attention in (SOFTMAX, MHLA):
            for stage in ("forward", "forward+backward"):
                row = rows[f"{attention}, {form} 2", stage]
                assert row.median > 0 and row.repetitions == 2 and row.baseline == (attention == SOFTMAX)
            assert rows[f"{attention}, {form} 2", "forward"].sent_bytes == expected_bytes(attention, form, 2)
    assert {row.case for row in rows.values()} == {"tiny, 2 processes"}


def _benchmark(folder: Path) -> None:
    first = torch.distributed.get_rank() == 0
    results = Results("parallel", CPU, torch.bfloat16, folder) if first else None
    with diffusers_on_cpu():
        benchmark_processes(TINY, CPU, torch.bfloat16, [2, 1], 2, results)
    with refused("ring=3"):
        benchmark_processes(TINY, CPU, torch.bfloat16, [3], 1, None)


def test_without_torchrun_the_command_says_how(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with refused("torchrun --no-python"):
        bench("parallel")
