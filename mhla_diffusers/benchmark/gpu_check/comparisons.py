"""The steps ``rivals`` and ``models``: the commands ``op``, ``transformer`` and ``train`` at the sizes that count most.

Their own files are written too, so that ``mhla bench report`` draws them.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..candidates import EXACT, HYBRID
from ..cases import TransformerCase
from ..models import choose_sizes, models
from ..operation import benchmark_operation
from ..recorder import Recorder
from ..results import Row
from ..shapes import TINY, Shape, shapes
from ..timing import Budget
from ..transformer import benchmark_training, benchmark_transformer
from .findings import Measured, Notebook, NotHereError

_SHAPES = {"wan2.1-1.3b-480p": True, "dit-xl-2-1024px": False, "sana-1.6b-2048px": False}
"""Shape → whether torch.compile and FlexAttention take part, which compile for a minute."""
_BUDGET = Budget(seconds=0.5, least=3, most=20)
_ON_CPU = Budget(seconds=0.01, least=1, most=1)
_ATTENTIONS = ("softmax native", "MHLA", HYBRID, EXACT)


def compare_rivals(notebook: Notebook, device: torch.device) -> None:
    """One attention by itself against those of PyTorch and of other packages, in turns."""
    on_cpu = device.type == "cpu"
    dtype, budget = (torch.float32, _ON_CPU) if on_cpu else (torch.bfloat16, _BUDGET)
    recorder = Recorder("op", device, dtype, notebook.file.parent)
    wanted: list[tuple[Shape, bool]] = [(shapes()[name], compiled) for name, compiled in _SHAPES.items()]
    for shape, compiled in [(TINY, False)] if on_cpu else wanted:
        measure = partial(benchmark_operation, shape, device, dtype, recorder.rates, budget, compile=compiled)
        notebook.attempt(shape.name, partial(_record, recorder, measure))


def compare_models(notebook: Notebook, device: torch.device) -> None:
    """A whole Wan transformer: a forward with and without torch.compile, a training step, and the larger size."""
    on_cpu = device.type == "cpu"
    dtype, budget = (torch.float32, _ON_CPU) if on_cpu else (torch.bfloat16, _BUDGET)
    model = models()["tiny-wan" if on_cpu else "wan2.1-1.3b"]
    cases = [TransformerCase(model, size, None, device, dtype) for size in choose_sizes(model, None, None, device.type)]
    forwards = Recorder("transformer", device, dtype, notebook.file.parent)
    steps = Recorder("train", device, dtype, notebook.file.parent)

    def forward(case: TransformerCase, compiled: bool) -> Callable[[], list[Row]]:
        return partial(benchmark_transformer, case, forwards.rates, budget, compile=compiled, only=_ATTENTIONS)

    first, *larger = cases
    train = partial(benchmark_training, first, steps.rates, budget, checkpointing=True, only=_ATTENTIONS)
    notebook.attempt(f"forward at {first.size}", partial(_record, forwards, forward(first, not on_cpu)))
    notebook.attempt(f"training step at {first.size}", partial(_record, steps, train))
    for case in larger:
        notebook.attempt(f"forward at {case.size}", partial(_record, forwards, forward(case, False)))


def _record(recorder: Recorder, measure: Callable[[], Sequence[Row]]) -> Measured:
    """The rows of one case, into the files of the command and into the finding."""
    rows = measure()
    recorder.add(rows)
    measured = [row for row in rows if row.median is not None]
    if not measured:
        raise NotHereError("; ".join(dict.fromkeys(row.reason for row in rows)))
    ratios = {(row.variant, row.stage): recorder.run.times_baseline(row) for row in measured if not row.baseline}
    best = max(((ratio, *what) for what, ratio in ratios.items() if ratio is not None), default=None)
    telling = f"{best[1]}, {best[2]}: {best[0]:.2f} times the fastest baseline" if best is not None else ""
    numbers = {
        f"{row.variant}, {row.stage}": {"seconds": row.median, "peak_bytes": row.peak_bytes}
        if row.median is not None
        else row.reason or row.status
        for row in rows
    }
    return Measured(numbers, telling)
