"""Context parallelism of diffusers, as a patched transformer learns of it.

``transformer.enable_parallelism(config=ContextParallelConfig(...))`` sets up the processes, splits the tokens before
the first block and tells every attention processor.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..attention.parallel.collectives import gathered
from ..attention.parallel.place import Group, Parallel
from ..families import Family
from .layer import MHLALayer, layer_of


def parallel_of(config: Any) -> Parallel | None:
    """The processes of a diffusers ``ParallelConfig`` that has been set up; None without context parallelism."""
    settings = getattr(config, "context_parallel_config", None)
    if settings is None:
        return None
    # registers what PyTorch's functional collectives do under torch.compile
    from torch.distributed import _functional_collectives  # noqa: F401

    meshes = settings._ring_mesh, settings._ulysses_mesh, settings._flattened_mesh
    groups = (Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()) for mesh in meshes)
    ring, ulysses, whole = groups
    return Parallel(ring, ulysses, whole, settings.ring_anything or settings.ulysses_anything)


class Processes:
    """What the hooks of one patched transformer know of the processes that it runs on."""

    def __init__(self, transformer: nn.Module, family: Family) -> None:
        self.transformer, self.family = transformer, family
        self.parallel: Parallel | None = None
        self._met: Any = None
        """Configuration under which the processes have compared their patches."""
        self._set_constant()

    def __getstate__(self) -> dict[str, Any]:
        """For a copied or pickled transformer."""
        return {name: value for name, value in vars(self).items() if name != "meet"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of such a one."""
        vars(self).update(state)
        self._set_constant()

    def _set_constant(self) -> None:
        """:meth:`_meet`, which torch.compile runs once, while it traces a graph, and not in it."""

        def meet() -> None:
            self._meet()

        self.meet = meet
        vars(meet)["_dynamo_marked_constant"] = True

    def _meet(self) -> None:
        """At the first call under a configuration: learn who the processes are, and that they are patched alike."""
        config: Any = getattr(self.transformer, "_parallel_config", None)
        if config is self._met:
            return
        self.parallel = parallel_of(config)
        if self.parallel is not None:
            compare_patches(self.transformer, self.parallel)
        self._met = config

    def check(self, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Of one call.

        Raises:
            ValueError: tokens or heads that the processes do not divide, or a call that cannot be split.
        """
        parallel = self.parallel
        if parallel is None:
            return
        reason = self.family.why_not_split(arguments, grid)
        if type(getattr(self.transformer, "_cache_config", None)).__name__ == "FirstBlockCacheConfig":
            reason = (
                "First Block Cache decides by the tokens that a process has, so that processes may decide differently"
            )
        if reason is not None:
            raise ValueError(f"This call cannot run under context parallelism: {reason}.")
        parallel.shares(math.prod(grid))
        context = arguments.get("encoder_hidden_states")
        for _, layer in _layers(self.transformer):
            parallel.head_counts(layer.heads)
            if layer.adapter.has_extra and isinstance(context, torch.Tensor):
                parallel.shares(context.shape[1], "tokens of text")


def _layers(transformer: nn.Module) -> Iterable[tuple[str, MHLALayer]]:
    found = ((name, layer_of(module)) for name, module in transformer.named_modules() if hasattr(module, "mhla"))
    return ((name, layer) for name, layer in found if layer is not None)


def compare_patches(transformer: nn.Module, parallel: Parallel) -> None:
    """Compare settings and weights of the patch over the processes.

    Raises:
        ValueError: they are not the same on all.
    """
    layers = list(_layers(transformer))
    settings = json.dumps([(name, layer.config.to_dict()) for name, layer in layers], default=str).encode()
    if any(parameter.is_meta for _, layer in layers for parameter in layer.parameters()):
        return  # nothing is there to be compared
    config: Any = transformer._parallel_config
    device = config.context_parallel_config._device  # of their collectives; weights may be offloaded at this moment
    digests = torch.tensor([[_digest([settings]), _digest(_weights(layers))]], device=device)
    everyone = gathered(digests, [1] * parallel.whole.size, parallel.whole.name).tolist()
    for what, found in zip(("settings or layers", "weights"), zip(*everyone, strict=True), strict=True):
        different = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if different:
            raise ValueError(
                f"The processes are patched differently: {what} of the patch of process "
                f"{', '.join(map(str, different))} are not those of process 0. Every process must apply or load the "
                "same patch."
            )


def _weights(layers: Iterable[tuple[str, MHLALayer]]) -> Iterable[bytes]:
    """Of the layers; not of weights of which every process holds a part, as under FSDP."""
    from torch.distributed.tensor import DTensor

    for _, layer in layers:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if not isinstance(tensor, DTensor) and not tensor.is_meta:
                yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> int:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest()[:7], "big")
