"""PyTorch's limit of graphs, raised while there are patched transformers, since a graph is made per resolution.

PyTorch counts the graphs of a function, and knows no single models.
"""

import weakref
from typing import Any

import torch

_GRAPHS = 64
"""Resolutions, each one graph, that a transformer is compiled for before torch.compile gives up; PyTorch allows 8."""
_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Those for whom the limit is raised."""
_limits_before: list[int] = []
"""PyTorch's limit while it is raised."""


def raise_limit(owner: Any) -> None:
    """Raise the limit, unless it is, until the last owner is gone or gives it back."""
    config = torch._dynamo.config
    if not _owners and config.recompile_limit < _GRAPHS:
        _limits_before.append(config.recompile_limit)
        config.recompile_limit = _GRAPHS
    weakref.finalize(owner, _restore_limit)  # before the set knows it, which then forgets it first
    _owners.add(owner)


def give_back_limit(owner: Any) -> None:
    """Undo :func:`raise_limit`."""
    _owners.discard(owner)
    _restore_limit()


def _restore_limit() -> None:
    """Restore PyTorch's limit of graphs once no owner is left, unless it was changed since."""
    if not _owners and _limits_before:
        before = _limits_before.pop()
        if torch._dynamo.config.recompile_limit == _GRAPHS:
            torch._dynamo.config.recompile_limit = before
