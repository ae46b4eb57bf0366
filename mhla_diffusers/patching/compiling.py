"""PyTorch's limit of compiled graphs, raised while any patched transformer lives: each resolution is one graph."""

import weakref

import torch

GRAPHS = 64
"""Resolutions that a patched transformer is compiled for before torch.compile gives up; PyTorch's limit is 8."""
_owners: "weakref.WeakSet[object]" = weakref.WeakSet()
_limits_before: list[int] = []
"""PyTorch's limit while there are owners."""


def allow_graphs(owner: object) -> None:
    """Raise PyTorch's limit of graphs, which knows no single models, in this thread as long as ``owner`` lives."""
    config = torch._dynamo.config
    if not _owners and config.recompile_limit < GRAPHS:
        _limits_before.append(config.recompile_limit)
        config.recompile_limit = GRAPHS
    weakref.finalize(owner, _restore_limit)  # before the set knows it, which then forgets it first
    _owners.add(owner)


def give_back_graphs(owner: object) -> None:
    """Restore PyTorch's limit once no owner is left, unless it was changed since."""
    _owners.discard(owner)
    _restore_limit()


def _restore_limit() -> None:
    if not _owners and _limits_before:
        before = _limits_before.pop()
        if torch._dynamo.config.recompile_limit == GRAPHS:
            torch._dynamo.config.recompile_limit = before
