"""When the Triton backend is taken, and what it leaves to the eager one with a reason."""

import os
import subprocess
import sys

import pytest
import torch

from mhla_diffusers.attention import mhla_attention, register_feature_map, sparse_attention
from mhla_diffusers.attention.triton.backend import why_not

from ...refusals import refused
from ..problems import DEVICE

pytestmark = pytest.mark.gpu

LAYOUT = {"mixing": torch.rand(4, 4, device=DEVICE), "grid": (4, 6), "blocks": (2, 2)}


def run(dtype=torch.float32, head_dim=8, **options):
    query, key, value = torch.randn(3, 1, 24, 1, head_dim, dtype=dtype, device=DEVICE)
    return mhla_attention(query, key, value, **LAYOUT, **({"backend": "triton"} | options))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="auto takes the kernels on a GPU")
def test_auto_takes_eager_on_the_cpu():
    torch.manual_seed(0)
    found = run(backend="auto")
    torch.manual_seed(0)
    assert torch.equal(found, run(backend="eager"))


def test_a_feature_map_of_the_user_is_refused_and_runs_with_auto():
    register_feature_map("squared", lambda x, eps: x.square() + eps)
    with refused("squared"):
        run(feature_map="squared")
    assert run(feature_map="squared", backend="auto").isfinite().all()


def test_tensors_on_the_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refused("TRITON_INTERPRET"):
        mhla_attention(*torch.randn(3, 1, 24, 1, 8), LAYOUT["mixing"].cpu(), (4, 6), (2, 2), backend="triton")
    assert "meta" in why_not(torch.empty(1, 4, 1, 8, device="meta"), "relu")


@pytest.mark.parametrize("sparse", [False, True])
def test_a_second_derivative_is_refused(sparse):
    query = torch.randn(1, 24, 1, 16, device=DEVICE, requires_grad=True)
    if sparse:
        output = sparse_attention(query, query, query, LAYOUT["grid"], block_size=16, backend="triton")
    else:
        output = mhla_attention(query, query, query, **LAYOUT, backend="triton")
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with refused('backend="eager"', error=NotImplementedError):
        gradient.sum().backward()


def test_kernels_are_made_at_the_first_call_and_where_they_cannot_be_eager_operations_run():
    """As with a Triton that is older than allowed: the log says why, once. Diffusers imports Triton itself."""
    script = """
import sys, mhla_diffusers
assert not any("mhla_diffusers.attention.triton." + name in sys.modules for name in ("linear", "listed", "pooled"))
import torch, triton
del triton.jit
from mhla_diffusers.attention import mhla_attention
query = torch.ones(1, 4, 1, 8)
arguments = query, query, query, torch.ones(1, 1), (4,), (1,)
for _ in range(2):
    try:
        mhla_attention(*arguments, backend="triton")
    except ValueError as error:
        assert "cannot be imported" in str(error)
    else:
        raise SystemExit("not refused")
assert mhla_attention(*arguments).isfinite().all()
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True)
    assert done.stderr.count("The Triton kernels cannot be imported") == 1
