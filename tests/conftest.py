"""Triton's kernels run through its interpreter in these tests where there is no GPU.

The variable must stand before anything imports Triton, diffusers included: whether a kernel is made for the interpreter
or for a GPU is settled when it is decorated.
"""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish() -> None:
    """Spare the garbage collector the millions of objects of imported modules, which stay: a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


def pytest_unconfigure() -> None:
    """Else Triton would tell of every function of it that is left when Python ends."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def native_attention_backend() -> Iterator[None]:
    """diffusers' ``set_attention_backend`` also changes the backend of every other model; put it back."""
    yield
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
