"""Attention problems that the tests of every backend share: tensors, options and the comparison with the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

from mhla_diffusers.attention import (
    BlockLists,
    MHLACall,
    SparseCall,
    attend,
    initial_mixing,
    mhla_attention,
    reference_attention,
    sparse_attention,
)
from mhla_diffusers.attention.call import DEFAULT_DENSITY, ContentRule
from mhla_diffusers.attention.layout import block_count, frame_block_starts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where kernels run, through Triton's interpreter on a CPU."""
BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.gpu)]
KERNEL_MAPS = ["relu", "elu+1"]
POSITIVE_MAPS = [*KERNEL_MAPS, "softmax"]
GRIDS = [
    # grid, blocks: even and ragged, one to three axes, one block to one token per block
    ((12,), (1,)),
    ((17,), (5,)),
    ((6, 8), (2, 4)),
    ((7, 9), (3, 4)),
    ((5, 6), (5, 6)),
    ((4, 4, 6), (2, 2, 3)),
    ((5, 7, 3), (2, 3, 2)),
    ((3, 5, 4), (1, 2, 1)),
]
EVERYTHING = {"rotary": True, "mask": True, "norm": True, "gate": True, "per_head": True}
BEFORE = {"rotary": True, "rope": "before"}
TEXT_AND_MASK = {"extra": (2, 3), "mask": True}


@dataclass
class Problem:
    """Inputs of one call of ``mhla_attention``, or without blocks of ``sparse_attention``."""

    tensors: dict[str, torch.Tensor]
    grid: tuple[int, ...]
    blocks: tuple[int, ...] | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def attention(self) -> Callable[..., torch.Tensor]:
        """The operator."""
        return attend_sparse if self.blocks is None else mhla_attention

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments beside the tensors."""
        return {"grid": self.grid} | ({} if self.blocks is None else {"blocks": self.blocks}) | self.options

    def attend(self, **changes: Any) -> torch.Tensor:
        """The operator's output with some arguments changed."""
        return self.attention(**self.tensors | self.settings | changes)

    def run(self, attention: Any, dtype: torch.dtype | None = None, **more: Any) -> dict[str, torch.Tensor]:
        """Output and gradients of ``attention`` on copies of the tensors, in ``dtype`` where given."""
        leaves = {
            name: tensor.detach().to(dtype or tensor.dtype).clone().requires_grad_()
            for name, tensor in self.tensors.items()
        }
        output = attention(**leaves, **self.settings, **more)
        generator = torch.Generator().manual_seed(7)
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
        (output.double() * direction).sum().backward()
        # what has no effect (the far field's weight where there is one block) has no gradient
        gradients = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}
        return {"output": output.detach()} | gradients

    def to(self, device: torch.device | str = DEVICE, dtype: torch.dtype | None = None) -> "Problem":
        """The same on a device, with the four-dimensional tensors, which models compute, in ``dtype`` if given."""

        def move(x: Any) -> Any:
            if isinstance(x, BlockLists):
                return replace(x, keys=x.keys.to(device))
            return x.to(device) if isinstance(x, torch.Tensor) else x

        tensors = {name: x.to(dtype or x.dtype) if x.ndim == 4 else x for name, x in self.tensors.items()}
        tensors = {name: move(x) for name, x in tensors.items()}
        return replace(self, tensors=tensors, options={name: tree_map(move, x) for name, x in self.options.items()})


def attend_sparse(backend: str = "auto", **arguments: Any) -> torch.Tensor:
    """Sparse attention, or that of a call with ``lists``."""
    if "lists" not in arguments:
        return sparse_attention(**arguments, backend=backend)
    return attend(SparseCall(sparse=arguments.pop("lists"), **arguments), backend)


def reference(**arguments: Any) -> torch.Tensor:
    """The reference with the arguments of the operators, for :meth:`Problem.run`."""
    return reference_attention(call_of(**arguments))


def call_of(**arguments: Any) -> MHLACall | SparseCall:
    """The call that an operator makes of its arguments."""
    if "mixing" in arguments:
        return MHLACall(**arguments)
    names = "density", "block_size", "key_block_size", "order"
    rule = {"density": DEFAULT_DENSITY} | {name: arguments.pop(name) for name in names if name in arguments}
    lists = arguments.pop("lists", None)
    return SparseCall(**arguments, sparse=lists or ContentRule.on(arguments["grid"], **rule))


