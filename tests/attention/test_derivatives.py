"""Derivatives beyond a backward pass: forward mode, transforms of torch.func, second derivatives."""

import pytest
import torch
from torch.autograd import forward_ad

from mhla_diffusers.attention import BlockLists, sparse_attention
from mhla_diffusers.attention.blocks import block_table
from mhla_diffusers.attention.layout import hilbert_curve, layout_of

from . import problems
from .problems import make_problem, make_sparse_problem, relative_error

ALL_OR_NOTHING = BlockLists.from_mask(4, (torch.arange(6) % 2).view(1, 6, 1).expand(2, 6, 6))
OWN = {
    "ragged": lambda: make_problem((5, 7), (2, 3), rotary=True, rope="before", feature_map="softmax"),
    "one block": lambda: make_sparse_problem((2, 3), 8, constants=False),
    "lists of all or nothing": lambda: make_sparse_problem((4, 6), 4, lists=ALL_OR_NOTHING),
}
KINDS = [*problems.KINDS, *OWN]


def problem_of(kind):
    """A problem in float64."""
    problem = OWN[kind]() if kind in OWN else problems.problem_of(kind, head_dim=8)
    problem.tensors = {name: x.double() for name, x in problem.tensors.items()}
    return problem


def pushed(problem, direction, how):
    """The output's tangent for one of the inputs."""
    if how == "jvp":
        given = tuple(problem.tensors.values()), tuple(direction.values())
        return torch.func.jvp(lambda *x: problem.attend(**dict(zip(direction, x, strict=True))), *given)[1]
    with torch.set_grad_enabled(how != "dual_level, no_grad"), forward_ad.dual_level():
        leaves = {name: x.clone().requires_grad_(how == "dual_level, leaves") for name, x in problem.tensors.items()}
        duals = {name: forward_ad.make_dual(x, direction[name]) for name, x in leaves.items()}
        return forward_ad.unpack_dual(problem.attend(**duals)).tangent


@pytest.mark.parametrize("how", ["jvp", "dual_level", "dual_level, no_grad", "dual_level, leaves"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_is_the_transpose_of_a_backward_pass(kind, how):
    """u · J v is Jᵀ u · v, for v of all inputs together; lists, β and γ are constants in both."""
    problem = problem_of(kind)
    make = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(x.shape, generator=make, dtype=x.dtype) for n, x in problem.tensors.items()}
    tangent = pushed(problem, direction, how)
    assert tangent is not None
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}
    output = problem.attend(**leaves)
    upstream = torch.randn(output.shape, generator=make, dtype=output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream, allow_unused=True)
    pulled = sum((g * v).sum() for g, v in zip(gradients, direction.values(), strict=True) if g is not None)
    torch.testing.assert_close((upstream * tangent).sum(), pulled, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_transforms(kind):
    """A gradient, a gradient per sample, and forward over reverse."""
    problem = problem_of(kind)
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}

    def loss(tensors, mask=None):
        masks = {} if mask is None else {"key_mask": mask}
        return problem.attend(**tensors, **masks).square().sum()

    expected = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True, create_graph=True)
    expected = [torch.zeros_like(x) if g is None else g for g, x in zip(expected, leaves.values(), strict=True)]
    found = torch.func.grad(loss)(problem.tensors)
    for value, name in zip(expected, found, strict=True):
        assert relative_error(found[name], value.detach()) <= 1e-12, name

    of_samples = {name: 0 if x.ndim == 4 else None for name, x in problem.tensors.items()}
    one = {name: x[:, None] if of_samples[name] == 0 else x for name, x in problem.tensors.items()}
    mask = problem.options.get("key_mask")
    mask, mask_axis = (None, None) if mask is None else (mask[:, None], 0)
    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(of_samples, mask_axis))(one, mask)
    for value, name in zip(expected, found, strict=True):
        own = by_sample[name][:, 0] if of_samples[name] == 0 else by_sample[name].sum(dim=0)
        assert relative_error(own, value.detach()) <= 1e-12, name

    direction = {name: x.flip(0) for name, x in problem.tensors.items()}
    second = torch.func.jvp(torch.func.grad(loss), (problem.tensors,), (direction,))[1]
    along = sum((g * v).sum() for g, v in zip(expected, direction.values(), strict=True))
    again = torch.autograd.grad(along, list(leaves.values()), allow_unused=True)
    for value, name in zip(again, second, strict=True):
        assert second[name].isfinite().all(), name
        if value is not None:
            assert relative_error(second[name], value) <= 1e-9, name


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    problem = problem_of(kind)
    if "by content" in kind:  # a small step changes γ, which is a constant
        pytest.skip("has no finite differences")
    names = list(problem.tensors)
    leaves = [x.clone().requires_grad_() for x in problem.tensors.values()]
    attend = lambda *x: problem.attend(**dict(zip(names, x, strict=True)))  # noqa: E731
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["MHLA", "by content, means"])
@pytest.mark.parametrize("how", ["grad", "jvp"])
def test_what_a_transform_was_the_first_to_need_serves_later_calls(kind, how):
    """Tables of blocks and angles that are kept, as a first call in a transform makes them."""
    problem = problem_of(kind)
    expected = problem.attend()
    if "rotary" in problem.options:
        problem.options["rotary"] = tuple(x.clone() for x in problem.options["rotary"])
    for table in (block_table, layout_of, hilbert_curve):
        table.cache_clear()
    if how == "grad":
        torch.func.grad(lambda tensors: problem.attend(**tensors).sum())(problem.tensors)
    else:
        pushed(problem, problem.tensors, "jvp")
    torch.testing.assert_close(problem.attend(), expected)
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}
    problem.attend(**leaves).sum().backward()


def test_the_output_may_be_changed_in_place():
    problem = problem_of("all listed")
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}
    problem.options.pop("key_mask")
    problem.attend(**leaves).mul_(2).sum().backward()
    assert all(x.grad is not None for x in leaves.values())


def test_second_derivatives_of_one_tensor_as_query_and_key():
    x = problem_of("one block").tensors["query"].requires_grad_()
    attend = lambda x: sparse_attention(x, x.sin(), x, (2, 3), density=1.0)  # noqa: E731
    assert torch.autograd.gradgradcheck(attend, [x], fast_mode=True)


@pytest.mark.parametrize("kind", ["MHLA", "lists"])
def test_forward_mode_in_a_compiled_graph(kind):
    """Right, or refused; never without its tangent."""
    problem = problem_of(kind)
    direction = {name: x.flip(0) for name, x in problem.tensors.items()}
    expected = pushed(problem, direction, "jvp")
    compiled = torch.compile(lambda given: pushed(problem, given, "jvp"), backend="aot_eager")
    try:
        torch.testing.assert_close(compiled(direction), expected)
    finally:
        torch.compiler.reset()  # functions that broke a graph here would break all later ones
