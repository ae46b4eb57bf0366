"""Attention problems that the tests of every backend share: tensors, options and the comparison with the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mhla_diffusers.attention import (
    BlockLists,
    MHLACall,
    SparseCall,
    initial_mixing,
    mhla_attention,
    reference_attention,
    sparse_attention,
)
from mhla_diffusers.attention.call import DEFAULT_DENSITY, ContentRule
from mhla_diffusers.attention.layout import block_count
from mhla_diffusers.attention.triton.backend import FEATURE_MAPS

POSITIVE_MAPS = [name for name in FEATURE_MAPS if name != "identity"]
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
        return sparse_attention if self.blocks is None else mhla_attention

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
    rotary: bool = False,
    mask: bool = False,
    norm: bool = False,
    gate: bool = False,
    per_head: bool = False,
    linear_branch: bool = False,
    extra: tuple[int, int] = (0, 0),
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Random float32 tensors of a problem; the mixing matrix is the initial one, shaken."""
    generator = torch.Generator().manual_seed(seed)
    tokens = math.prod(grid) + sum(extra)
    shape = (batch, tokens, heads, head_dim)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    mixing = initial_mixing(blocks).expand(heads, -1, -1) if per_head else initial_mixing(blocks)
    tensors = {name: draw(*shape) for name in ("query", "key", "value")}
    tensors["mixing"] = mixing + 0.1 * torch.rand(mixing.shape, generator=generator)
    if norm:
        tensors["output_norm"] = 1 + 0.3 * draw(head_dim)
    if gate:
        tensors["output_gate"] = draw(batch, math.prod(grid), heads, head_dim)
    if linear_branch:
        tensors["linear_weight"] = 0.5 + torch.rand(heads, generator=generator)
    if rotary:
        angles = draw(1, tokens, 1, head_dim // 2).repeat_interleave(2, dim=-1)
        options["rotary"] = (angles.cos(), angles.sin())
    if mask:
        keep = torch.rand(batch, tokens, generator=generator) > 0.3
        keep[:, 0] = True
        options["key_mask"] = keep
    if any(extra):
        options["extra"] = extra
    return Problem(tensors, grid, blocks, options)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64.

    The problems are of unit scale, so a norm below 1 is cancellation (the gradient of a row's overall scale is zero
    when the attention is normalised) and the difference is then taken as it is.
    """
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1.0))


def errors_against_reference(problem: Problem, dtype: torch.dtype, backend: str) -> dict[str, float]:
    """See :func:`errors_of`."""
    return errors_of(problem, dtype, partial(problem.attention, backend=backend))


def errors_of(problem: Problem, dtype: torch.dtype, attend: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Relative error of output and every gradient; the reference sees the inputs as rounded to ``dtype``."""
    rounded = Problem(
        {name: tensor.to(dtype).float() for name, tensor in problem.tensors.items()},
        problem.grid,
        problem.blocks,
        problem.options,
    )
    expected = rounded.run(reference, torch.float64)
    found = rounded.run(attend, dtype)
    return {name: relative_error(found[name], expected[name]) for name in expected}


MASKED = {
    "linear": {"norm": True, "gate": True, "rotary": True},
    "not normalised": {"normalize": False},
    "sparse": {"lists": BlockLists.from_mask(16, torch.eye(2, dtype=torch.bool).expand(2, -1, -1))},
    "sparse by content": {"block_size": 16, "density": 0.5},
    "extra": {"extra": (2, 3)},
    "causal by token": {"causal": "token", "linear_branch": True},
    "causal by token, linear": {"causal": "token"},
    "causal by block": {"causal": "block", "linear_branch": True},
}
"""Kinds of calls for :func:`masked_problem`."""


def masked_problem(kind: str) -> Problem:
    """A problem of three samples, of the first of which no key takes part."""
    options = {"batch": 3, "head_dim": 16, "mask": True} | MASKED[kind]
    if kind.startswith("sparse"):
        problem = make_sparse_problem((24,), 16, constants="lists" in options, **options)
    else:
        problem = make_problem((24,), (4,), **options)
    problem.options["key_mask"][0] = False
    return problem


def random_lists(
    grid: tuple[int, ...],
    size: int,
    key_size: int,
    order: str = "content",
    heads: int = 2,
    density: float = 0.3,
    seed: int = 0,
) -> BlockLists:
    """Lists of random blocks, in places empty."""
    shape = heads, block_count(grid, size), block_count(grid, key_size)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    return BlockLists.from_mask(size, mask, key_block_size=key_size, order=order)


def make_sparse_problem(
    grid: tuple[int, ...],
    size: int,
    *,
    key_size: int | None = None,
    order: str = "content",
    density: float = 0.3,
    constants: bool = True,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """Random float32 tensors of sparse attention, with lists, β and γ given; without ``constants`` the operator's own.

    Lists are random and in places empty, unless the options say otherwise.
    """
    of_lists = ("lists", "block_size", "key_block_size")
    given = {name: options.pop(name) for name in of_lists if name in options}
    problem = make_problem(grid, (1,) * len(grid), seed=seed, **options)
    heads = problem.tensors["query"].shape[2]
    del problem.tensors["mixing"]
    if not given and constants:
        given = {"lists": random_lists(grid, size, key_size or size, order, heads, density, seed)}
    elif "lists" not in given:
        given = {"block_size": size, "key_block_size": key_size or size, "order": order, "density": density} | given
    if constants:
        make = torch.Generator().manual_seed(seed)
        given["pooled_bias"] = 0.3 * torch.randn(heads, generator=make)
        if options.get("far", "first-order") == "first-order":
            given["state_weight"] = 1.2 * torch.rand(heads, generator=make)
    return Problem(problem.tensors, grid, None, problem.options | given)


def check_empty_sample(problem: Problem, attend: Callable[..., torch.Tensor]) -> None:
    """The first sample gets 0 and gives no gradient, and the others are as without it."""
    found = problem.run(attend)
    assert all(x.isfinite().all() for x in found.values())
    for name in ("output", "query", "key", "value"):
        assert not found[name][0].any(), name
    of_samples = ("query", "key", "value", "output_gate")
    tensors = {name: x[1:] if name in of_samples else x for name, x in problem.tensors.items()}
    options = problem.options | {"key_mask": problem.options["key_mask"][1:]}
    others = Problem(tensors, problem.grid, problem.blocks, options).run(attend)
    torch.testing.assert_close(found["output"][1:], others["output"])
