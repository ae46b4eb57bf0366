"""Context parallelism of diffusers, as a patched transformer learns of it.

``transformer.enable_parallelism(config=ContextParallelConfig(...))`` sets up the processes, splits the tokens before
the first block and sets its configuration on every attention processor.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..attention.parallel.collectives import gathered
from ..attention.parallel.place import Group, Parallel
from ..families import Family
from .layer import PatchedLayer
from .steps import CACHES_BY_CONTENT, step_cache


def parallel_of(config: Any) -> Parallel | None:
    """Return the processes of a diffusers ``ParallelConfig`` that has been set up; None without context parallelism."""
    settings = getattr(config, "context_parallel_config", None)
    if settings is None:
        return None
    # registers what PyTorch's functional collectives do under torch.compile
    from torch.distributed import _functional_collectives  # noqa: F401

    meshes = settings._ring_mesh, settings._ulysses_mesh, settings._flattened_mesh
    ring, ulysses, whole = (Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()) for mesh in meshes)
    return Parallel(ring, ulysses, whole, settings.ring_anything or settings.ulysses_anything)


def refuse_deciding_cache(transformer: nn.Module) -> None:
    """Raise if a step cache decides by the tokens of one process.

    Raises:
        ValueError: naming it and what to do instead.
    """
    cache = step_cache(transformer)
    if cache is not None and cache[0] in CACHES_BY_CONTENT:
        raise ValueError(
            f"This call cannot run under context parallelism: {cache[0]} decides by the tokens that a process has, "
            f"so that processes may decide differently. Call {cache[1]}; MagCache and TaylorSeer, which go by the "
            "number of the step, decide alike everywhere."
        )


def check_split(
    family: Family,
    layers: Mapping[str, PatchedLayer],
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    parallel: Parallel,
) -> None:
    """Raise unless the tokens of a call can be split over the processes.

    Raises:
        ValueError: tokens or heads that the processes do not divide, or a call that cannot be split.
    """
    reason = family.forward.why_not_split(arguments, grid)
    if reason is not None:
        raise ValueError(f"This call cannot run under context parallelism: {reason}.")
    parallel.shares(math.prod(grid))
    context = arguments.get("encoder_hidden_states")
    for layer in layers.values():
        parallel.head_counts(layer.heads)
        if layer.adapter.has_extra and isinstance(context, torch.Tensor):
            parallel.shares(context.shape[1], "tokens of text")


def compare_patches(layers: Mapping[str, PatchedLayer], config: Any, parallel: Parallel) -> None:
    """Compare settings and weights of the patch over the processes.

    Args:
        layers: of the patch, by name.
        config: diffusers' ``ParallelConfig``.
        parallel: its processes.

    Raises:
        ValueError: they are not the same on all.
    """
    from torch.distributed.tensor import DTensor

    if any(parameter.is_meta for layer in layers.values() for parameter in layer.parameters()):
        return  # nothing is there to be compared
    settings = json.dumps([(name, layer.config.to_dict()) for name, layer in layers.items()], default=str).encode()
    weights = hashlib.sha256()
    for layer in layers.values():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if not isinstance(tensor, DTensor):  # sharded over the processes, as under FSDP
                weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    numbers = [int.from_bytes(one.digest()[:7], "big") for one in (hashlib.sha256(settings), weights)]
    device = config.context_parallel_config._device  # of their collectives; weights may be offloaded at this moment
    digests = torch.tensor([numbers], device=device)
    everyone = gathered(digests, [1] * parallel.whole.size, parallel.whole.name).tolist()
    for what, found in zip(("settings or layers", "weights"), zip(*everyone, strict=True), strict=True):
        different = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if different:
            raise ValueError(
                f"The processes are patched differently: {what} of the patch of process "
                f"{', '.join(map(str, different))} are not those of process 0. Every process must apply or load the "
                "same patch."
            )