def make_problem(
    grid: tuple[int, ...],
    blocks: tuple[int, ...],
    *,
    batch: int = 2,
    heads: int = 2,
    head_dim: int = 8,
    rotary: bool | str = False,
    mask: bool | str = False,
    norm: bool = False,
    gate: bool = False,
    per_head: bool = False,
    linear_branch: bool = False,
    extra: tuple[int, int] = (0, 0),
    tokens: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Random float32 tensors of a problem; the mixing matrix is the initial one, shaken.

    ``rotary="own"`` draws angles for every sample, ``mask="weights"`` weights of the keys; ``tokens`` ends the sequence
    before the grid does.
    """
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(grid) + sum(extra)
    shape = (batch, count, heads, head_dim)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    mixing = initial_mixing(blocks).expand(heads, -1, -1) if per_head else initial_mixing(blocks)
    tensors = {name: draw(*shape) for name in ("query", "key", "value")}
    tensors["mixing"] = mixing + 0.1 * torch.rand(mixing.shape, generator=generator)
    if norm:
        tensors["output_norm"] = 1 + 0.3 * draw(head_dim)
    if gate:
        tensors["output_gate"] = draw(*shape)
    if linear_branch:
        tensors["linear_weight"] = 0.5 + torch.rand(heads, generator=generator)
    if rotary:
        samples = batch if rotary == "own" else 1
        angles = draw(samples, count, 1, head_dim // 2).repeat_interleave(2, dim=-1)
        options["rotary"] = (angles.cos()[:, :tokens], angles.sin()[:, :tokens])
    if mask:
        weights = torch.rand(batch, count, generator=generator)
        options["key_mask"] = weights if mask == "weights" else weights > 0.3
        options["key_mask"][:, 0] = 1
    if any(extra):
        options["extra"] = extra
    tensors = {name: x[:, :tokens] if x.ndim == 4 else x for name, x in tensors.items()}
    return Problem(tensors, grid, blocks, options)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64.

    The problems are of unit scale, so a norm below 1 is cancellation (the gradient of a row's overall scale is zero
    when the attention is normalised) and the difference is then taken as it is.
    """
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1.0))


