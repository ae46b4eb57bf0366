"""Tiles by content along the curve: the kernels, one after the other, against the eager form in float64."""

import pytest
import torch

from mhla_diffusers.attention import ContentRule, initial_mixing, mhla_attention

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(grid=(3, 5, 7), blocks=(1, 2, 2), heads=2, head_dim=16, batch=2, extra=0, *, rope=True, mask=False):
    make = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=make)

    tokens = grid[0] * grid[1] * grid[2]
    given = {name: random(batch, tokens + extra, heads, head_dim) for name in ("query", "key", "value")}
    given["mixing"] = initial_mixing(blocks) + 0.1 * random(4, 4).abs()
    given["linear_weight"], given["pooled_bias"] = random(heads).exp() / 50, random(heads)
    settings = {"grid": grid, "blocks": blocks, "rope": "before", "extra": (0, extra)}
    if rope:
        angles = random(1, tokens + extra, 1, head_dim // 2).repeat_interleave(2, dim=-1)
        settings["rotary"] = (angles.cos(), angles.sin())
    if mask:
        settings["key_mask"] = torch.rand(batch, tokens + extra, generator=make) > 0.3
    return given, settings


def attend(given, settings, backend, dtype, upstream=None, **changes):
    """Output and gradients, in float64."""
    moved = {name: x.detach().to(DEVICE, dtype).requires_grad_() for name, x in given.items()}
    for name in ("mixing", "linear_weight", "pooled_bias"):
        if name in moved and dtype != torch.float64:
            moved[name] = given[name].detach().to(DEVICE).float().requires_grad_()
    placed = dict(settings)
    if "rotary" in placed:
        placed["rotary"] = tuple(
            x.to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32) for x in placed["rotary"]
        )
    if "key_mask" in placed:
        placed["key_mask"] = placed["key_mask"].to(DEVICE)
    output = mhla_attention(**moved, **placed, backend=backend, **changes)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)) if upstream is None else upstream
    (output * upstream.to(output)).sum().backward()
    gradients = {n: x.grad.double().cpu() for n, x in moved.items() if x.grad is not None}
    return output.detach().double().cpu(), gradients


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


CASES = {
    "plain": ({}, {}),
    "mask": ({"mask": True}, {}),
    "text": ({"extra": 21}, {}),
    "text and mask": ({"extra": 5, "mask": True}, {}),
    "without rope": ({"rope": False}, {}),
    "rope after the feature map": ({}, {"rope": "after"}),
    "72 channels": ({"head_dim": 72, "batch": 1}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_eager_form_in_float64(name):
    options, changes = CASES[name]
    given, settings = arguments(**options)
    rule = {"sparse": ContentRule(16, 0.3)} | changes
    settings |= rule
    expected, gradients = attend(given, settings, "eager", torch.float64)
    found, of_kernels = attend(given, settings, "triton", torch.float32)
    assert error(found, expected) < 1e-5
    for one, gradient in gradients.items():
        assert error(of_kernels[one], gradient) < 3e-5, one


@pytest.mark.parametrize("without", [("linear_weight",), ("pooled_bias",), ("linear_weight", "pooled_bias")])
def test_branches_may_be_left_out(without):
    given, settings = arguments()
    given = {name: x for name, x in given.items() if name not in without}
    settings |= {"sparse": ContentRule(16, 0.3)}
    expected, gradients = attend(given, settings, "eager", torch.float64)
    found, of_kernels = attend(given, settings, "triton", torch.float32)
    assert error(found, expected) < 1e-5
    for name in ("query", "key", "value"):
        assert error(of_kernels[name], gradients[name]) < 3e-5, name


def test_norm_and_gate_come_last():
    given, settings = arguments()
    given |= {"output_norm": torch.rand(16) + 0.5, "output_gate": torch.randn(given["query"].shape)}
    settings |= {"sparse": ContentRule(16, 0.3)}
    expected, gradients = attend(given, settings, "eager", torch.float64)
    found, of_kernels = attend(given, settings, "triton", torch.float32)
    assert error(found, expected) < 1e-5
    for name, gradient in gradients.items():
        assert error(of_kernels[name], gradient) < 5e-5, name


@pytest.mark.parametrize("options", [{}, {"extra": 5}, {"mask": True}], ids=["plain", "text", "mask"])
def test_a_fitted_bias_is_that_of_the_eager_form(options):
    given, settings = arguments(grid=(4, 8, 8), **options)
    del given["pooled_bias"]
    settings |= {"sparse": ContentRule(16, 0.2, fit_pooled_bias=True)}
    expected, _ = attend(given, settings, "eager", torch.float64)
    found, _ = attend(given, settings, "triton", torch.float32)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Eager operations sum the same rounded inputs in float32, so what is left is the rounding of the products."""
    given, settings = arguments()
    settings |= {"sparse": ContentRule(16, 0.3)}
    expected, gradients = attend(given, settings, "eager", dtype)
    found, of_kernels = attend(given, settings, "triton", dtype)
    bound = 4 * torch.finfo(dtype).eps
    assert error(found, expected) < bound
    for name in ("query", "key", "value"):
        assert error(of_kernels[name], gradients[name]) < 2 * bound, name


def test_the_same_bits_twice():
    given, settings = arguments()
    settings |= {"sparse": ContentRule(16, 0.3)}
    first, second = (attend(given, settings, "triton", torch.float32) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_a_block_size_that_no_kernel_takes_is_refused():
    given, settings = arguments()
    with pytest.raises(ValueError, match="block size is 4; allowed are 16"):
        attend(given, settings | {"sparse": ContentRule(4, 0.3)}, "triton", torch.float32)
