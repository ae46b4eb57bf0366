"""The Triton kernels over processes, against the whole in one; on a machine without a GPU in the interpreter."""

from typing import Any

import pytest
import torch

from .processes import Processes
from .test_operator import ALL, errors


def interpreted(*arguments: Any) -> dict[str, float]:
    from ..attention.triton.interpreter import make_interpreter_fast

    make_interpreter_fast()
    return errors(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes are on the CPU, where only the interpreter runs")
def test_two_processes_equal_one(two: Processes) -> None:
    settings = ALL | {"backend": "triton"}
    for found in two.run(interpreted, (2, 1), True, (3, 3, 3), (2, 1, 1), settings, torch.float32):
        assert max(found.values()) < 1e-5, found
