"""What a test of every family is given of one of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class FamilyCase:
    """A tiny model with random weights, its inputs and its pipeline."""

    transformer: Callable[[], nn.Module]
    inputs: Callable[..., dict[str, Any]]
    """Takes ``batch``, ``ragged`` and ``seed``; gives keyword arguments of the transformer's forward."""
    pipeline: Callable[[], Any]
    call: Mapping[str, Any]
    """Arguments of a short call of the pipeline."""
    blocks: tuple[int, ...]
    """Block counts that divide ``grid``."""
    grid: tuple[int, ...]
    """Token grid of the usual inputs."""
    ragged_grid: tuple[int, ...]
    """Token grid of inputs with ``ragged=True``."""
    attentions: tuple[str, ...]
    """Names of the self-attentions over the grid, in order."""
    latents: tuple[int, ...] = ()
    """Latents (C, ...) of the usual grid, as the family's files have them."""
    compiles_whole: bool = True
    """Whether the model's own forward compiles to one graph."""
    extra: tuple[int, int] = (0, 0)
    """Tokens before and after the grid's in the sequence that the attention works on, of the usual inputs."""
    whole_text: bool = False
    """Whether the model takes text of its full length alone."""
