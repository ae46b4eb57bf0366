"""A forward of a whole transformer with random weights: softmax against linear and sparse attention."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from ..attention.layout import block_count
from ..config import SparseConfig
from ..families import imported
from ..patching import apply_mhla
from .cases import Case
from .correctness import check_operator
from .counts import count_forward
from .measure import Results, Row, Runs, free_bytes, time_interleaved
from .operator import MHLA, PLAIN, SOFTMAX, SOFTMAX_BACKENDS, SPARSE

OWN = "own"
"""The model's own attention, where it is linear."""
HYBRID = "MHLA hybrid 2/3"
"""The model's own attention in every third layer."""
LINEAR_KINDS = (PLAIN, MHLA, HYBRID)
COMPILED = " + torch.compile"
"""Ends the name of a variant whose repeated blocks are compiled."""


def patch_settings(kind: str, blocks: tuple[int, ...]) -> dict[str, Any]:
    """Return arguments of :func:`apply_mhla` for an attention; empty for the model's own and for softmax."""
    settings: dict[str, dict[str, Any]] = {
        PLAIN: {"blocks": (1,) * len(blocks)},
        MHLA: {"blocks": blocks},
        HYBRID: {"blocks": blocks, "layers": "2/3"},
        SPARSE: {"density": SparseConfig.density},
    }
    return settings.get(kind, {})


def change_attention(case: Case, transformer: Any, kind: str) -> None:
    """Give an unpatched transformer of a case another self-attention, in place."""
    family = case.family
    if kind == SOFTMAX and family.computes != SOFTMAX:
        for attn in family.self_attentions(transformer).values():
            attn.set_processor(imported(family.softmax_processor)())
    if settings := patch_settings(kind, case.model.blocks):
        apply_mhla(transformer, **settings)


def with_attention(case: Case, transformer: Any, kind: str) -> Any:
    """Return a copy with another self-attention, as :func:`change_attention`; common weights are shared."""
    tensors = (*transformer.parameters(), *transformer.buffers())
    shared = copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})
    change_attention(case, shared, kind)
    return shared


def forward_runs(case: Case, transformer: Any, inputs: dict[str, Any], *, compile: bool) -> Runs:
    """Return the forwards of an unpatched transformer with every self-attention that it can have, its own first.

    Variants are copies that share its weights; with ``compile`` each is there with its repeated blocks compiled too.
    """
    model, family, own_is_softmax = case.model, case.family, case.family.computes == SOFTMAX
    runs: Runs = {}

    @cache
    def flops(kind: str) -> int:
        settings = patch_settings(kind, model.blocks)
        config = family.complete(settings) if settings else None
        change = None if config else partial(change_attention, case, kind=kind)
        return sum(count_forward(case, config, change=change).values())

    def add(name: str, kind: str, backend: str | None = None, note: str = "") -> None:
        is_baseline = kind == (SOFTMAX if own_is_softmax else OWN)
        tokens = math.prod(case.grid)
        row = Row(name, case.name, "forward", is_baseline, reason=note, tokens=tokens, flops=flops(kind))
        runs[row] = partial(_forward, with_attention(case, transformer, kind), inputs, backend)
        if compile and backend is None:
            compiled = with_attention(case, transformer, kind)
            for block in family.blocks_of(compiled).values():
                block.compile(dynamic=False)
            runs[replace(row, variant=name + COMPILED)] = partial(_forward, compiled, inputs, None)

    if not own_is_softmax:
        add(f"own {family.computes}", OWN)
    add("softmax native", SOFTMAX)
    for backend in SOFTMAX_BACKENDS:
        add(f"softmax {backend}", SOFTMAX, backend)
    for kind in () if family.mhla is None else LINEAR_KINDS:
        add(kind, kind)
    if own_is_softmax:
        rule = SparseConfig().rule_on(case.grid)
        count = block_count(case.grid, rule.key_block_size)
        # of few blocks, one for every query block is more than the density that is asked for
        pairs = f"{rule.listed_on(case.grid):.1%} of the pairs of {count} blocks of {rule.key_block_size} keys"
        add(SPARSE, SPARSE, note=f"{pairs}, chosen at every call")
    return runs


def _forward(transformer: Any, inputs: dict[str, Any], backend: str | None) -> Any:
    with nullcontext() if backend is None else sdpa_kernel([SOFTMAX_BACKENDS[backend]]):
        return transformer(**inputs)


@torch.no_grad()
def benchmark_forward(case: Case, results: Results, *, compile: bool = False) -> None:
    """Check attention at this size, then time a forward of all variants of :func:`forward_runs` in turns."""
    device, dtype = results.device, results.dtype
    weights = case.build(torch.device("meta"), dtype).parameters()
    needed, free = sum(x.numel() * x.itemsize for x in weights), free_bytes(device)
    if needed > free:  # asked beforehand, as Linux ends a process that tries
        reason = f"the weights need {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
        results.add([Row("all", case.name, "forward", status="out of memory", reason=reason)])
        return
    transformer = case.build(device, dtype)
    with torch.enable_grad():
        check_operator(case.shape, device, dtype)
    runs = forward_runs(case, transformer, case.inputs(transformer, dtype), compile=compile)
    # every variant compiles the same code again; beyond the limit torch would silently stop compiling
    with torch._dynamo.config.patch(cache_size_limit=64):
        results.add(time_interleaved(runs, device, results.seconds))
    torch.compiler.reset()
