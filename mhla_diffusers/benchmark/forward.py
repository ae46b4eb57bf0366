"""A forward of a whole transformer with random weights: softmax against linear and sparse attention."""

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from ..config import SparseConfig
from ..families import imported
from ..patching import apply_mhla
from .cases import Case
from .measure import Results, Row, Runs, time_interleaved
from .operator import MHLA, PLAIN, SOFTMAX, SOFTMAX_BACKENDS, SPARSE

HYBRID = "MHLA hybrid 2/3"
"""The model's own attention in every third layer."""
COMPILED = " + torch.compile"
"""Ends the name of a variant whose repeated blocks are compiled."""


def changed(case: Case, transformer: Any, patch: Mapping[str, Any] | None = None, softmax: bool = False) -> Any:
    """Return a copy of an unpatched transformer with a patch, or softmax for its own attention; weights are shared."""
    tensors = (*transformer.parameters(), *transformer.buffers())
    copied = copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})
    if softmax and case.family.computes != SOFTMAX:
        for attn in case.family.self_attentions(copied).values():
            attn.set_processor(imported(case.family.softmax_processor)())
    return copied if patch is None else apply_mhla(copied, **patch)


def forward_runs(case: Case, transformer: Any, inputs: dict[str, Any], *, compile: bool) -> Runs:
    """Return the forwards of an unpatched transformer with every self-attention that it can have, its own first.

    With ``compile`` each is there with its repeated blocks compiled too.
    """
    family, is_softmax, own = case.family, case.family.computes == SOFTMAX, sum(case.flops().values())
    blocks = case.model.blocks
    patches: dict[str, Mapping[str, Any]] = {}
    if family.mhla is not None:
        patches |= {PLAIN: {"blocks": (1,) * len(blocks)}, MHLA: {"blocks": blocks}}
        patches |= {HYBRID: {"blocks": blocks, "layers": "2/3"}}
    if is_softmax:
        patches[SPARSE] = {"density": SparseConfig().density}
    runs: Runs = {}

    def add(name: str, backend: str | None = None, flops: int | None = own, **change: Any) -> None:
        is_baseline = "patch" not in change and flops is not None
        row = Row(name, case.name, "forward", is_baseline, tokens=math.prod(case.grid), flops=flops)
        runs[row] = partial(_forward, changed(case, transformer, **change), inputs, backend)
        if compile and backend is None:
            compiled = changed(case, transformer, **change)
            for block in family.blocks_of(compiled).values():
                block.compile(dynamic=False)
            runs[replace(row, variant=name + COMPILED)] = partial(_forward, compiled, inputs, None)

    if not is_softmax:
        add(f"own {family.computes}")
    for backend in (None, *SOFTMAX_BACKENDS):
        add(f"{SOFTMAX} {backend or 'native'}", backend, own if is_softmax else None, softmax=True)
    for name, patch in patches.items():
        add(name, flops=sum(case.flops(family.complete(patch)).values()), patch=patch)
    return runs


def _forward(transformer: Any, inputs: dict[str, Any], backend: str | None) -> Any:
    with nullcontext() if backend is None else sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        return transformer(**inputs)


@torch.no_grad()
def benchmark_forward(case: Case, results: Results, seconds: float, *, compile: bool | None = None) -> None:
    """Time a forward of all variants of :func:`forward_runs` in turns.

    Compiled blocks are timed too, with ``compile`` None on a GPU alone.
    """
    transformer = case.build(results.device, results.dtype)
    compiles = results.device.type != "cpu" if compile is None else compile
    runs = forward_runs(case, transformer, case.inputs(transformer, results.dtype), compile=compiles)
    # every variant compiles the same code again; beyond the limit torch would silently stop compiling
    with torch._dynamo.config.patch(cache_size_limit=64):
        results.add(time_interleaved(runs, results.device, seconds))
    torch.compiler.reset()
