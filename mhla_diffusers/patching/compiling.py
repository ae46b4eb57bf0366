"""How many graphs torch.compile may make: of a patched transformer it makes one for every resolution."""

from weakref import WeakSet

import torch
from torch import nn

GRAPHS = 64
"""Resolutions that a patched transformer is compiled for before torch.compile gives up; PyTorch's limit is 8."""

_patched: WeakSet[nn.Module] = WeakSet()
_limits_before: list[int] = []
"""PyTorch's limit while there are patched transformers."""


def allow_graphs(transformer: nn.Module) -> None:
    """Raise PyTorch's limit, which knows no single models, as long as this transformer is patched."""
    config = torch._dynamo.config
    if not _limits_before and config.recompile_limit < GRAPHS:
        _limits_before.append(config.recompile_limit)
        config.recompile_limit = GRAPHS
    _patched.add(transformer)


def give_back_graphs(transformer: nn.Module) -> None:
    """Once no transformer is patched any more, PyTorch's limit is that of before, unless it was changed since."""
    _patched.discard(transformer)
    if not _patched and _limits_before:
        before = _limits_before.pop()
        if torch._dynamo.config.recompile_limit == GRAPHS:
            torch._dynamo.config.recompile_limit = before
