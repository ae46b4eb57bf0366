"""How many graphs torch.compile may make: of a patched transformer it makes one for every resolution."""

import weakref

import torch

GRAPHS = 64
"""Resolutions that a patched transformer is compiled for before torch.compile gives up; PyTorch's limit is 8."""

_owners: "weakref.WeakSet[object]" = weakref.WeakSet()
_limits_before: list[int] = []
"""PyTorch's limit while there are owners."""


def allow_graphs(owner: object) -> None:
    """Raise PyTorch's limit, which knows no single models, as long as ``owner`` lives.

    PyTorch keeps it for every thread by itself: this raises it in the calling one.

    Args:
        owner: of which every patched transformer has one of its own, and a copy of it as well.
    """
    config = torch._dynamo.config
    if not _owners and config.recompile_limit < GRAPHS:
        _limits_before.append(config.recompile_limit)
        config.recompile_limit = GRAPHS
    weakref.finalize(owner, _give_back)  # before the set knows it, which then forgets it first
    _owners.add(owner)


def give_back_graphs(owner: object) -> None:
    """Once no owner is left, PyTorch's limit is that of before, unless it was changed since."""
    _owners.discard(owner)
    _give_back()


def _give_back() -> None:
    if not _owners and _limits_before:
        before = _limits_before.pop()
        if torch._dynamo.config.recompile_limit == GRAPHS:
            torch._dynamo.config.recompile_limit = before
