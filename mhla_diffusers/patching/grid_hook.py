"""Tell the attentions of a patched transformer the token grid of its input."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..families import Family
from ..layer import TokenGrid


class TokenGridHook:
    """Forward pre-hook of a patched transformer: notes the token grid of its input for all layers.

    Under gradient checkpointing a layer runs again during the backward pass and finds the grid of the latest forward;
    so run forward and backward of one resolution before the forward of another.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.token_grid = TokenGrid()
        self.handle: RemovableHandle | None = None

    def __call__(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the grid off ``hidden_states``, the first argument of every supported transformer."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        for axis in range(2, hidden_states.ndim):
            torch._dynamo.mark_static(hidden_states, axis)
        self.token_grid.shape = tuple(int(size) for size in self.family.token_grid(transformer, hidden_states))


def find_grid_hook(transformer: nn.Module) -> TokenGridHook | None:
    """The hook that a patched transformer has."""
    hooks = transformer._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, TokenGridHook)), None)