def errors_of(problem: Problem, dtype: torch.dtype, attend: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Relative error of output and every gradient; the reference sees the inputs as rounded to ``dtype``."""
    rounded = replace(problem, tensors={name: x.to(dtype).float() for name, x in problem.tensors.items()})
    expected = rounded.run(reference, torch.float64)
    found = rounded.run(attend, dtype)
    return {name: relative_error(found[name], expected[name]) for name in expected}


def lists_of(mask: torch.Tensor, size: int, key_size: int = 0, order: str = "curve") -> BlockLists:
    """Lists of bool (H, T, K) or (B, H, T, K): whether a head's query block (row) attends to a key block."""
    mask = (mask if mask.ndim == 4 else mask[None]).bool()
    count = mask.shape[-1]
    # blocks that are not listed are put behind all others, and cut off
    keys = torch.where(mask, torch.arange(count, device=mask.device), count).sort(dim=-1).values
    keys = keys[..., : int(mask.sum(dim=-1).max())]
    return BlockLists(size, keys.where(keys < count, -1), count, key_block_size=key_size, order=order)


def random_lists(
    grid: tuple[int, ...],
    size: int,
    key_size: int,
    order: str = "content",
    heads: int = 2,
    density: float = 0.3,
    seed: int = 0,
    samples: int = 1,
) -> BlockLists:
    """Lists of random blocks, in places empty."""
    shape = samples, heads, block_count(grid, size), block_count(grid, key_size)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    return lists_of(mask, size, key_size, order)


def make_sparse_problem(
    grid: tuple[int, ...],
    size: int,
    *,
    key_size: int | None = None,
    order: str = "content",
    density: float = 0.3,
    constants: bool = True,
    lists: BlockLists | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Random float32 tensors of sparse attention, with lists, β and γ given; without ``constants`` the operator's own.

    Lists are random and in places empty, unless given.
    """
    problem = make_problem(grid, (1,) * len(grid), seed=seed, **options)
    heads = problem.tensors["query"].shape[2]
    del problem.tensors["mixing"]
    own: dict[str, Any] = {"block_size": size, "key_block_size": key_size or size, "order": order, "density": density}
    if constants:
        make = torch.Generator().manual_seed(seed)
        own = {"lists": lists or random_lists(grid, size, key_size or size, order, heads, density, seed)}
        own["pooled_bias"] = 0.3 * torch.randn(heads, generator=make)
        if options.get("far", "second-order") == "second-order":
            own["state_weight"] = 1.2 * torch.rand(heads, generator=make)
    return Problem(problem.tensors, grid, None, problem.options | own)


_MHLA = partial(make_problem, (3, 3, 5), (2, 2, 2))
_CAUSAL = partial(make_problem, (17,), (5,), causal="token")
_LISTS = partial(make_sparse_problem, (3, 3, 5), 16)
_BY_CONTENT = partial(_LISTS, constants=False)
KINDS: dict[str, tuple[Callable[..., Problem], dict[str, Any]]] = {
    "MHLA": (_MHLA, EVERYTHING),
    "MHLA, RoPE before": (_MHLA, BEFORE | {"feature_map": "elu+1"}),
    "MHLA, not normalised": (_MHLA, BEFORE | {"normalize": False, "feature_map": "identity"}),
    "causal by token": (_CAUSAL, {"rotary": True, "feature_map": "elu+1"}),
    "causal by token, softmax": (_CAUSAL, {"rotary": True, "linear_branch": True, "gate": True}),
    "causal by block": (partial(_MHLA, causal="block"), {}),
    "causal by block, softmax": (partial(_MHLA, causal="block"), {"linear_branch": True, "norm": True}),
    "lists": (_LISTS, {"rotary": True, "mask": True}),
    "lists, means": (_LISTS, {"far": "means"}),
    "lists, text": (_LISTS, {"order": "curve", "extra": (2, 5)}),
    "all listed": (_LISTS, {"density": 1.1, "mask": True}),
    "by content": (_BY_CONTENT, {"rotary": True}),
    "by content, means": (_BY_CONTENT, {"far": "means", "mask": True}),
    "by content, text": (partial(make_sparse_problem, (3, 3, 5), 32, key_size=16, constants=False), TEXT_AND_MASK),
}
"""One small problem of every kind of call, which both backends run."""


def problem_of(kind: str, **changes: Any) -> Problem:
    """A problem of :data:`KINDS` with some options changed."""
    make, options = KINDS[kind]
    return make(**{"head_dim": 16} | options | changes)


@st.composite
def drawn_problems(draw: st.DrawFn, kind: str) -> Problem:
    """A problem of any size and options: MHLA, "causal" or "sparse"."""

    def flags(*names: str) -> dict[str, bool]:
        return {name: draw(st.booleans()) for name in names}

    sizes: dict[str, Any] = {"head_dim": 2 * draw(st.integers(1, 8)), "seed": draw(st.integers(0, 999))}
    sizes |= {"batch": draw(st.integers(1, 2)), "heads": draw(st.integers(1, 2))}
    blocks = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    grid = tuple(count + draw(st.integers(0, 5)) for count in blocks)
    if kind == "sparse":
        options = {
            "density": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
            "far": draw(st.sampled_from(["second-order", "means"])),
            "order": draw(st.sampled_from(["content", "curve"])),
            "key_size": draw(st.integers(1, 6)),
            "extra": draw(st.sampled_from([(0, 0), (0, 1), (2, 3), (40, 1)])),
        }
        size = options["key_size"] * draw(st.sampled_from([1, 2, 4]))
        return make_sparse_problem(grid, size, **options, **sizes, **flags("rotary", "mask"))
    options = flags(*EVERYTHING) | {
        "rope": draw(st.sampled_from(["after", "before"])),
        "feature_map": draw(st.sampled_from(POSITIVE_MAPS)),
    }
    if kind == "MHLA":
        return make_problem(grid, blocks, normalize=draw(st.booleans()), **options, **sizes)
    # with relu and RoPE after it a normaliser may be nearly nothing beside the weights, and any rounding large then
    options |= flags("linear_branch") | {"mask": False, "feature_map": "elu+1"}
    causal, rows = draw(st.sampled_from(["token", "block"])), draw(st.integers(1, 5))
    first = rows + draw(st.integers(0, 20 if causal == "token" else 4))
    grid, blocks = ((first,), (rows,)) if causal == "token" else ((first, 2, 3), (rows, 1, draw(st.integers(1, 3))))
    ends = range(1, first + 1) if causal == "token" else frame_block_starts(grid, blocks)[1:]
    tokens = draw(st.sampled_from(list(ends)))
    return make_problem(grid, blocks, causal=causal, tokens=tokens, **options, **sizes)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes on the CPU that a function holds at a time, without gradients, beside its inputs."""
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
