"""What processes send: the bytes of real collectives, the table of the page, and the command that measures both."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from mhla_diffusers.attention.parallel.place import Parallel
from mhla_diffusers.benchmark.measure import Budget, Results, read_rows
from mhla_diffusers.benchmark.parallel import (
    MHLA,
    SOFTMAX,
    Traffic,
    attend,
    benchmark_parallel,
    make_config,
    make_share,
)
from mhla_diffusers.benchmark.shapes import TINY
from mhla_diffusers.patching.parallel import parallel_of

from ..benchmark.commands import bench
from .diffusers_on_cpu import diffusers_on_cpu

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


@pytest.mark.parametrize(("processes", "form"), [(2, RING), (4, RING), (2, ULYSSES)])
def test_processes_send_what_the_page_says(processes, form, request):
    everyone = request.getfixturevalue({2: "two", 4: "four"}[processes])
    degrees = (processes, 1) if form == RING else (1, processes)
    for attention in (SOFTMAX, MHLA):
        forward, backward = expected_bytes(attention, form, processes), 2
        if attention == SOFTMAX and form == RING:
            # keys and values once more, and their gradients, in float32, once round the ring
            backward = 2 + 2 * processes / (processes - 1)
        for sent in everyone.run(_send, attention, degrees):
            assert sent[0] == forward
            tables = expected_bytes(attention, form, processes) - expected_bytes(SOFTMAX, form, processes)
            learnt = forward - tables if attention == MHLA and form == ULYSSES else forward
            assert sent[1] == pytest.approx(forward + (backward - 1) * learnt)


def _send(attention: str, degrees: tuple[int, int]) -> list[float]:
    """Bytes of a forward, and of forward and backward."""
    found, config = [], make_config(*degrees)
    for backward in (False, True):
        share = make_share(TINY, config, CPU, torch.bfloat16)
        for name in ("query", "key", "value", "mixing"):
            share[name].requires_grad_(backward)
        with diffusers_on_cpu(), Traffic() as traffic:
            output = attend(attention, share, config)
            if backward:
                output.sum().backward()
        found.append(traffic.bytes)
    return found


def test_the_ring_that_is_counted_is_softmax(two):
    """Diffusers' ring with PyTorch's kernel for CPUs, output and gradients, against one process; float32."""
    two.run(_compare)


def _compare() -> None:
    config = make_config(2, 1)
    torch.manual_seed(0)
    size = (3, 1, TINY.tokens, TINY.heads, TINY.head_dim)
    whole, direction = torch.randn(size).requires_grad_(), torch.randn(size[1:])
    place = parallel_of(config)
    assert isinstance(place, Parallel)
    first, count = place.own_share(TINY.tokens)
    mine = slice(first, first + count)
    names = ("query", "key", "value")
    share = {name: x[:, mine].detach().clone().requires_grad_() for name, x in zip(names, whole, strict=True)}
    with diffusers_on_cpu():
        output = attend(SOFTMAX, share, config)
        output.backward(direction[:, mine])
    query, key, value = (x.transpose(1, 2) for x in whole)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    expected.backward(direction)
    assert_close(output, expected[:, mine], rtol=1e-5, atol=1e-6)
    for name, gradient in zip(names, whole.grad, strict=True):
        assert_close(share[name].grad, gradient[:, mine], rtol=1e-5, atol=1e-5)


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
    results = Results("parallel", CPU, torch.bfloat16, folder, Budget()) if first else None
    with diffusers_on_cpu():
        benchmark_parallel(TINY, CPU, torch.bfloat16, [2, 1], 2, results)
    for rings, repetitions in (([3], 1), ([2], 0)):
        with pytest.raises(ValueError, match="3|0"):
            benchmark_parallel(TINY, CPU, torch.bfloat16, rings, repetitions, None)


def test_without_torchrun_the_command_says_how(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --no-python"):
        bench("parallel")
