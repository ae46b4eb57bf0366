"""The processes that share an attention, really there or pretended: meshes and groups as diffusers makes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...attention.parallel.place import Parallel
from ...patching.parallel import parallel_of


@dataclass(frozen=True)
class Layout:
    """How many processes share an attention, and how."""

    ring: int = 1
    """Processes that keep their tokens."""
    ulysses: int = 1
    """Processes that exchange tokens for heads."""

    @property
    def processes(self) -> int:
        """All of them."""
        return self.ring * self.ulysses

    def __str__(self) -> str:
        if self.processes == 1:
            return "alone"
        named = (("ring", self.ring), ("Ulysses", self.ulysses))
        return " x ".join(f"{name} {count}" for name, count in named if count > 1)


@dataclass(frozen=True)
class World:
    """What an attention must be told of the processes."""

    layout: Layout
    config: Any
    """diffusers' ``ParallelConfig``."""
    parallel: Parallel
    """The same in the words of :func:`mhla_diffusers.attention.mhla_attention`."""


def make_world(layout: Layout) -> World:
    """Of the default process group, which has been made and has as many processes."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    degrees = (layout.ring, layout.ulysses)
    mesh = dist.device_mesh.init_device_mesh("cpu", degrees, mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses))
    config.setup(dist.get_rank(), layout.processes, torch.device("cpu"), mesh=mesh)
    parallel = parallel_of(config)
    if parallel is None:
        raise AssertionError("a configuration of context parallelism was just made")
    return World(layout, config, parallel)


@contextmanager
def pretended(layout: Layout, rank: int = 0) -> Iterator[World]:
    """Within the context this process is one of several that are not there: what it would send can be counted.

    With tensors on the meta device nothing is computed and nothing held, so that no size is too large.

    Args:
        layout: at least two processes.
        rank: which of them this one is.

    Raises:
        RuntimeError: it is one of several already.
    """
    # torch's own backend for such processes, which it has for tests
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("This process is one of several already; count in a process of its own, without torchrun.")
    dist.init_process_group("fake", rank=rank, world_size=layout.processes, store=FakeStore())
    try:
        yield make_world(layout)
    finally:
        dist.destroy_process_group()
