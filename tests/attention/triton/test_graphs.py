"""What a CUDA graph must not meet, as far as a machine without a GPU can tell: waiting for it, or memory of the CPU.

Whole calls run on the meta device, what operators do included, with no kernel launched. Reading a value there is an
error. What PyTorch makes on the CPU would have to be copied over, which no graph can record and eager layers wait for;
some of it is copied by code of which modes see nothing, so functions that do it on a GPU are refused by name.
"""

import math
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mhla_diffusers import MHLAConfig
from mhla_diffusers.attention.triton import backend
from mhla_diffusers.families import AttentionInputs
from mhla_diffusers.patching.layer import MHLALayer

from ..problems import KINDS, problem_of
from .meta import Operators, nothing_launched

MADE_FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor)


class CopiedFromPython(TorchFunctionMode):
    """Raises where numbers of Python become a tensor on the CPU, which is copied to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in MADE_FROM_PYTHON:
            raise AssertionError(f"{func} copies from the CPU")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, list) for x in index):
                raise AssertionError("a list as an index is copied from the CPU")
            if any(isinstance(x, torch.Tensor) for x in index) and not isinstance(args[-1], torch.Tensor | tuple):
                raise AssertionError(f"to set {args[-1]} at indices copies it from the CPU")
        return func(*args, **kwargs or {})


class Watched(Operators):
    """Raises where an operation waits for the meta device or copies to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mhla_diffusers":
            with CopiedFromPython():
                return super().__torch_dispatch__(func, types, args, kwargs)
        indices = args[1] if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) else ()
        if any(x is not None and x.dtype == torch.bool for x in indices):
            raise AssertionError(f"{func} with a mask waits for the device to count it")
        result = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                raise AssertionError(f"{func} has to do with a tensor on {x.device}")
        return result


@contextmanager
def watched():
    with CopiedFromPython(), Watched():
        yield


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(backend, "why_not", lambda *_: None)
    with nothing_launched():
        yield


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind, backend):
    """Forward and backward."""
    problem = problem_of(kind, batch=1).to("meta")
    tensors = {key: x.requires_grad_() for key, x in problem.tensors.items()}

    def attend():
        output = problem.attend(**tensors, backend=backend)
        torch.autograd.backward((output,), (torch.empty_like(output),))

    twice(attend)


def test_nothing_in_a_layer_waits():
    """At a grid of fewer rows than blocks, for which the mixing matrix is carried over."""
    config, grid = MHLAConfig(blocks=(2, 4, 2), output_gate=True, convolution=3, clamp_blocks=True), (3, 3, 6)
    with torch.device("meta"):
        layer = MHLALayer(config, 2, 8, 16)
        query, hidden_states = torch.empty(1, math.prod(grid), 2, 8), torch.empty(1, math.prod(grid), 16)
    twice(lambda: layer(AttentionInputs(query, query, query, hidden_states, grid), backend="triton"))


def twice(run):
    """The first call fills caches, as those before a capture do."""
    with Operators():
        run()
    with watched():
        run()
