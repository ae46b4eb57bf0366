"""Bytes that a process sends: every collective is seen that PyTorch dispatches, forward and backward."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_", "recv_any_source_"}
_KINDS = {
    "all-reduce": ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "allreduce_"),
    "all-gather": (
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
        "allgather_",
        "_allgather_base_",
        "allgather_into_tensor_coalesced_",
    ),
    "reduce-scatter": (
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_out",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
    ),
    "all-to-all": ("all_to_all_single", "alltoall_base_", "alltoall_"),
    "broadcast": ("broadcast", "broadcast_"),
    "send": ("send",),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_GIVEN = ("input", "inputs", "input_tensor", "input_tensors", "tensors")
"""What operators call that which a process brings to a collective."""
_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "all-gather": lambda size: size - 1,
    "reduce-scatter": lambda size: (size - 1) / size,
    "broadcast": lambda size: (size - 1) / size,
    "send": lambda size: 1,
}


@dataclass(frozen=True)
class Sent:
    """One collective, as one process takes part in it."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, broadcast or send."""
    group: str
    """Name of the process group."""
    processes: int
    """Of the group."""
    bytes: float
    """That this process sends."""
    delivered: int = 0
    """Bytes of the tensors that it makes; 0 where it fills tensors that are given."""


class Traffic(TorchDispatchMode):
    """Within the context every collective of this thread, and of its backward passes, is kept.

    No byte is looked at that really passes: what is told is what an algorithm sends that wastes no bandwidth, of P
    processes, for each of them. All-reduce 2 (P - 1) / P of the tensor; all-gather P - 1 times the own part;
    reduce-scatter (P - 1) / P of the tensor that is brought; all-to-all, and permutations, which are of this kind, the
    rows that others are due to get; broadcast (P - 1) / P of the tensor on average, since in a chain all but the last
    hand it on. ``tests/parallel/test_traffic.py`` compares this with the bytes that pass gloo's loopback device.

    Waiting, barriers and receiving send nothing.

    Raises:
        NotImplementedError: on a collective that is none of these.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []

    @property
    def bytes(self) -> int:
        """That this process sent in all."""
        return round(sum(one.bytes for one in self.sent))

    def bytes_of(self, group: str) -> int:
        """That this process sent within one process group, by its name."""
        return round(sum(one.bytes for one in self.sent if one.group == group))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES and func._schema.name.split("::")[1] not in _SENDS_NOTHING:
            names = [argument.name for argument in func._schema.arguments]
            sent = _sent(func, dict(zip(names, args, strict=False)) | (kwargs or {}))
            output = func(*args, **(kwargs or {}))
            made = [] if func._schema.is_mutable else tree_leaves(output)
            self.sent.append(replace(sent, delivered=_bytes(x for x in made if isinstance(x, torch.Tensor))))
            return output
        return func(*args, **(kwargs or {}))


def _sent(func: Any, given: Mapping[str, Any]) -> Sent:
    name = func._schema.name.split("::")[1]
    if name not in _KIND_OF:
        raise NotImplementedError(
            f"What {func} sends is not counted; collectives of these kinds are: {', '.join(_KINDS)}."
        )
    kind, group = _KIND_OF[name], _group(given)
    brought: Sequence[torch.Tensor] = tree_leaves(next(given[part] for part in _GIVEN if part in given))
    size = group.size()
    if kind == "all-to-all":
        sent = float(_due_to_others(brought, given.get("input_split_sizes"), group))
    else:
        sent = _FACTORS[kind](size) * _bytes(brought)
    return Sent(kind, group.group_name, size, sent)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.itemsize for x in tensors)


def _group(given: Mapping[str, Any]) -> ProcessGroup:
    """Of an operator, which has its name or itself, perhaps as TorchScript wraps it."""
    group = given.get("group_name", given.get("process_group"))
    if isinstance(group, str):
        found: ProcessGroup = cast(Any, dist.distributed_c10d)._resolve_process_group(group)
        return found
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


def _due_to_others(brought: Sequence[torch.Tensor], rows: Iterable[int] | None, group: ProcessGroup) -> int:
    """Bytes of all rows but those that stay here; a tensor for each process, or one with so many rows for each."""
    rank, parts = group.rank(), [x.numel() * x.itemsize for x in brought]
    if len(parts) == 1 < group.size():
        counts = list(rows or ())
        (whole,) = parts
        if not counts:
            return whole - whole // group.size()
        return whole * (sum(counts) - counts[rank]) // max(1, sum(counts))
    return sum(parts) - parts[rank]
